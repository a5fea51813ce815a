"""Adagrad over slices of all ranks' weights: against torch.optim.Adagrad of the sum, Triton against the plain twin."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dlrm_bench.kernels._cuda import available
from dlrm_bench.kernels.dense.sharded_adagrad import (
    cuda_sharded_adagrad,
    plain_sharded_adagrad,
    sharded_adagrad,
    triton_sharded_adagrad,
)
from dlrm_bench.kernels.peer_tensors import PeerTensors
from tests.kernels.devices import DEVICE, needs_triton

RANKS = [1, 2, 3, 4]
DTYPES = [torch.bfloat16, torch.float32]


def slices(grads: list[Tensor], first: int, size: int, rank: int) -> PeerTensors:
    """Returns the rank's slices of all ranks' gradients."""
    return PeerTensors([grad[first : first + size].clone() for grad in grads], rank)


def buffers(ranks: int, count: int, dtype: torch.dtype) -> list[Tensor]:
    """Returns buffers, each its own allocation, as those of several GPUs are."""
    return [torch.randn(count, device=DEVICE).to(dtype) for _ in range(ranks)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", RANKS)
def test_equals_torch_adagrad_of_the_sum(ranks: int, dtype: torch.dtype) -> None:
    weights = torch.randn(12 * 11, device=DEVICE)
    size = len(weights) // ranks
    masters, states = weights.clone().split(size), torch.zeros_like(weights).split(size)
    parameter = torch.nn.Parameter(weights.clone())
    optimizer = torch.optim.Adagrad([parameter], lr=0.1, eps=1e-8)
    rate = torch.tensor(0.1, device=DEVICE)
    workings = buffers(ranks, len(weights), dtype)
    for _ in range(3):
        grads = buffers(ranks, len(weights), dtype)
        parameter.grad = torch.stack(grads).float().sum(0)
        optimizer.step()
        for rank in range(ranks):
            received = slices(grads, rank * size, size, rank)
            workings_of_all = PeerTensors(workings, rank)
            sharded_adagrad(masters[rank], states[rank], received, workings_of_all, rank * size, rate, 1e-8)
    torch.testing.assert_close(torch.cat(masters), parameter.detach())
    for working in workings:
        torch.testing.assert_close(working, torch.cat(masters).to(dtype))


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(("first", "size"), [(0, 1), (64, 2048), (7, 2503)])
def test_triton_equals_plain(first: int, size: int, ranks: int, dtype: torch.dtype) -> None:
    count = first + ranks * size + 5
    grads, rate = buffers(ranks, count, dtype), torch.tensor([0.05], device=DEVICE)
    before = buffers(ranks, count, dtype)
    workings, expected_workings = [w.clone() for w in before], [w.clone() for w in before]
    for rank in range(ranks):
        master, expected = torch.randn(1, size, device=DEVICE).repeat(2, 1)
        state, expected_state = torch.rand(1, size, device=DEVICE).repeat(2, 1)
        start = first + rank * size
        peers = slices(grads, start, size, rank)
        triton_sharded_adagrad(master, state, peers, PeerTensors(workings, rank), start, rate, 1e-8)
        plain_sharded_adagrad(expected, expected_state, peers, PeerTensors(expected_workings, rank), start, rate, 1e-8)
        torch.testing.assert_close(state, expected_state)
        torch.testing.assert_close(master, expected)
    for old, got, wanted in zip(before, workings, expected_workings, strict=True):
        torch.testing.assert_close(got, wanted)
        assert torch.equal(got[first:-5], workings[0][first:-5])
        assert torch.equal(got[:first], old[:first])
        assert torch.equal(got[-5:], old[-5:])


@pytest.mark.gpu
@pytest.mark.skipif(not available(), reason="needs a Hopper GPU (sm_90a) and cuda-bindings")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", [*RANKS, 8])
@pytest.mark.parametrize(("first", "size"), [(0, 8), (64, 4096), (24, 300_000), (64, 1_771_008)])
def test_cuda_equals_triton_bit_for_bit(first: int, size: int, ranks: int, dtype: torch.dtype) -> None:
    rate, rank = torch.tensor([0.05], device=DEVICE), ranks - 1
    grads = PeerTensors(buffers(ranks, size, dtype), rank)
    master, state = torch.randn(size, device=DEVICE), torch.rand(size, device=DEVICE)
    before = buffers(ranks, first + size + 5, dtype)
    results = []
    for update in (cuda_sharded_adagrad, triton_sharded_adagrad):
        results.append((master.clone(), state.clone(), *(working.clone() for working in before)))
        update(*results[-1][:2], grads, PeerTensors(results[-1][2:], rank), first, rate, 1e-8)
    assert all(map(torch.equal, *results))
    assert not torch.equal(results[0][0], master)


@pytest.mark.gpu
@pytest.mark.skipif(not available(), reason="needs a Hopper GPU (sm_90a) and cuda-bindings")
@pytest.mark.parametrize("busy", [False, True])
def test_no_copy_overtakes_a_read_in_a_thousand_launches(busy: bool) -> None:
    """Sizes are those of the largest weights of MLPerf's model: each stage of shared memory is filled nine times a
    launch."""
    size, rate = 1024 * 3456, torch.tensor([0.05], device=DEVICE)
    grads, workings = (PeerTensors(buffers(1, size, torch.bfloat16), 0) for _ in range(2))
    master, state = torch.randn(size, device=DEVICE), torch.rand(size, device=DEVICE)
    expected = (master.clone(), state.clone())
    triton_sharded_adagrad(*expected, grads, workings, 0, rate, 1e-8)
    wrong, beside, factor = torch.zeros((), device=DEVICE), torch.cuda.Stream(), torch.randn(2048, 2048, device=DEVICE)
    for _ in range(1000):
        if busy:
            with torch.cuda.stream(beside):
                torch.mm(factor, factor)
        got = (master.clone(), state.clone())
        cuda_sharded_adagrad(*got, grads, workings, 0, rate, 1e-8)
        wrong += sum((one != other).sum() for one, other in zip(got, expected, strict=True))
    torch.cuda.synchronize()
    assert wrong.item() == 0


@pytest.mark.parametrize("wrong", ["weights", "rate"])
def test_refuses_what_the_kernels_would_read_as_fp32(wrong: str) -> None:
    dtype = torch.float16 if wrong == "weights" else torch.bfloat16
    rate = torch.tensor(0.1, dtype=torch.float64 if wrong == "rate" else torch.float32)
    peers = PeerTensors([torch.zeros(16, dtype=dtype)], 0)
    with pytest.raises(AssertionError, match=r"bf16 or fp32|learning rate: fp32"):
        sharded_adagrad(torch.zeros(16), torch.zeros(16), peers, peers, 0, rate, 1e-8)


@pytest.mark.parametrize("update", [plain_sharded_adagrad, pytest.param(triton_sharded_adagrad, marks=needs_triton)])
def test_master_may_be_the_slice_of_the_own_weights(update: Callable[..., None]) -> None:
    first, size = 64, 2503
    grads, workings = buffers(2, 3000, torch.float32), buffers(2, 3000, torch.float32)
    state, expected_state = torch.rand(1, size, device=DEVICE).repeat(2, 1)
    master, rate = workings[1][first : first + size], torch.tensor([0.05], device=DEVICE)
    expected, others = master.clone(), [w.clone() for w in workings]
    peers = slices(grads, first, size, 1)
    plain_sharded_adagrad(expected, expected_state, peers, PeerTensors(others, 1), first, rate, 1e-8)
    update(master, state, peers, PeerTensors(workings, 1), first, rate, 1e-8)
    torch.testing.assert_close(state, expected_state)
    for working in workings:
        torch.testing.assert_close(working[first : first + size], expected)
