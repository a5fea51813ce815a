"""Flags that repeat a recorded run, made from its configuration."""

from dataclasses import replace
from pathlib import Path

import pytest

from dlrm_bench.bench import ROOT
from dlrm_bench.bench.compare.repeat import repeating_flags
from dlrm_bench.bench.config import RunConfig
from dlrm_bench.bench.presets import preset
from dlrm_bench.bench.records.record import read_record
from dlrm_bench.dlrm.dcnv2.config import DataConfig
from dlrm_bench.launch.dlrm import parse
from tests.bench.made_records import H200, configured, edit, recorded_runs, write

RUN = recorded_runs()[0]


@pytest.mark.parametrize(
    "config",
    [
        configured(),
        configured(pipeline="static", cuda_graph="iteration", overlap=True, presort_ids=True, precision="bf16"),
        configured(pipeline="five-stage", row_wise=False, launch_threads=2, trim_input_dist=True),
        configured(schedule="base", model=replace(preset("smoke").model, table_scale=0.5), seed=3),
        configured(pipeline="static", data=DataConfig(random_skew=1.2)),
        replace(preset("smoke"), target_auc=None, iterations=100),
    ],
)
def test_the_flags_give_the_same_configuration(tmp_path: Path, config) -> None:
    config = replace(config, warmup_iterations=configured().warmup_iterations)
    flags, processes = repeating_flags(read_record(write(tmp_path / "x", RUN, world_size=4, config=config)))
    assert processes == 4
    assert parse(flags) == config


def test_a_run_on_several_nodes_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "x", RUN)
    edit(folder, machine={**H200, "nodes": 2})
    with pytest.raises(ValueError, match="a run on several nodes: name --preset"):
        repeating_flags(read_record(folder))


@pytest.mark.slow
def test_every_committed_record_of_one_node_can_be_repeated() -> None:
    parsed: dict[tuple[str, ...], RunConfig] = {}
    for path in sorted((ROOT / "results").rglob("run.json")):
        if "-cpu-" in str(path.relative_to(ROOT)):  # not committed
            continue
        record = read_record(path.parent)
        if record.run["machine"]["nodes"] > 1:
            with pytest.raises(ValueError, match="on several nodes"):
                repeating_flags(record)
            continue
        flags, processes = repeating_flags(record)
        if tuple(flags) not in parsed:  # rounds of a rung have the same: parsing is what takes time
            parsed[tuple(flags)] = parse(flags)
        config = parsed[tuple(flags)]
        assert processes == record.run["config"]["world_size"]
        assert config.pipeline.name == record.run["config"]["pipeline"]["name"]
        assert config.precision == record.run["config"]["precision"]
