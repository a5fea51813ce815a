"""The order of a report: the headline ladder, the newest ones of each machine, what is in no ladder last."""

from pathlib import Path
from typing import cast

from dlrm_bench.bench.compare.sides import side_of_records
from dlrm_bench.bench.records.ladder import Ladder
from dlrm_bench.bench.records.record import read_record
from dlrm_bench.bench.records.schema import Machine
from dlrm_bench.bench.report.families import NO_LADDER, families, machine_in_words
from dlrm_bench.bench.report.sources import LadderRuns, Sources
from tests.bench.made_records import H200, recorded_runs, write

RUNS = recorded_runs()


def ladder_of(folder: Path, *, gpus: int, rungs: int, created: str) -> LadderRuns:
    machine: Machine = {**H200, "gpus": gpus}
    timed = {f"rung-{i}": [read_record(write(folder / f"rung-{i}", RUNS[i], machine=machine))] for i in range(rungs)}
    return LadderRuns(
        name=folder.name,
        ladder=cast(Ladder, {"id": folder.name, "created": created, "rounds": 1}),
        sides={name: side_of_records(name, records) for name, records in timed.items()},
        timed=timed,
        profiled={},
    )


def test_order(tmp_path: Path) -> None:
    sources = Sources(timed=[read_record(write(tmp_path / "alone", RUNS[0]))])
    for name, gpus, rungs, created in (
        ("two-old", 2, 3, "1"),
        ("four-new", 4, 1, "5"),
        ("four-full-old", 4, 2, "2"),
        ("four-full", 4, 2, "3"),
        ("two-new", 2, 1, "6"),
        ("cpu", 0, 5, "7"),
    ):
        sources.ladders.append(ladder_of(tmp_path / name, gpus=gpus, rungs=rungs, created=created))
    shown = families(sources)
    assert [family.name for family in shown] == [
        "four-full", "four-new", "four-full-old", "two-new", "two-old", "cpu", NO_LADDER,
    ]  # fmt: skip
    assert shown[0].title() == "4 x H200, launch-bound, 512 samples a rank: 2 rungs, 1 round"


def test_runs_of_one_configuration_stand_together_under_the_newest(tmp_path: Path) -> None:
    folders = [write(tmp_path / name, RUNS[i], minute=-i) for i, name in enumerate(("new", "old"))]
    (family,) = families(Sources(timed=[read_record(folder) for folder in folders]))
    assert {name: len(records) for name, records in family.timed.items()} == {"new": 2}


def test_machines_in_words() -> None:
    assert machine_in_words({**H200, "nodes": 2}) == "2 nodes of 8 x H200"
    assert machine_in_words({**H200, "gpus": 0, "gpu": None}) == "CPU"
