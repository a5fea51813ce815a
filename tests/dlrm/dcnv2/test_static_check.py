"""Widths of DLRM-DCNv2 that the static pipeline cannot take are refused by the flag to change."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dlrm_bench.dlrm.dcnv2.config import DataConfig
from tests.cases import SMALL_MODEL
from tests.pipeline.small_runs import small
from tests.pipelines import changed

FP8_MODEL = replace(SMALL_MODEL, cross_rank=16, top_mlp=(32, 16, 1))


def test_rows_of_the_interaction_are_aligned() -> None:
    model = replace(SMALL_MODEL, embedding_dim=4, bottom_mlp=(4,))
    with pytest.raises(ValueError, match=r"--model.embedding-dim to be a multiple of 8, and \(6 \+ 1\) \* 4 is not"):
        small(model=model)
    assert changed(small(), "torchrec", model=model).model == model


def test_ids_of_one_hot_files_are_row_numbers() -> None:
    """Which tables of a declared size expand."""
    one_hot = changed(small(), data=DataConfig(source="one_hot", path=Path("days")), dynamic_rows=100)
    with pytest.raises(ValueError, match=r"--data\.source one_hot, have a declared size: choose multi_hot"):
        changed(one_hot, model=replace(SMALL_MODEL, raw_ids=True))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"precision": "fp32"}, "--fp8 needs --precision bf16, not fp32"),
        ({"model": replace(FP8_MODEL, cross_rank=24)}, "--model.cross-rank to be a multiple of 16 up to 512, not 24"),
        ({"model": replace(FP8_MODEL, cross_rank=528)}, "--model.cross-rank to be a multiple of 16 up to 512, not 528"),
        ({"model": replace(FP8_MODEL, top_mlp=(24, 1))}, "the first a multiple of 16 up to 1024, not 24 1"),
        ({"model": replace(FP8_MODEL, top_mlp=(1040, 1))}, "the first a multiple of 16 up to 1024, not 1040 1"),
        ({"model": replace(FP8_MODEL, top_mlp=(1,))}, "--model.top-mlp to have more than one layer, .* not 1"),
        ({"local_batch_size": 48}, "--local-batch-size to be a multiple of 32, not 48"),
        (
            {"model": replace(FP8_MODEL, embedding_dim=8, bottom_mlp=(8,))},
            r"--model.embedding-dim to be a multiple of 16, and \(6 \+ 1\) \* 8",
        ),
    ],
)
def test_fp8_needs_bf16_and_aligned_widths(changes: dict[str, Any], message: str) -> None:
    config = small(model=FP8_MODEL, precision="bf16", fp8=True, local_batch_size=32)
    with pytest.raises(ValueError, match=message):
        changed(config, **changes)
