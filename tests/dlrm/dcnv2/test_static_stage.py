"""Stage 3: when the copies of weights in eight bits are made, and what training with them learns."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dlrm_bench.dlrm.dcnv2.fp8_dense import Fp8Dense
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.kernels.dense.fp8 import E4M3, empty
from tests.cases import SMALL_MODEL
from tests.pipeline.small_runs import batches_of, small
from tests.pipelines import dense_of, static_pipeline

MODEL = replace(SMALL_MODEL, cross_rank=16, top_mlp=(32, 16, 1))
STEPS = 4
PEERS = {"presort_ids": True, "peer_memory": True}


def weights_of(dense: Fp8Dense) -> list[Tensor]:
    return [weight.clone() for weight, _, _ in dense._copies.copies]


def are_copies(dense: Fp8Dense, weights: list[Tensor]) -> bool:
    """Whether the copies are of these weights, in both layouts."""
    equal = True
    for (_, plain, transposed), weight in zip(dense._copies.copies, weights, strict=True):
        expected = empty(*weight.shape, E4M3, plain.scale, weight.device)
        expected.take(weight)
        equal &= torch.equal(plain.float(), expected.float())
        equal &= torch.equal(transposed.float(), expected.float().t())
    return equal


def train(ranks: Ranks, changes: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Losses in bf16 and in eight bits."""
    graph: dict[str, Any] = {"cuda_graph": "iteration", "overlap": True} if ranks.device.type == "cuda" else {}
    configs = [
        small(model=MODEL, precision="bf16", fp8=fp8, local_batch_size=32, **changes, **graph) for fp8 in (False, True)
    ]
    plain, eight = (static_pipeline(config, ranks) for config in configs)
    batches = [batches_of(config, ranks) for config in configs]
    losses = [plain.train_step(batches[0]).item() for _ in range(STEPS)], []
    dense = dense_of(eight)
    assert isinstance(dense, Fp8Dense)
    for _ in range(STEPS):
        for bucket in dense.buckets:
            bucket.all_gather()
        before = weights_of(dense)
        losses[1].append(eight.train_step(batches[1]).item())
        assert are_copies(dense, before), "copies of the weights that the iteration started with"
    next(eight.evaluate(batches_of(configs[1], ranks, 1)))
    after = weights_of(dense)
    assert are_copies(dense, after), "copies of the trained weights"
    assert not are_copies(dense, before)
    return losses


@pytest.mark.parametrize(
    ("world_size", "gpu", "way"),
    [
        (2, False, PEERS),
        # FBGEMM's lookup gives no bf16 on CPUs.
        *(pytest.param(2, True, way, marks=pytest.mark.multi_gpu) for way in ({}, PEERS)),
    ],
)
def test_fp8_follows_the_weights(
    run_ranks: Callable[..., list[Any]], world_size: int, gpu: bool, way: dict[str, Any]
) -> None:
    for plain, eight in run_ranks(world_size, train, way, gpu=gpu):
        assert eight == pytest.approx(plain, rel=0.05)
        assert eight != plain
