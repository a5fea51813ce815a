"""Records over months: sittings, references, what is judged, changes, the printed page and the HTML one."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlrm_bench.bench.cli import main
from dlrm_bench.bench.history.sittings import read_histories
from dlrm_bench.bench.records.record import read_record
from tests.bench.made_records import H200, configured, edit, write

MONTH = 60 * 24 * 30


def run(folder: Path, commit: str, ms: float, minute: int, **changes: Any) -> None:
    """A run of a commit, which has a source of its own."""
    git = {"commit": commit, "dirty": False, "source": f"of-{commit}"}
    write(folder / f"{minute:07d}", np.full(120, ms), minute=minute, git=git, **changes)


def sitting(folder: Path, month: int, commit: str, factor: float, machine: float = 1.0, reference: str = "old") -> None:
    """Reference, commit, commit, reference: ten minutes of a month, on a machine that takes `machine` times as long."""
    rng = np.random.default_rng(month)
    for place, name in enumerate((reference, commit, commit, reference)):
        ms = 10 * machine * (factor if name == commit else 1) * np.exp(rng.normal(0, 0.002))
        run(folder, name, ms, MONTH * month + 3 * place)


def months(folder: Path, slower_from: int = 8, count: int = 14) -> Path:
    """Months in which the machine gets slower and faster by more than the change of 3 %."""
    for month in range(count):
        sitting(folder, month, f"c{month:02d}", 1.03 if month >= slower_from else 1.0, 1 + 0.2 * (month % 3))
    return folder


def test_a_change_is_found_beside_the_reference_whatever_the_machine_does(tmp_path: Path) -> None:
    (history,) = read_histories(months(tmp_path))
    assert history.reference == "old"
    assert [point.program for point in history.points] == [f"c{month:02d}" for month in range(14)]
    assert len(history.references) == 14
    (change,) = history.changes
    assert (change.at, change.low, change.high) == (8, 8, 8)
    value, low, high = change.estimate.speedup()
    assert low < 1 / 1.03 < high
    assert value == pytest.approx(1 / 1.03, abs=0.002)
    medians = [np.log(point.side.metrics()["p50"]) for point in history.points]
    assert np.std(medians) > 0.06, "by themselves, times say little"


def test_what_has_no_reference_is_shown_and_not_judged(tmp_path: Path) -> None:
    months(tmp_path)
    run(tmp_path, "alone", 50.0, 15 * MONTH)
    run(tmp_path, "later", 10.0, 13 * MONTH + 3 * 3 + 61)  # an hour after the reference
    (history,) = read_histories(tmp_path)
    because = {point.program: [*point.because] for point in history.points if point.because}
    assert because == {name: ["no run of the reference in its sitting"] for name in ("alone", "later")}
    assert len(history.judged) == 14
    (wider,) = read_histories(tmp_path, gap_minutes=90)
    assert "later" in {point.program for point in wider.points if point.estimate is not None}


def test_another_machine_is_another_sitting(tmp_path: Path) -> None:
    months(tmp_path, count=2)
    other = {**H200, "gpu_uuids": [f"other-{i}" for i in range(8)]}
    run(tmp_path, "elsewhere", 10.0, MONTH + 4, machine=other)
    (history,) = read_histories(tmp_path)
    (point,) = [point for point in history.points if point.program == "elsewhere"]
    assert point.reference is None


def test_blocks_and_shared_references_are_not_judged(tmp_path: Path) -> None:
    for i, name in enumerate(("old", "old", "new", "new")):
        run(tmp_path, name, 10.0 + i / 100, i)
    for i, name in enumerate(("old", "x", "y", "y", "x", "old")):
        run(tmp_path, name, 10.0 + i / 100, MONTH + i)
    (history,) = read_histories(tmp_path, reference="old")
    because = {point.program: " ".join(point.because) for point in history.points}
    assert "all runs of A came before those of the other side" in because["new"]
    assert "2 programs of its sitting share the reference's runs" in because["x"]
    assert because["x"] == because["y"]
    assert all(point.estimate is not None for point in history.points)
    assert history.judged == []


def test_configurations_and_kinds_of_machines_are_apart(tmp_path: Path) -> None:
    months(tmp_path, count=2)
    run(tmp_path, "c00", 5.0, 90, config=configured(local_batch_size=64))
    run(tmp_path, "c00", 5.0, 91, machine={**H200, "gpu": "NVIDIA B200"})
    run(tmp_path, "c00", 5.0, 92, config=configured(run_id="other"))  # the same configuration
    histories = read_histories(tmp_path)
    assert [len(history.records) for history in histories] == [9, 1, 1]
    assert "64 a rank" in histories[1].name
    assert "B200" in histories[2].name


def test_a_field_that_is_younger_than_a_record_splits_no_history(tmp_path: Path) -> None:
    for i, missing in enumerate(("", "train_metrics", "data.reader_threads", "data")):
        run(tmp_path, f"c{i}", 5.0, 90 + i)
        folder = tmp_path / f"{90 + i:07d}"
        config = read_record(folder).run["config"]
        block, _, name = missing.rpartition(".")
        (config[block] if block else config).pop(name, None)
        edit(folder, config=config)
    run(tmp_path, "c4", 5.0, 94, config=configured(train_metrics=True))
    run(tmp_path, "c5", 5.0, 95)
    edit(
        tmp_path / "0000095", config={**read_record(tmp_path / "0000095").run["config"], "preset": "of-another-version"}
    )
    assert [len(history.records) for history in read_histories(tmp_path)] == [5, 1]


def test_the_reference_is_named_or_that_of_most_sittings(tmp_path: Path) -> None:
    for month in range(3):
        sitting(tmp_path, month, f"c{month}", 1.0)
    sitting(tmp_path, 3, "c3", 1.0, reference="c0")
    assert read_histories(tmp_path)[0].reference == "old"
    (history,) = read_histories(tmp_path, reference="of-c0")
    assert history.reference == "c0"
    assert {point.program for point in history.judged} == {"old", "c3"}
    with pytest.raises(ValueError, match=r"--reference 0123: no record in .* is of that commit or source"):
        read_histories(tmp_path, reference="0123")
    with pytest.raises(ValueError, match="holds no timed run"):
        read_histories(tmp_path / "0000000" / "nothing")


def test_programs_without_a_commit_and_with_changes_are_told_apart(tmp_path: Path) -> None:
    for i, git in enumerate(
        (
            {"commit": "a" * 40, "dirty": False, "source": "s0"},
            {"commit": "a" * 40, "dirty": True, "source": "s1"},
            {"commit": None, "dirty": None, "source": "s2"},
        )
    ):
        write(tmp_path / str(i), np.full(60, 1.0), minute=i, git=git)
    (history,) = read_histories(tmp_path)
    assert history.reference == "aaaaaaaaaaaa"
    assert [point.program for point in history.points] == ["aaaaaaaaaaaa+", "source s2"]
    copied = tmp_path / "copy"
    copied.mkdir()
    for file in (tmp_path / "2").iterdir():
        (copied / file.name).write_bytes(file.read_bytes())
    (again,) = read_histories(tmp_path)
    assert len(again.records) == 3


def test_the_command_prints_and_writes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    months(tmp_path / "records")
    assert main(["history", str(tmp_path / "records"), "--out", str(tmp_path / "page")]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "reference: old, in 14 sittings; 14 points are judged" in said
    assert re.search(r"slower from c08 \(2027-07-19\) on, proven \(p = 0\.00\d\): 0\.97\d \(.*\) times as fast", said)
    assert "as up to c07. dlrm-bench bisect c07 c08 -- --preset=launch-bound --pipeline=torchrec" in said
    page = (tmp_path / "page" / "index.html").read_text()
    assert "slower from c08" in page
    assert page.count("<td>c0") == 10
    assert "<style>" in page
    assert page.count("data:image/png") == 1
    assert "http" not in page.replace("http-equiv", "")
    assert sorted(path.name for path in (tmp_path / "page").iterdir()) == ["history-0.png", "index.html", "report.json"]


def test_too_little_to_tell_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    months(tmp_path / "few", count=3)
    assert main(["history", str(tmp_path / "few")]) == 0
    assert "changes are looked for in 8 points and more" in " ".join(capsys.readouterr().out.split())
    months(tmp_path / "same", slower_from=99, count=9)
    assert main(["history", str(tmp_path / "same")]) == 0
    assert "no change is proven" in " ".join(capsys.readouterr().out.split())
    run(tmp_path / "one", "c", 1.0, 0)
    assert main(["history", str(tmp_path / "one"), "--out", str(tmp_path / "page")]) == 0
    assert "nothing is judged" in " ".join(capsys.readouterr().out.split())
    assert main(["history", str(tmp_path / "one"), "--gap-minutes", "-1"]) == 2
    assert main(["history", str(tmp_path / "same"), "--gap-minutes", "inf"]) == 0
    assert "in 1 sittings" in " ".join(capsys.readouterr().out.split())
    edit(tmp_path / "one" / "0000000", host={"cpu_ms": 1.0})
    assert read_record(tmp_path / "one" / "0000000").run["host"] is not None
    assert main(["history", str(tmp_path / "one")]) == 2
