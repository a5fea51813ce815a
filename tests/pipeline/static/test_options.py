"""Options of the static pipeline."""

from dataclasses import replace
from typing import Any

import pytest

from dlrm_bench.pipeline.static.options import StaticOptions
from tests.cases import SMALL_MODEL
from tests.pipeline.small_runs import small
from tests.pipelines import changed

FP8_MODEL = replace(SMALL_MODEL, cross_rank=16, top_mlp=(32, 16, 1))


def test_peer_memory_needs_presorted_ids() -> None:
    with pytest.raises(ValueError, match="--peer-memory needs --presort-ids"):
        StaticOptions(peer_memory=True)
    assert StaticOptions(peer_memory=True, presort_ids=True).peer_memory


@pytest.mark.parametrize("graph", ["iteration", "try"])
def test_graphs_need_a_gpu(graph: str) -> None:
    said = StaticOptions(cuda_graph=graph).needs_gpu  # type: ignore[arg-type]
    assert said == f"--cuda-graph {graph} needs a GPU: on this machine choose --cuda-graph none"
    assert StaticOptions().needs_gpu is None


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
