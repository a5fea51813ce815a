"""Copies of records are recognized, and other records are not taken for copies."""

import shutil
from pathlib import Path

from dlrm_bench.bench.compare.sides import read_side
from dlrm_bench.bench.records.distinct import distinct
from dlrm_bench.bench.records.record import read_record
from tests.bench.compare.two_sides import compare_sides
from tests.bench.made_records import recorded_runs, write

RUNS = recorded_runs()


def test_a_copy_counts_once_and_both_folders_are_named(tmp_path: Path) -> None:
    first = write(tmp_path / "first", RUNS[0])
    copy = shutil.copytree(first, tmp_path / "copy")
    kept, said = distinct([read_record(first), read_record(copy)])
    assert [record.folder for record in kept] == [first]
    assert said == [f"{copy} holds the same run as {first}, and counts once"]


def test_runs_of_one_id_or_of_equal_times_are_no_copies(tmp_path: Path) -> None:
    folders = [
        write(tmp_path / "a" / "00-stock", RUNS[0]),
        write(tmp_path / "b" / "00-stock", RUNS[1]),
        write(tmp_path / "c" / "00-stock", RUNS[0], minute=1),
    ]
    kept, said = distinct([read_record(folder) for folder in folders])
    assert (len(kept), said) == (3, [])


def test_copies_prove_nothing(tmp_path: Path) -> None:
    """Two runs and links to them are two runs, however often they are named."""
    for side, runs in (("a", RUNS[:2]), ("b", RUNS[2:4])):
        for i, run in enumerate(runs):
            write(tmp_path / side / f"run-{i}", run, minute=2 * i + (side == "b"))
    alone = compare_sides(read_side(tmp_path / "a"), read_side(tmp_path / "b"))
    for side in ("a", "b"):
        (tmp_path / side / "latest").symlink_to("run-1")
        shutil.copytree(tmp_path / side / "run-0", tmp_path / side / "copy")
    again = compare_sides(read_side(tmp_path / "a"), read_side(tmp_path / "b"))
    assert again.comparison == alone.comparison
    assert again.comparison.runs == (2, 2)
