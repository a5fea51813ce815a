"""Sides: the paths that are read as one, and those that are refused."""

from pathlib import Path

import numpy as np
import pytest

from dlrm_bench.bench.compare.sides import read_side, rungs_of
from tests.bench.ladder.made_ladders import made as made
from tests.bench.made_records import configured, edit, profile, recorded_runs, write
from tests.bench.mlperf.test_published_logs import DLRMV4_LOGS, small_log

RUNS = recorded_runs()


def test_logs_that_are_damaged_or_unfinished_say_so(tmp_path: Path) -> None:
    (tmp_path / "result_0.txt").write_text(small_log() + ":::MLLOG {\n")
    (tmp_path / "result_1.txt").write_text(small_log().replace("success", "aborted"))
    side = read_side(tmp_path)
    assert len(side.series) == 2
    assert [text.partition(": ")[2] for text in side.warnings] == ["1 malformed lines", "the run's status is aborted"]
    (tmp_path / "cut.txt").write_text("".join(small_log().splitlines(keepends=True)[:6]))
    with pytest.raises(ValueError, match=r"cut\.txt has no finished run: without run_stop"):
        read_side(tmp_path / "cut.txt")


def test_profiled_and_unfinished_runs_are_left_out_of_a_folder(tmp_path: Path) -> None:
    write(tmp_path / "a" / "x", RUNS[0])
    write(tmp_path / "a" / "x-host", RUNS[0], profile=profile())
    (tmp_path / "a" / "cut").mkdir()
    (tmp_path / "a" / "cut" / "result_0.txt").touch()
    side = read_side(tmp_path / "a")
    assert len(side.series) == 1
    assert any("unfinished runs left out: cut" in text for text in side.warnings)
    assert any("profiled runs left out: x-host" in text for text in side.warnings)
    with pytest.raises(ValueError, match="x-host is a profiled run"):
        read_side(tmp_path / "a" / "x-host")


def test_what_is_no_side(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="absent does not exist"):
        read_side(tmp_path / "absent")
    with pytest.raises(ValueError, match="holds no run"):
        read_side(tmp_path)
    record = write(tmp_path / "x", RUNS[0])
    edit(record, latency_ms=None, warmup_iterations=260)
    with pytest.raises(ValueError, match="ended within its warm-up"):
        read_side(record)
    edit(record, schema=7)
    with pytest.raises(ValueError, match="schema 7"):
        read_side(tmp_path)


def test_a_rung_is_a_side_of_all_its_rounds(made: Path) -> None:
    side = read_side(made / "b")
    assert side.label == str(made / "b")
    assert len(side.series) == 4
    assert side.finished == sorted(side.finished)
    assert read_side(made.parent / f"{made.name}*" / "b").label == side.label  # which no shell expands
    rungs = rungs_of(made)
    assert rungs is not None
    assert list(rungs) == ["a", "b", "c"]
    assert np.array_equal(rungs["b"].series, side.series)
    assert rungs_of(made / "00-a") is None
    with pytest.raises(ValueError, match=r"has no rung 'd': choose one of a, b, c"):
        read_side(made / "d")
    with pytest.raises(ValueError, match=r"is a ladder, .*: name one of its rungs, such as .*/a \(it has a, b, c\)"):
        read_side(made)
    assert len(read_side(made / "00-a").series) == 1  # a member is a record like any other


def test_an_interrupted_ladder_has_the_runs_that_ended(made: Path) -> None:
    """Its rungs are sides; its folder is none, which would mix them."""
    (made / "ladder.json").unlink()
    for member in ("03-b", *(f"{number:02d}-c" for number in range(4))):
        (made / member / "run.json").unlink()
    side = read_side(made / "b")
    assert (len(side.series), len(read_side(made / "a").series)) == (3, 4)
    assert f"{made} was interrupted, and has 3 run(s) of b" in side.warnings
    rungs = rungs_of(made)
    assert rungs is not None
    assert list(rungs) == ["a", "b"]
    with pytest.raises(ValueError, match=r"interrupted before a run of c ended: resume it with .* --resume"):
        read_side(made / "c")
    with pytest.raises(ValueError, match=r"is a ladder, .* \(it has a, b, c\)"):
        read_side(made)
    for run in made.glob("*/run.json"):
        run.unlink()
    with pytest.raises(ValueError, match="interrupted before its first run ended"):
        rungs_of(made)


def test_one_side_has_one_batch_size(tmp_path: Path) -> None:
    write(tmp_path / "x" / "run0", RUNS[0])
    write(tmp_path / "x" / "run1", RUNS[1], config=configured(local_batch_size=256))
    with pytest.raises(ValueError, match=r"several global batch sizes \(1024, 512\)"):
        read_side(tmp_path / "x")


def test_logs_of_another_benchmark_are_refused(tmp_path: Path) -> None:
    log = tmp_path / "result_0.txt"
    log.write_text(small_log().replace("dlrm_dcnv2", "bert"))
    with pytest.raises(ValueError, match=r"result_0\.txt is a log of bert, another benchmark"):
        read_side(log)
    log.write_text("".join(line for line in small_log().splitlines(keepends=True) if "submission" not in line))
    assert any("does not name its benchmark" in warning for warning in read_side(log).warnings)


def test_the_references_logs_of_dlrmv4_are_a_side(tmp_path: Path) -> None:
    side = read_side(DLRMV4_LOGS / "gbs_32768")
    assert (side.global_batch_size, side.settings["benchmark"]) == (32768, ["dlrmv4"])
    assert side.metrics()["mean"] == pytest.approx(2561.84, abs=0.01)
    assert any("unfinished" in warning for warning in side.warnings)
    (path,) = (DLRMV4_LOGS / "gbs_8192").glob("*.log")
    (tmp_path / "result_0.txt").write_text(path.read_text())
    (tmp_path / "result_1.txt").write_text(small_log())
    with pytest.raises(ValueError, match=r"logs of several benchmarks, .* of dlrmv4 and .* of dlrm_dcnv2"):
        read_side(tmp_path)
