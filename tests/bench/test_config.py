"""Every impossible run is refused by an error that names the flag to change."""

import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dlrm_bench.bench.config import PIPELINES, CheckpointConfig, MLPerfConfig, SnapshotConfig, as_json
from dlrm_bench.bench.presets import preset
from dlrm_bench.dlrm.dcnv2.config import DataConfig, OptimizerConfig
from tests.pipelines import changed

RANDOM: dict[str, Any] = {"data": DataConfig(), "target_auc": None, "iterations": 100}
BAD_RUN: list[tuple[str, dict[str, Any]]] = [
    ("--iterations", {"iterations": 0}),
    ("--iterations or --min-time", {"data": DataConfig(), "target_auc": None}),
    ("--min-time", {"min_time": 0.0}),
    ("--min-time is inf", {"min_time": math.inf}),
    ("--min-time is nan", {"min_time": math.nan}),
    ("--warmup-time", {"warmup_time": -1.0}),
    ("--max-time is inf", {"min_time": 10.0, "max_time": math.inf}),
    ("--max-time is nan", {"min_time": 10.0, "max_time": math.nan}),
    ("--stall-timeout is inf: .* None for no limit", {"stall_timeout": math.inf}),
    ("--max-time", {"max_time": 10.0}),
    ("--max-time", {"min_time": 10.0, "max_time": 9.0}),
    ("--warmup-iterations", {"warmup_iterations": -1}),
    ("--warmup-iterations", {"warmup_iterations": 50, "iterations": 50}),
    ("--target-auc", {"target_auc": 0.5}),
    ("--target-auc", {"target_auc": 1.0}),
    ("--target-auc", {"target_auc": math.nan}),
    ("--target-auc: .*: choose a --data.source of files", {"data": DataConfig(), "iterations": 100}),
    ("--evaluations-per-epoch", {"evaluations_per_epoch": 0}),
    ("--loss-interval", {"loss_interval": 0}),
    (
        "--checkpoint.every and --snapshot.every: choose one",
        {"checkpoint": CheckpointConfig(every=1, path=Path("x")), "snapshot": SnapshotConfig(every=1)},
    ),
    ("--resume auto looks for snapshots and checkpoints", {"resume": Path("auto")}),
    ("--local-batch-size", {"local_batch_size": 0}),
    ("--run-id", {"run_id": "a/b"}),
    ("--run-id", {"run_id": ""}),
    ("--run-id", {"run_id": ".."}),
    # What a pipeline's options say of what is trained.
    (
        "--presort-ids updates tables by exact Adagrad only",
        {"pipeline": "static", "presort_ids": True, "optimizer": OptimizerConfig(embedding="sgd")},
    ),
    (
        "--presort-ids updates rows of 16, 32, 64 or 128 columns",
        {
            "pipeline": "static",
            "presort_ids": True,
            "model": replace(preset("smoke").model, embedding_dim=8, bottom_mlp=(8,)),
        },
    ),
    (
        "--pipeline static needs .* a multiple of 8",
        {"pipeline": "static", "model": replace(preset("smoke").model, embedding_dim=4, bottom_mlp=(4,))},
    ),
]


@pytest.mark.parametrize(("flag", "changes"), BAD_RUN)
def test_bad_run(flag: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=flag):
        changed(preset("smoke"), **changes)


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_a_run_has_exactly_one_pipeline(pipeline: str) -> None:
    config = changed(preset("smoke"), pipeline)
    assert config.pipeline.name == pipeline
    assert as_json(config)["pipeline"]["name"] == pipeline


def test_the_rest_has_defaults() -> None:
    assert preset("smoke").mlperf == MLPerfConfig()
    assert preset("smoke").results_dir == Path("results")


def test_snapshots_have_a_folder_of_their_user_in_memory():
    assert SnapshotConfig().folder is None
    assert SnapshotConfig(every=5).folder == Path(f"/dev/shm/dlrm-bench-{os.geteuid()}")
    assert SnapshotConfig(every=5, path=Path("x")).folder == Path("x")
    with pytest.raises(ValueError, match=r"--snapshot\.every must be positive"):
        SnapshotConfig(every=0)
    with pytest.raises(ValueError, match=r"--snapshot\.path is of no use without --snapshot\.every"):
        SnapshotConfig(path=Path("x"))
