"""Settings that compared runs should have in common: between sides the work and the machine, within a side the program
too."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dlrm_bench.bench.cli import main
from dlrm_bench.bench.compare.comparability import SHOULD_BE_EQUAL
from dlrm_bench.bench.compare.comparison import Result
from dlrm_bench.bench.compare.sides import read_side, side_of_records
from dlrm_bench.bench.config import RunConfig
from dlrm_bench.bench.records.record import read_record
from dlrm_bench.dlrm.dcnv2.config import DataConfig, OptimizerConfig
from tests.bench.compare.two_sides import compare_sides
from tests.bench.made_records import H200, PROVENANCE, WARMUP, configured, edit, recorded_runs, write

RUNS = recorded_runs()
RECORDS = Path(__file__).resolve().parents[3] / "results"


def configured_data(**changes: Any) -> RunConfig:
    return configured(pipeline="static", data=replace(DataConfig(), **changes))


def compared(tmp_path: Path, a: dict[str, Any], b: dict[str, Any]) -> Result:
    return compare_sides(*(read_side(write(tmp_path / x, RUNS[0], **changes)) for x, changes in (("a", a), ("b", b))))


@pytest.mark.parametrize(
    ("a", "b", "said"),
    [
        (configured_data(), configured_data(random_batches=64), "number of random batches differs: 32 in .*, 64 in"),
        (
            configured_data(source="multi_hot", path=Path("/days")),
            configured_data(source="multi_hot", path=Path("/planted")),
            "path of the data differs: /days in .*, /planted in",
        ),
        (
            configured(),
            configured(optimizer=OptimizerConfig(embedding="sgd")),
            "optimizer of the tables differs: adagrad in .*, sgd in",
        ),
        (
            configured(),
            replace(configured(), warmup_iterations=WARMUP + 1),
            "number of warm-up iterations differs: 10, and 2 s in .*, 11, and 2 s in",
        ),
        (
            configured(),
            configured(iterations=100),
            "number of warm-up iterations differs: 10, and 2 s in .*, 10 in",
        ),
        (
            configured(model=replace(configured().model, cross_layers=2)),
            configured(model=replace(configured().model, cross_layers=4)),
            r"model differs: {'cross_layers': 2} in .*, {'cross_layers': 4} in",
        ),
        (configured(), configured(loss_interval=1), "interval between checks of the loss differs: 100 in .*, 1 in"),
    ],
)
def test_work_of_the_configuration(tmp_path: Path, a: RunConfig, b: RunConfig, said: str) -> None:
    (difference,) = compared(tmp_path, {"config": a}, {"config": b}).differences
    assert re.match(said, difference)


def test_records_are_older_than_some_work(tmp_path: Path) -> None:
    sides = []
    for name, embedding in (("old", "adagrad"), ("new", "adagrad"), ("other", "sgd")):
        folder = write(tmp_path / name, RUNS[0], config=configured(optimizer=OptimizerConfig(embedding=embedding)))  # type: ignore[arg-type]
        if name == "old":
            config = read_record(folder).run["config"]
            del config["optimizer"]["embedding"], config["pipeline"]["row_wise"]
            edit(folder, config=config)
        sides.append(read_side(folder))
    old, new, other = sides
    assert compare_sides(old, new).differences == []
    assert [text.partition(" differs")[0] for text in compare_sides(old, other).differences] == [
        "optimizer of the tables"
    ]


def test_hosts_are_named_where_both_sides_know_theirs(tmp_path: Path) -> None:
    nameless = {name: value for name, value in H200.items() if name != "hosts"}
    machines = ({**H200, "hosts": ["node0", "node1"]}, {**H200, "hosts": ["node2"]}, nameless)
    named, other, unknown = (
        read_side(write(tmp_path / str(i), RUNS[0], machine=machine)) for i, machine in enumerate(machines)
    )
    (difference,) = compare_sides(named, other).differences
    assert difference == f"host differs: node0 + node1 in {named.label}, node2 in {other.label}"
    assert compare_sides(named, unknown).differences == []
    assert compare_sides(unknown, named).differences == []


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({"config": configured(pipeline="static", overlap=True)}, "pipeline"),
        ({"config": configured(schedule="base")}, "schedule"),
        ({"config": configured(row_wise=False)}, "row_wise"),
        ({"git": {"commit": "4567def", "dirty": False, "source": "789aaa"}}, "source"),
    ],
)
def test_a_side_of_several_programs_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], fields: str
) -> None:
    ladder = tmp_path / "ladder"
    write(ladder / "one", RUNS[0])
    write(ladder / "two", RUNS[1], **changes)
    said = f"{ladder}: runs of several programs, which differ in {fields}: name runs of one"
    assert read_side(ladder).warnings == [said]
    assert main(["compare", str(ladder / "two"), str(ladder)]) == 0
    assert f"warning: {said}" in capsys.readouterr().out
    assert main(["compare", "--strict", str(ladder), str(ladder / "two")]) == 2
    assert said in capsys.readouterr().err


def test_commits_of_one_source_are_one_program(tmp_path: Path) -> None:
    write(tmp_path / "a" / "one", RUNS[0])
    write(tmp_path / "a" / "two", RUNS[1], git={"commit": "4567def", "dirty": False, "source": "456def"})
    assert read_side(tmp_path / "a").warnings == []
    old = {"commit": "0123abc", "dirty": False}
    write(tmp_path / "b" / "one", RUNS[0], git=old)
    write(tmp_path / "b" / "two", RUNS[1], git={**old, "commit": "4567def"})
    (said,) = read_side(tmp_path / "b").warnings
    assert "which differ in commit" in said


def test_machines_of_one_description_are_told_apart(tmp_path: Path) -> None:
    """Machines are told apart by their GPUs; where there are none, by the boot."""
    others = {**H200, "gpu_uuids": ["uuid-8"], "boots": ["later"]}
    said = compared(tmp_path / "gpus", {}, {"machine": others}).differences
    assert [text.partition(" differs")[0] for text in said] == ["set of GPUs (UUIDs)"]
    cpu = {**H200, "gpu": None, "gpus": 0, "gpu_uuids": [], "boots": ["first"]}
    said = compared(tmp_path / "cpu", {"machine": cpu}, {"machine": {**cpu, "boots": ["second"]}}).differences
    assert [text.partition(" differs")[0] for text in said] == ["boot of the machine"]


def test_variables_are_compared_one_by_one(tmp_path: Path) -> None:
    variables = {"OMP_NUM_THREADS": "1", "NCCL_ALGO": "Ring", "TORCHINDUCTOR_CACHE_DIR": "set by torch"}
    set_too = {**PROVENANCE, "environment": variables}
    (said,) = compared(tmp_path, {}, {"provenance": set_too}).differences
    assert said.startswith("environment variable NCCL_ALGO differs: not set in")
    assert compared(tmp_path / "old", {"provenance": None}, {"provenance": set_too}).differences == []


def test_what_strict_asks_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = {name: value for name, value in H200.items() if name not in ("gpu_uuids", "boots")}
    a = write(tmp_path / "a", RUNS[0], machine=old, provenance=None, git={"commit": "0123abc", "dirty": None})
    assert main(["compare", str(a), str(a)]) == 0
    assert main(["compare", "--strict", str(a), str(a)]) == 2
    said = capsys.readouterr().err
    assert said.count("fields that records of 1 run(s) lack") == 1
    for name in ("hash of the source files", "environment", "how the ranks", "UUIDs", "boot"):
        assert name in said


def test_a_side_of_one_program(tmp_path: Path) -> None:
    """Other work is said elsewhere; an unknown commit is no other one."""
    write(tmp_path / "a" / "one", RUNS[0], config=configured(pipeline="static"))
    write(tmp_path / "a" / "two", RUNS[1], config=configured(pipeline="static", seed=1, run_id="two"))
    write(tmp_path / "a" / "three", RUNS[1], config=configured(pipeline="static"), git={"commit": None, "dirty": None})
    assert read_side(tmp_path / "a").warnings == []


def test_committed_records() -> None:
    """Some are of before host names, and of before some switches."""
    for path in sorted(RECORDS.glob("*/00-stock/run.json")):
        side = read_side(path.parent)
        changed = "the checkout had changes" in (path.parents[1] / "README.md").read_text(encoding="utf-8")
        caveats = ["the checkout had uncommitted changes in 1 of 1 runs"] if changed else []
        if (json.loads(path.read_text())["conditions"] or {}).get("throttling"):
            caveats.append("throttled (power cap) in 1 of 1 runs")
        assert [warning.partition(": ")[2] for warning in side.warnings] == caveats
        hosts = json.loads(path.read_text())["machine"].get("hosts")
        assert side.settings["host"] == ([hosts] if hosts else [])
        assert all(len(values) == 1 for name, values in side.settings.items() if name in SHOULD_BE_EQUAL and values)
    members = [read_record(path.parent) for path in sorted(RECORDS.glob("05-*/00-*/run.json"))]
    (said,) = (text for text in side_of_records("all rungs", members).warnings if "several programs" in text)
    assert "which differ in pipeline, " in said
    assert "row_wise" in said
