"""The dense network with products in eight bits against the one in bf16."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from dlrm_bench.dlrm.batch_shape import BatchShape
from dlrm_bench.dlrm.dcnv2.explicit_dense import ExplicitDense
from dlrm_bench.dlrm.dcnv2.fp8_dense import Fp8Dense
from dlrm_bench.dlrm.runtime.ranks import Ranks
from tests.dlrm.dcnv2.test_explicit_dense import LEARNING_RATE, SMALL, Case, forward_backward, global_batch, update

MODELS = [
    replace(SMALL, top_mlp=(48, 24, 1)),
    replace(SMALL, top_mlp=(48, 1), cross_layers=1),
]


def without_relu(network: ExplicitDense) -> None:
    """Loads biases that keep the top MLP's ReLUs open: what rounding closes would count as much as all other errors."""
    weights = network.state_dict()
    for layer in range(len(network.model.top_mlp) - 1):
        weights[f"top_mlp.{layer}.bias"] += 4
    network.load_state_dict(weights)


def check(ranks: Ranks) -> None:
    torch.set_float32_matmul_precision("highest")
    for model, parts in zip(MODELS, (2, 1), strict=True):
        case = Case(model, 96, torch.bfloat16, parts)
        shape = BatchShape(samples=case.batch_size, dtype=case.dtype, parts=parts)
        plain, eight = ExplicitDense(model, 5, shape, ranks), Fp8Dense(model, 5, shape, ranks)
        dense, pooled, labels = (part.to(ranks.device) for part in global_batch(case, 1, 0))
        pooled, results = pooled / 2, []
        with torch.no_grad():
            for network in (plain, eight):
                without_relu(network)
                network.copy_weights()
                logits, loss, grad = forward_backward(network, dense, pooled, labels, parts)
                grads = {name: value.float().clone() for name, value in network.grad.items()}
                results.append({"logits": logits, "loss": loss, "gradient by x0": grad, **grads})
        for name, expected in results[0].items():
            difference = (results[1][name].float() - expected.float()).norm() / expected.float().norm()
            # A factor of e5m2 is off by up to an eighth, sums of many of them by less.
            assert difference <= 0.15, (model, name, difference)
        # Copies are of the weights as the last update left them.
        update(eight, torch.tensor([LEARNING_RATE], device=ranks.device))
        with torch.no_grad():
            before = forward_backward(eight, dense, pooled, labels, parts)[0].clone()
            eight.copy_weights()
            assert not torch.equal(forward_backward(eight, dense, pooled, labels, parts)[0], before)


@pytest.mark.parametrize("gpu", [False, pytest.param(True, marks=pytest.mark.gpu)])
def test_is_close_to_bf16(run_ranks: Callable[..., list[Any]], gpu: bool) -> None:
    run_ranks(1, check, gpu=gpu)
