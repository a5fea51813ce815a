"""Configurations say which flag to change, and their defaults are the benchmark's."""

from dataclasses import replace
from typing import Any

import pytest

from dlrm_bench.dlrm.dlrmv4.config import (
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    mlperf_learning_rate,
    tables,
)
from tests.dlrm.dlrmv4.cases import SMALL


def test_the_defaults_are_the_benchmarks() -> None:
    config = ModelConfig()
    assert sum(config.rows) == 293_051_712
    assert config.table_bytes == 600_169_906_176
    assert config.max_length == 4095
    assert [(table.name, table.rows) for table in tables(config)] == [
        ("item_id", 9_390_624),
        ("artist_id", 1_293_395),
        ("album_id", 3_367_692),
        ("uid", 1_000_001),
        ("user_x_artist", 100_000_000),
        ("user_x_album", 40_000_000),
        ("user_x_hour", 24_000_000),
        ("item_x_hour", 40_000_000),
        ("artist_x_hour", 32_000_000),
        ("user_x_is_organic", 2_000_000),
        ("user_x_artist_x_hour", 40_000_000),
    ]
    assert [table.features for table in tables(config)[:4]] == [
        ("item_id", "item_candidate_id"),
        ("artist_id", "item_candidate_artist_id"),
        ("album_id", "item_candidate_album_id"),
        ("uid",),
    ]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("event_rows", (5, 5), r"--model\.event-rows has 2 numbers: give one for each of the 3"),
        ("context_rows", (5,) * 7, r"--model\.context-rows has 7 numbers: give one for each of the 8"),
        ("context_rows", (0,) * 8, r"--model\.context-rows: every number must be positive"),
        ("event_rows", (2**31, 1, 1), r"--model\.event-rows has a table of 2147483648 rows"),
        ("embedding_dim", 6, r"--model\.embedding-dim is 6"),
        ("width", 0, r"--model\.width must be positive"),
        ("head_width", 24, r"--model\.head-width is 24: it must be a power of two"),
        ("head_width", 8, r"--model\.head-width is 8"),
        ("position_buckets", 48, r"--model\.position-buckets is 48: .* more than 48"),
        ("input_dropout", 1.0, r"--model\.input-dropout is 1.0"),
        ("layer_dropout", -0.1, r"--model\.layer-dropout is -0.1"),
        ("loss_weight", 0.0, r"--model\.loss-weight"),
        ("content", "tokens", r"--model\.content is 'tokens': choose events or items"),
        ("last_layer", "none", r"--model\.last-layer is 'none': choose all or candidates"),
        ("dropout_seed", "none", r"--model\.dropout-seed is 'none': choose rank or same"),
        ("attention_scale", "mean", r"--model\.attention-scale is 'mean': choose longest or maximum"),
    ],
)
def test_a_model_that_cannot_be_is_refused(field: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **{field: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"learning_rate": 0.0}, r"--optimizer\.learning-rate is 0.0"),
        ({"learning_rate": float("nan")}, r"--optimizer\.learning-rate is nan"),
        ({"ramp_steps": -1}, r"--optimizer\.ramp-steps is -1"),
        ({"adam_betas": (0.9, 1.0)}, r"--optimizer\.adam-betas is \(0.9, 1.0\)"),
        ({"adam_eps": 0.0}, r"--optimizer\.adam-eps must be positive"),
        ({"adagrad_eps": 0.0}, r"--optimizer\.adagrad-eps must be positive"),
        ({"clip_norm": -1.0}, r"--optimizer\.clip-norm is -1.0"),
    ],
)
def test_an_optimizer_that_cannot_be_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OptimizerConfig(**change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train_windows": 0}, r"--data\.train-windows is 0: it must be positive"),
        ({"prefetch_batches": 0}, r"--data\.prefetch-batches must be positive"),
        ({"reader_threads": 0}, r"--data\.reader-threads must be positive"),
    ],
)
def test_data_that_cannot_be_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataConfig(**change)


def test_the_rate_rises_from_nothing_and_stays() -> None:
    config = OptimizerConfig()
    assert config.rate_after(0) == 0
    assert config.rate_after(1) == pytest.approx(1e-6 / 24_000)
    assert config.rate_after(12_000) == pytest.approx(0.5e-6)
    assert config.rate_after(24_000) == config.rate_after(10**9) == 1e-6
    assert OptimizerConfig(ramp_steps=0).rate_after(0) == 1e-6
    assert config.rate(1) == 0  # of the first iteration
    assert config.rate(12_001) == pytest.approx(0.5e-6)
    assert OptimizerConfig(ramp_steps=0).rate(1) is None


def test_mlperfs_rate_grows_with_the_batch() -> None:
    assert mlperf_learning_rate(8192) == 1e-6
    assert mlperf_learning_rate(32768) == 4e-6
