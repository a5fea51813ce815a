"""Presets are what their names say."""

from dataclasses import fields

import pytest

from dlrm_bench.dlrm.dlrmv4.config import ModelConfig
from dlrm_bench.dlrm.dlrmv4.presets import PRESETS, training


@pytest.mark.parametrize(("preset", "gpus"), [("dlrmv4-one-gpu", 1), ("dlrmv4-two-gpus", 2)])
def test_fewer_gpus_have_the_rows_of_as_many_of_eight_and_all_else(preset: str, gpus: int) -> None:
    fewer, whole = training(preset).model, training("mlperf-dlrmv4").model
    assert whole == ModelConfig()
    of_rows = ("event_rows", "context_rows")
    assert all(getattr(fewer, of.name) == getattr(whole, of.name) for of in fields(whole) if of.name not in of_rows)
    assert all(few == -(-rows * gpus // 8) for few, rows in zip(fewer.rows, whole.rows, strict=True))
    assert fewer.table_bytes / gpus < 70 * 2**30
    assert training(preset).local_batch_size == 1024
    assert training(preset).optimizer == training("mlperf-dlrmv4").optimizer


def test_an_unknown_preset_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=", ".join(PRESETS)):
        training("dlrmv5")
