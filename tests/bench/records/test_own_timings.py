"""Timings of other programs become records that compare and report take."""

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest

from dlrm_bench.bench.cli import main
from dlrm_bench.bench.compare.comparison import compare_paths
from dlrm_bench.bench.records.own_timings import read_times, write_timings
from dlrm_bench.bench.records.record import read_record

NOW = datetime(2026, 11, 22, tzinfo=UTC)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    times = np.array([[9.0, 1, 3, 2], [9, 2, 1, 2]])
    known = {"hosts": ["node0"], "gpus": 2, "gpu": "NVIDIA H200"}
    write_timings(tmp_path / "x", times, name="mine", samples=10, warmup=1, finished=NOW, machine=known)
    record = read_record(tmp_path / "x")
    assert record.latencies_ms.tolist() == [2, 3, 2]
    assert record.run["created"] == "2026-11-22T00:00:00+00:00"
    assert record.run["config"]["world_size"] == 2
    assert record.run["samples_per_second"] == pytest.approx(10 / (6 / 3) * 1000)  # 6 ms by either clock
    assert (record.run["machine"]["gpu"], record.run["machine"]["driver"]) == ("NVIDIA H200", None)


def test_such_runs_are_compared_and_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    random = np.random.default_rng(0)
    for i, side in enumerate("abbaabba"):
        times = random.gamma(1e3, 1e-3, 200) * (1.1 if side == "b" else 1.0)
        ended = NOW + timedelta(minutes=i)
        write_timings(tmp_path / side / f"run{i}", times, name=side, samples=64, finished=ended)
    (result,) = compare_paths([tmp_path / "a", tmp_path / "b"])
    assert (result.verdict, result.comparison.paired) == ("slower", True)
    assert result.differences == []
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "report")]) == 0
    assert "page " in capsys.readouterr().out


def test_the_command_writes_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "times.csv").write_text("rank 0,rank 1\n" + "0.001,0.0011\n" * 30)
    np.save(tmp_path / "times.npy", np.full(30, 2.0))
    common = ["--name", "mine", "--samples", "64", "--warmup-iterations", "5", "--gpus", "2", "--gpu", "NVIDIA H200"]
    out = str(tmp_path / "records" / "x")
    assert main(["record", str(tmp_path / "times.csv"), "--out", out, "--unit", "s", *common]) == 0
    assert f"record {out}" in capsys.readouterr().out
    record = read_record(Path(out))
    assert record.latencies_ms == pytest.approx(np.full(25, 1.1))
    modified = datetime.fromtimestamp((tmp_path / "times.csv").stat().st_mtime, UTC)
    assert record.run["created"] == modified.isoformat(timespec="seconds")
    assert main(["record", str(tmp_path / "times.npy"), "--out", str(tmp_path / "y"), *common]) == 0
    assert main(["record", str(tmp_path / "times.npy"), "--out", str(tmp_path / "y"), *common]) == 2
    assert "records are never overwritten" in capsys.readouterr().err


def test_what_holds_no_times(tmp_path: Path) -> None:
    (tmp_path / "words").write_text("a b\nc d\n")
    (tmp_path / "ragged").write_text("1 2\n3\n")
    (tmp_path / "empty").touch()
    (tmp_path / "empty.npy").touch()  # of a program that was killed
    for name in ("words", "ragged", "empty", "empty.npy"):
        with pytest.raises(ValueError, match=f"{re.escape(name)} holds no times"):
            read_times(tmp_path / name)
    np.save(tmp_path / "objects.npy", np.array([{"a": 1}]), allow_pickle=True)
    with pytest.raises(ValueError, match=r"objects.npy holds no times: it holds Python objects, not numbers$"):
        read_times(tmp_path / "objects.npy")
    (tmp_path / "text.npy").write_text("1\n2\n")
    with pytest.raises(ValueError, match=r"text.npy holds no times: ") as raised:
        read_times(tmp_path / "text.npy")
    assert "allow_pickle" not in str(raised.value)
    with pytest.raises(ValueError, match=r"absent cannot be read"):
        read_times(tmp_path / "absent")
    with pytest.raises(ValueError, match="--unit 'h' is unknown"):
        read_times(tmp_path / "words", "h")


@pytest.mark.parametrize(
    ("text", "column"),
    [
        ("step,ms\n100,2.5\n200,2.6\n", r"column 1 \(step\)"),
        ('ms,"Epoch"\n2.5,3\n2.6,3\n', r"column 2 \(epoch\)"),
        ("0 2.5\n1 2.6\n2 2.4\n", "column 1"),
        ("2.5 1\n2.6 2\n2.4 3\n", "column 2"),
    ],
)
def test_a_column_that_counts_iterations_is_no_rank(tmp_path: Path, text: str, column: str) -> None:
    (tmp_path / "x.csv").write_text(text)
    with pytest.raises(ValueError, match=rf"x\.csv: {column} counts iterations and is no rank's times: leave it out"):
        read_times(tmp_path / "x.csv")
    np.save(tmp_path / "x.npy", np.arange(5.0))
    with pytest.raises(ValueError, match=r"x\.npy: column 1 counts iterations"):
        read_times(tmp_path / "x.npy")


def test_rows_of_a_spreadsheet_without_cells_are_no_iterations(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text(",\nrank 0,rank 1\n2.5,2.6\n2.7,2.4\n,\n")
    assert read_times(tmp_path / "x.csv").tolist() == [[2.5, 2.7], [2.6, 2.4]]


@pytest.mark.parametrize("text", ["step time\n2.5\n2.6\n", "step time,b\n2.5,1\n2.6,1\n", "1\n3\n2\n", "1\n"])
def test_columns_of_times_are_ranks(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.csv").write_text(text)
    assert len(read_times(tmp_path / "x.csv")) in (1, 2)


def test_what_cannot_be_written(tmp_path: Path) -> None:
    for times, samples, warmup, said in (
        ([1.0, 0.0], 1, 0, r"iteration 1 of rank 0 took 0\.0 ms: times must be positive and finite"),
        ([[1.0, 2.0], [np.nan, 1.0]], 1, 0, "iteration 0 of rank 1 took nan ms"),
        ([1.0], 1, 1, "nothing is left"),
        ([1.0], 0, 0, "samples"),
    ):
        with pytest.raises(ValueError, match=said):
            write_timings(tmp_path / "x", np.array(times), name="x", samples=samples, warmup=warmup)
    with pytest.raises(ValueError, match="machine has no speed"):
        write_timings(tmp_path / "x", np.ones(3), name="x", samples=1, machine={"speed": 1})
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("losses", [np.ones(2), np.ones((1, 3)), np.float32(1)])
def test_losses_of_other_iterations_are_named_and_leave_no_folder(tmp_path: Path, losses: np.ndarray) -> None:
    with pytest.raises(
        ValueError, match=r"^losses are \[.*\] of 3 iterations: give a loss for each, or leave them out"
    ):
        write_timings(tmp_path / "x", np.ones(3), name="x", samples=1, losses=losses)
    assert not (tmp_path / "x").exists()
    write_timings(tmp_path / "x", np.ones(3), name="x", samples=1, losses=np.ones(3))


def test_what_no_record_can_hold_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"machine\.gpus is '2', expected int"):
        write_timings(tmp_path / "x", np.ones(3), name="x", samples=1, machine={"gpus": "2"})
    assert not (tmp_path / "x").exists()
