"""Flags of losses that are not finite, Triton against the plain twins, and updates that read them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from dlrm_bench.kernels._cuda import available
from dlrm_bench.kernels.dense.flat_adagrad import plain_flat_adagrad, triton_flat_adagrad
from dlrm_bench.kernels.dense.sharded_adagrad import cuda_sharded_adagrad, plain_sharded_adagrad, triton_sharded_adagrad
from dlrm_bench.kernels.embedding.sorted_adagrad import cuda_sorted_adagrad, plain_sorted_adagrad, triton_sorted_adagrad
from dlrm_bench.kernels.non_finite import (
    plain_clear_if_stopped,
    plain_raise_flag,
    triton_clear_if_stopped,
    triton_raise_flag,
)
from dlrm_bench.kernels.peer_tensors import PeerTensors
from tests.kernels.devices import DEVICE, needs_triton

EPS = 1e-8


def twins(plain: Callable[..., None], triton: Callable[..., None]) -> list[Any]:
    return [plain, pytest.param(triton, marks=needs_triton)]


@pytest.mark.parametrize("raise_flag", twins(plain_raise_flag, triton_raise_flag))
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("count", [1, 32, 2500])
def test_a_flag_is_raised_on_every_rank_and_stays(
    raise_flag: Callable[[Tensor, PeerTensors], None], bad: float, count: int
) -> None:
    flags = PeerTensors([torch.zeros(4, dtype=torch.int32, device=DEVICE) for _ in range(3)], 1)
    losses = torch.rand(count, 5, device=DEVICE)[:, 0]  # of a stride, as the partial sums have it
    raise_flag(losses, flags)
    assert not any(flag.any() for flag in flags.tensors)
    losses[count // 2] = bad
    raise_flag(losses, flags)
    losses.zero_()
    raise_flag(losses, flags)
    assert [flag.tolist() for flag in flags.tensors] == [[0, 1, 0, 0]] * 3


@pytest.mark.parametrize("clear", twins(plain_clear_if_stopped, triton_clear_if_stopped))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_are_cleared_where_a_flag_is_raised(clear: Callable[[Tensor, Tensor], None], dtype: Any) -> None:
    gradients, stopped = torch.full((33, 301), torch.nan, device=DEVICE, dtype=dtype), torch.zeros(2, device=DEVICE)
    clear(stopped.int(), gradients)
    assert gradients.isnan().all()
    clear(stopped.int() + 1, gradients)
    assert not gradients.any()


UPDATES: dict[str, tuple[Callable[..., None], ...]] = {
    "plain": (plain_flat_adagrad, plain_sharded_adagrad, plain_sorted_adagrad),
    "triton": (triton_flat_adagrad, triton_sharded_adagrad, triton_sorted_adagrad),
    "cuda": (triton_flat_adagrad, cuda_sharded_adagrad, cuda_sorted_adagrad),
}
HOPPER = [pytest.mark.gpu, pytest.mark.skipif(not available(), reason="needs a Hopper GPU (sm_90a) and cuda-bindings")]


def updates(by: str) -> list[Callable[[Tensor, Tensor, Tensor, Tensor], None]]:
    """Each takes weights and state [4, 16], gradients that fit them, and flags."""
    flat, sharded, of_sorted = UPDATES[by]
    rate = torch.tensor([0.1], device=DEVICE)
    ids = torch.tensor([0, 1, 1, 3], dtype=torch.int32, device=DEVICE)
    bags = torch.arange(4, dtype=torch.int32, device=DEVICE)

    def run_flat(weights: Tensor, state: Tensor, grad: Tensor, stopped: Tensor) -> None:
        flat(weights.view(-1), state.view(-1), grad.view(-1), rate, EPS, None, stopped)

    def run_sharded(weights: Tensor, state: Tensor, grad: Tensor, stopped: Tensor) -> None:
        grads, workings = (PeerTensors([tensor.view(-1)], 0) for tensor in (grad, weights))
        sharded(weights.view(-1), state.view(-1), grads, workings, 0, rate, EPS, stopped)

    def run_sorted(weights: Tensor, state: Tensor, grad: Tensor, stopped: Tensor) -> None:
        of_sorted(weights, state, grad, ids, bags, rate, EPS, stopped)

    return [run_flat, run_sharded, run_sorted]


@pytest.mark.parametrize(
    "by", ["plain", pytest.param("triton", marks=needs_triton), pytest.param("cuda", marks=HOPPER)]
)
@pytest.mark.parametrize("update", range(3), ids=["flat", "sharded", "sorted"])
def test_an_update_does_nothing_where_a_flag_is_raised(update: int, by: str) -> None:
    run = updates(by)[update]
    weights, state, grad = torch.rand(3, 4, 16, device=DEVICE).unbind()
    stopped = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    kept, kept_state = weights.clone(), state.clone()
    stopped[1] = 1
    run(weights, state, torch.full_like(grad, torch.nan), stopped)
    assert torch.equal(weights, kept)
    assert torch.equal(state, kept_state)
    stopped.zero_()
    run(weights, state, grad, stopped)
    assert not torch.equal(weights, kept)
    assert weights.isfinite().all()


@pytest.mark.parametrize(
    "update",
    [
        pytest.param(partial(triton_sorted_adagrad, tile=8, chunk=16), marks=needs_triton),
        pytest.param(partial(cuda_sorted_adagrad, chunk=16), marks=HOPPER),
    ],
)
def test_runs_that_cross_chunks_are_not_merged_where_a_flag_is_raised(update: Callable[..., None]) -> None:
    ids = torch.zeros(64, dtype=torch.int32, device=DEVICE)
    bags = torch.arange(64, dtype=torch.int32, device=DEVICE)
    weights, state = torch.rand(2, 1, 16, device=DEVICE).unbind()
    kept, rate = weights.clone(), torch.tensor([0.1], device=DEVICE)
    stopped = torch.ones(1, dtype=torch.int32, device=DEVICE)
    update(weights, state, torch.rand(64, 16, device=DEVICE), ids, bags, rate, EPS, stopped)
    assert torch.equal(weights, kept)
