"""The order of a report: the ladder that the user names, proven ones, the user's own, and runs in no ladder last."""

from pathlib import Path
from typing import Any, cast

import pytest

from dlrm_bench.bench.compare.sides import side_of_records
from dlrm_bench.bench.records.ladder import Ladder
from dlrm_bench.bench.records.record import read_record
from dlrm_bench.bench.records.schema import Machine
from dlrm_bench.bench.report import families as families_module
from dlrm_bench.bench.report.families import NO_LADDER, all_doubts, families, machines
from dlrm_bench.bench.report.sources import Family, Sources, machine_in_words
from tests.bench.made_records import H200, configured, recorded_runs, telemetry, write

RUNS = recorded_runs()


def ladder_of(folder: Path, *, gpus: int, rungs: int, created: str, proves: bool = False, batch: int = 512) -> Family:
    """A ladder of one round; `proves` says what `proven` is made to find in it."""
    machine: Machine = {**H200, "gpus": gpus}
    config = configured(local_batch_size=batch)
    timed = {
        f"rung-{i}": [read_record(write(folder / f"rung-{i}", RUNS[i], machine=machine, config=config))]
        for i in range(rungs)
    }
    found = [{"name": name, "speedup_vs_first": 2.0} for name in timed]
    return Family(
        name=folder.name,
        folder=folder,
        ladder=cast(Ladder, {"id": folder.name, "created": created, "rounds": 1, "rungs": found, "proves": proves}),
        sides={name: side_of_records(name, records) for name, records in timed.items()},
        timed=timed,
        profiled={},
    )


@pytest.fixture(autouse=True)
def proven(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made ladders say themselves whether they prove something."""

    def as_said(ladder: Any, against: str) -> set[str]:
        return {rung["name"] for rung in ladder["rungs"]} if ladder["proves"] else set()

    monkeypatch.setattr(families_module, "proven", as_said)


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
        proves = name in ("two-old", "four-full")
        sources.ladders.append(ladder_of(tmp_path / name, gpus=gpus, rungs=rungs, created=created, proves=proves))
    shown = families(sources)
    assert [family.name for family in shown] == [
        "four-full", "four-new", "four-full-old", "two-new", "two-old", "cpu", NO_LADDER,
    ]  # fmt: skip
    assert shown[0].title() == "4 x H200, launch-bound, 512 samples per rank: 2 rungs, 1 round"


def test_the_newest_ladder_opens_where_none_proves_a_gain(tmp_path: Path) -> None:
    ladders = [ladder_of(tmp_path / name, gpus=8, rungs=2, created=name) for name in ("1", "3", "2")]
    assert [family.name for family in families(Sources(ladders=ladders))] == ["3", "2", "1"]
    for rung in ladders[0].ladder["rungs"]:
        rung["speedup_vs_first"] = 0.5
    ladders[0].ladder["proves"] = True  # type: ignore[typeddict-unknown-key]
    assert families(Sources(ladders=ladders))[0].name == "3"  # a proven loss is no gain


def test_the_users_own_runs_come_before_others(tmp_path: Path) -> None:
    mine, others = tmp_path / "mine", tmp_path / "others"
    sources = Sources(
        ladders=[
            ladder_of(others / "big", gpus=8, rungs=2, created="9", proves=True),
            ladder_of(mine / "unproven", gpus=2, rungs=2, created="1"),
            ladder_of(mine / "below" / "it", gpus=4, rungs=2, created="0"),
        ],
        timed=[read_record(write(others / "theirs", RUNS[0], minute=9)), read_record(write(mine / "my", RUNS[1]))],
    )
    shown = families(sources, [mine, others])
    assert [family.name for family in shown] == ["unproven", "below/it", "big", NO_LADDER]
    assert list(shown[-1].timed) == ["my"]  # one configuration: the user's own run gives the name
    assert families(sources, [others, mine])[0].name == "big"
    assert families(sources, [mine, others], first=others / "big")[0].name == "big"
    with pytest.raises(ValueError, match=r"--first .*absent is not a ladder of the report"):
        families(sources, [mine, others], first=tmp_path / "absent")


def test_doubts_are_counted_by_family(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write(tmp_path / name, RUNS[0], telemetry=telemetry(throttled=True), config=configured(seed=ord(name)))
    (family,) = families(Sources(timed=[read_record(tmp_path / name) for name in ("a", "b")]))
    assert all_doubts([family]) == {"throttled (power cap)": {NO_LADDER: 2}}


def test_machines_of_one_description_stand_together(tmp_path: Path) -> None:
    for i, machine in enumerate(({**H200, "hosts": ["x"]}, {**H200, "hosts": ["y"]}, {**H200, "hosts": ["x"]})):
        write(tmp_path / str(i), RUNS[i], machine=machine, config=configured(seed=i))
    shown = families(Sources(timed=[read_record(tmp_path / str(i)) for i in range(3)]))
    (found,) = machines(shown, Sources()).items()
    assert found[0].startswith("8 x H200, ")
    assert [machine["hosts"] for machine in found[1]] == [["x"], ["y"]]


def test_runs_of_one_configuration_stand_together_under_the_newest(tmp_path: Path) -> None:
    folders = [write(tmp_path / name, RUNS[i], minute=-i) for i, name in enumerate(("new", "old"))]
    (family,) = families(Sources(timed=[read_record(folder) for folder in folders]))
    assert {name: len(records) for name, records in family.timed.items()} == {"new": 2}


def test_momentary_clocks_part_neither_runs_nor_machines(tmp_path: Path) -> None:
    clocks = ({"sm_clock_mhz": 345, "cpu_mhz": [800.0, 900.0, 1000.0]}, {"sm_clock_mhz": 1980, "cpu_mhz": None})
    folders = [write(tmp_path / str(i), RUNS[i], machine={**H200, **of}) for i, of in enumerate(clocks)]
    shown = families(Sources(timed=[read_record(folder) for folder in folders]))
    assert [len(records) for records in shown[0].timed.values()] == [2]
    assert [len(alike) for alike in machines(shown, Sources()).values()] == [1]


def test_machines_in_words() -> None:
    """A record's GPUs are those of all nodes."""
    assert machine_in_words(H200) == "8 x H200"
    assert machine_in_words({**H200, "nodes": 2}) == "2 nodes of 4 x H200"
    assert machine_in_words({**H200, "nodes": 2, "gpus": 1}) == "2 nodes, 1 x H200 in all"
    assert machine_in_words({**H200, "nodes": 2, "gpus": 0, "gpu": None}) == "2 nodes of CPU"
    assert machine_in_words({**H200, "gpus": 0, "gpu": None}) == "CPU"
