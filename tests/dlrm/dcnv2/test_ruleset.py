"""The division that a log names: closed only for MLPerf's model, data and rules."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from dlrm_bench.bench.config import MLPerfConfig
from dlrm_bench.bench.mlperf.division import division_of
from dlrm_bench.bench.presets import preset
from dlrm_bench.dlrm.dcnv2.config import OptimizerConfig
from dlrm_bench.dlrm.dcnv2.data.check import MLPERF_DAY_SAMPLES
from dlrm_bench.dlrm.dcnv2.presets import MLPERF_TARGET_AUC
from dlrm_bench.dlrm.dcnv2.ruleset import EVAL_SAMPLES, TRAIN_SAMPLES
from dlrm_bench.pipeline.static.options import StaticOptions


@dataclass
class Samples:
    """A data set, as far as the division asks."""

    train_samples: int = TRAIN_SAMPLES
    eval_samples: int = EVAL_SAMPLES
    best_auc: float | None = None


DEFAULT = preset("mlperf-dcnv2")
FILES = replace(DEFAULT.data, source="multi_hot", path=Path("days"))
CLOSED = replace(DEFAULT, data=FILES, min_time=None, target_auc=MLPERF_TARGET_AUC)


def test_the_samples_are_those_of_the_days() -> None:
    assert sum(MLPERF_DAY_SAMPLES[:-1]) == TRAIN_SAMPLES
    assert (MLPERF_DAY_SAMPLES[-1] + 1) // 2 == EVAL_SAMPLES


def test_a_run_by_the_rules_is_closed_where_it_asks_for_it() -> None:
    assert division_of(CLOSED, Samples(), 55296) == ("closed", [])  # type: ignore[arg-type]
    assert division_of(replace(CLOSED, mlperf=MLPerfConfig()), Samples(), 55296) == ("open", [])  # type: ignore[arg-type]


def test_free_hyperparameters_are_free() -> None:
    config = replace(CLOSED, local_batch_size=77, optimizer=OptimizerConfig(learning_rate=0.0034), precision="bf16")
    assert division_of(config, Samples(), 55296)[0] == "closed"  # type: ignore[arg-type]
    dynamic = replace(CLOSED, pipeline=StaticOptions(dynamic_rows=99))
    assert division_of(dynamic, Samples(), 55296)[0] == "closed"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "samples", "obstacle"),
    [
        ({"data": DEFAULT.data, "min_time": 10.0, "target_auc": None}, Samples(0, 0), "the data are random"),
        ({}, Samples(best_auc=0.85), "a generator made the data"),
        ({}, Samples(eval_samples=89137318), "4195197692 training and 89137318 evaluation samples"),
        ({"model": replace(DEFAULT.model, table_scale=0.5)}, Samples(), "the model is not MLPerf's"),
        ({"target_auc": 0.8}, Samples(), "--target-auc is 0.8, MLPerf's 0.80275"),
        ({"evaluations_per_epoch": 40}, Samples(), "--evaluations-per-epoch is 40, MLPerf's 20"),
        ({"optimizer": OptimizerConfig(eps=1e-7)}, Samples(), "the optimizer is not MLPerf's"),
        ({"optimizer": OptimizerConfig(embedding="sgd")}, Samples(), "the optimizer is not MLPerf's"),
        ({"pipeline": StaticOptions(dynamic_rows=99, evict_rows=True)}, Samples(), "--evict-rows: evicted rows"),
    ],
)
def test_what_else_is_open(changes: dict[str, Any], samples: Samples, obstacle: str) -> None:
    division, obstacles = division_of(replace(CLOSED, **changes), samples, 55296)  # type: ignore[arg-type]
    assert division == "open"
    assert any(obstacle in text for text in obstacles)
