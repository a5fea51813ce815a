"""The sources that a report finds in folders: everything, each once, whatever links and copies there are."""

import json
import shutil
from pathlib import Path

import pytest

from dlrm_bench.bench.records.ladder import LADDER_JSON
from dlrm_bench.bench.records.record import Record, read_record
from dlrm_bench.bench.report import sources as sources_module
from dlrm_bench.bench.report.sources import Sources, find, read_sources
from tests.bench.made_records import recorded_runs, write
from tests.bench.report.made_results import make_results

RUNS = recorded_runs()


def collect(*paths: Path) -> Sources:
    return read_sources(find(paths), lambda number, path: None)


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return make_results(tmp_path / "results", monkeypatch)


def counts(sources: Sources) -> list[int]:
    found = (sources.ladders, sources.timed, sources.profiled, sources.limits, sources.logs)
    return [len(kind) for kind in found]


def test_everything_is_found(results: Path) -> None:
    sources = collect(results)
    assert counts(sources) == [1, 2, 1, 1, 1]
    assert [record.run["id"] for record in sources.timed] == ["timed-2", "timed-1"]
    (ladder,) = sources.ladders
    assert {rung: [r.run["id"] for r in records] for rung, records in ladder.timed.items()} == {
        rung: [f"0{n}-{rung}" for n in range(3)] for rung in ("stock", "fast", "same")
    }
    assert {rung: record.run["id"] for rung, record in ladder.profiled.items()} == {
        "stock": "host-stock",
        "fast": "host-fast",
    }
    assert sources.notes() == [f"{results / 'unfinished'} is an unfinished run and is left out"]


def test_each_record_is_read_once(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []

    def counted(folder: Path) -> Record:
        read.append(folder)
        return read_record(folder)

    monkeypatch.setattr(sources_module, "read_record", counted)
    shown: list[Path] = []
    read_sources(find([results]), lambda number, path: shown.append(path))
    assert len(read) == len(set(read)) == 3 * 3 + 2 + 3
    assert shown == [
        results / name for name in ("ladder", "limits", "mlperf", "profiled-<b>", "timed-1", "timed-2", "unfinished")
    ]


def test_links_count_nothing_twice_and_loops_end(results: Path) -> None:
    (results / "a-latest").symlink_to("timed-2")
    (results / "latest-ladder").symlink_to("ladder")
    (results / "loop").symlink_to(".")
    (results / "itself").symlink_to("itself")
    (results / "gone").symlink_to("nowhere")
    (results / "deep").mkdir()
    (results / "deep" / "up").symlink_to("../..")
    sources = collect(results, results / "timed-1", results / "a-latest", results)
    assert counts(sources) == [1, 2, 1, 1, 1]
    assert {record.folder.name for record in sources.timed} == {"timed-1", "timed-2"}
    assert sources.copies == []


def test_copies_count_once_and_are_named(results: Path) -> None:
    for name in ("timed-1", "ladder", "limits", "profiled-<b>"):
        shutil.copytree(results / name, results / "z-copies" / name)
    shutil.copytree(results / "ladder" / "01-fast", results / "z-copies" / "member")
    sources = collect(results)
    assert counts(sources) == [1, 2, 1, 1, 1]
    copies = results / "z-copies"
    assert set(sources.copies) == {
        f"{copies / 'timed-1'} holds the same run as {results / 'timed-1'}, and counts once",
        f"{copies / 'profiled-<b>'} holds the same run as {results / 'profiled-<b>'}, and counts once",
        f"{copies / 'member'} holds the same run as {results / 'ladder' / '01-fast'}, and counts once",
        f"{copies / 'ladder'} holds the same runs as the ladder ladder, and counts once",
        f"{copies / 'limits'} holds the same limits as limits, and counts once",
    }


def test_a_folder_may_have_another_name_than_its_id(results: Path) -> None:
    (results / "ladder").rename(results / "01-what-it-shows")
    (results / "limits").rename(results / "02-ceilings")
    sources = collect(results)
    assert [ladder.name for ladder in sources.ladders] == ["01-what-it-shows"]
    assert sources.ladders[0].ladder["id"] == "ladder"
    assert [limits["id"] for limits in sources.limits] == ["02-ceilings"]


def test_ladders_of_one_folder_name_are_told_apart(results: Path) -> None:
    other = results / "other" / "ladder"
    shutil.copytree(results / "ladder", other)
    ladder = json.loads((other / LADDER_JSON).read_text())
    for member in ladder["order"]:
        shutil.rmtree(other / member)
        write(other / member, RUNS[10], minute=5)
    (other / LADDER_JSON).write_text(json.dumps(ladder))
    assert [ladder.name for ladder in collect(results).ladders] == ["ladder", "ladder (2)"]


def test_unfinished_members_of_a_ladder_are_named(results: Path) -> None:
    for name in ("03-stock", "04-stock"):
        (results / "ladder" / name).mkdir()
    (results / "ladder" / "03-stock" / "result_0.txt").touch()
    assert collect(results).unfinished == [results / "ladder" / "03-stock", results / "unfinished"]


def test_a_run_that_ended_within_its_warm_up_is_named(results: Path) -> None:
    write(results / "short", RUNS[11][:0], minute=9)
    sources = collect(results)
    assert counts(sources) == [1, 2, 1, 1, 1]
    assert f"{results / 'short'} ended within its warm-up and is left out" in sources.notes()
