"""Flags of losses that are not finite, Triton against the plain twins, and updates that read them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import dlrm_bench.kernels.non_finite
from dlrm_bench.kernels._cuda import available
from dlrm_bench.kernels.dense.flat_adagrad import plain_flat_adagrad, triton_flat_adagrad
from dlrm_bench.kernels.dense.sharded_adagrad import cuda_sharded_adagrad, plain_sharded_adagrad, triton_sharded_adagrad
from dlrm_bench.kernels.embedding.sorted_adagrad import (
    SortedAdagrad,
    cuda_sorted_adagrad,
    plain_sorted_adagrad,
    triton_sorted_adagrad,
)
from dlrm_bench.kernels.non_finite import (
    GradientTables,
    Watch,
    plain_clear_gradients,
    plain_clear_reported,
    plain_cleared_gradients,
    plain_raise_flag,
    plain_report_together,
    triton_clear_gradients,
    triton_clear_reported,
    triton_cleared_gradients,
    triton_raise_flag,
    triton_report_together,
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
    raise_flag: Callable[[Tensor, Tensor, PeerTensors], None], bad: float, count: int
) -> None:
    flags = PeerTensors([torch.zeros(4, dtype=torch.int32, device=DEVICE) for _ in range(3)], 1)
    losses = torch.rand(count, 5, device=DEVICE)[:, 0]  # of a stride, as the partial sums have it
    tallied = torch.zeros(5, 2, dtype=torch.int64, device=DEVICE)[:, 1]
    raise_flag(losses, tallied, flags)
    assert not any(flag.any() for flag in flags.tensors)
    losses[count // 2] = bad
    raise_flag(losses, tallied, flags)
    losses.zero_()
    raise_flag(losses, tallied, flags)
    assert [flag.tolist() for flag in flags.tensors] == [[0, 1, 0, 0]] * 3


@pytest.mark.parametrize("raise_flag", twins(plain_raise_flag, triton_raise_flag))
def test_what_was_tallied_raises_a_flag(raise_flag: Callable[[Tensor, Tensor, PeerTensors], None]) -> None:
    flags = PeerTensors([torch.zeros(2, dtype=torch.int32, device=DEVICE) for _ in range(2)], 0)
    tallies = torch.zeros(25, 2, dtype=torch.int64, device=DEVICE)
    tallies[:, 0] = 3  # beside it
    raise_flag(torch.rand(7, device=DEVICE), tallies[:, 1], flags)
    assert not any(flag.any() for flag in flags.tensors)
    tallies[24, 1] = 1 << 40
    raise_flag(torch.rand(7, device=DEVICE), tallies[:, 1], flags)
    assert [flag.tolist() for flag in flags.tensors] == [[1, 0]] * 2


@pytest.mark.parametrize("clear", twins(plain_clear_gradients, triton_clear_gradients))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_are_cleared_where_a_flag_is_raised_or_they_are_not_finite(
    clear: Callable[[Watch, Tensor], None], dtype: Any
) -> None:
    gradients = torch.rand(33, 301, device=DEVICE).to(dtype)
    stopped, bad = (torch.zeros(n, dtype=t, device=DEVICE) for n, t in ((2, torch.int32), (1, torch.int64)))
    expected = gradients.clone()
    clear(Watch(stopped, bad), gradients)
    assert torch.equal(gradients, expected)
    assert bad == 0
    for (row, column), value in {(3, 4): torch.nan, (30, 300): -torch.inf, (0, 0): torch.inf}.items():
        gradients[row, column], expected[row, column] = value, 0
    clear(Watch(stopped, bad), gradients)
    assert torch.equal(gradients, expected)
    assert bad == 1
    gradients[5], bad[0] = torch.nan, 0
    clear(Watch(stopped + 1, bad), gradients)
    assert not gradients.any()
    assert bad == 0


@pytest.mark.parametrize("cleared", twins(plain_cleared_gradients, triton_cleared_gradients))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("stops", [0, 1])
def test_a_cleared_copy_is_what_clearing_leaves(
    cleared: Callable[[Watch, Tensor], Tensor], dtype: Any, strided: bool, stops: int
) -> None:
    gradients = torch.rand(33, 301, device=DEVICE).to(dtype)
    gradients = gradients.t() if strided else gradients
    for (row, column), value in {(3, 4): torch.nan, (30, 30): -torch.inf, (0, 0): torch.inf}.items():
        gradients[row, column] = value
    stopped = torch.tensor([0, stops], dtype=torch.int32, device=DEVICE)
    bad, of_plain = (torch.zeros(1, dtype=torch.int64, device=DEVICE) for _ in range(2))
    before, expected = gradients.clone(), gradients.contiguous().clone()
    plain_clear_gradients(Watch(stopped, of_plain), expected)
    found = cleared(Watch(stopped, bad), gradients)
    assert torch.equal(found, expected)
    assert found.is_contiguous()
    assert bad == of_plain == 1 - stops
    assert found.data_ptr() != gradients.data_ptr()
    assert torch.equal(gradients.nan_to_num(), before.nan_to_num())
    assert cleared(Watch(stopped, bad), gradients[:0]).shape == gradients[:0].shape


@needs_triton
@pytest.mark.parametrize("copies", [False, True])
def test_gradients_of_more_blocks_than_programs_are_cleared_whole(
    copies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    block, programs = 4, 1024
    monkeypatch.setattr(dlrm_bench.kernels.non_finite, "_BLOCK", block)
    gradients, watch = torch.rand(block * programs + 3, device=DEVICE), watch_of()
    expected = gradients.clone()
    gradients[-1], expected[-1] = torch.nan, 0
    found = triton_cleared_gradients(watch, gradients) if copies else gradients
    if not copies:
        triton_clear_gradients(watch, gradients)
    assert torch.equal(found, expected)
    assert watch.bad == 1


def together(report: Callable[..., None], clear: Callable[..., None]) -> Callable[..., None]:
    """Returns a function that reports, which changes nothing, and clears."""

    def both(watch: Watch, gradients: list[Tensor], tables: GradientTables) -> None:
        before = [gradient.clone() for gradient in gradients]
        report(watch, gradients, tables)
        assert all(of.equal(was) or of.isnan().any() for of, was in zip(gradients, before, strict=True))
        clear(watch, gradients, tables)

    return both


TOGETHER = twins(
    together(plain_report_together, plain_clear_reported), together(triton_report_together, triton_clear_reported)
)


@pytest.mark.parametrize("clear", TOGETHER)
@pytest.mark.parametrize("bad", [float("nan"), -float("inf"), 1e20, None])
def test_gradients_are_cleared_together(clear: Callable[..., None], bad: float | None) -> None:
    """1e20: its square is not finite."""
    memory, tables = torch.rand(30_000, device=DEVICE), GradientTables()
    gradients = [memory[:1].view(1, 1), memory[1:20_001].view(100, 200), memory[25_000:25_013]]
    expected, watch = memory.clone(), watch_of()
    if bad is not None:
        memory[20_000] = bad  # the last of the second
        for part in (expected[:20_001], expected[25_000:25_013]):
            part.zero_()
    for _ in range(2):
        clear(watch, gradients, tables)
        assert torch.equal(memory, expected)
        assert watch.bad == (bad is not None)
    watch.bad.zero_()
    watch.stopped[1] = 1
    memory[:20_001] = torch.nan
    clear(watch, gradients, tables)
    assert not memory[:20_001].any()
    assert not memory[25_000:25_013].any()
    assert watch.bad == 0


@pytest.mark.parametrize("clear", TOGETHER)
def test_a_longer_gradient_at_the_address_of_a_shorter_one_is_cleared_whole(clear: Callable[..., None]) -> None:
    """Parameters that have gradients in turn find the same memory again: the allocator hands it out by size class."""
    memory, tables, watch = torch.rand(100, device=DEVICE), GradientTables(), watch_of()
    clear(watch, [memory[:60]], tables)
    assert watch.bad == 0
    memory[80] = torch.nan
    clear(watch, [memory], tables)
    assert watch.bad == 1
    assert not memory.any()


def test_addresses_of_gradients_that_move_with_every_step_do_not_pile_up() -> None:
    memory, tables = torch.rand(100, device=DEVICE), GradientTables()
    for start in range(20):
        of_step = tables.of([memory[start : start + 5]])
        assert all(map(torch.equal, of_step, tables.of([memory[start : start + 5]])))
        assert of_step[0].tolist() == [memory[start:].data_ptr()]
    assert len(tables._of) <= GradientTables._KEPT


UPDATES: dict[str, tuple[Callable[..., None], ...]] = {
    "plain": (plain_flat_adagrad, plain_sharded_adagrad, plain_sorted_adagrad),
    "triton": (triton_flat_adagrad, triton_sharded_adagrad, triton_sorted_adagrad),
    "cuda": (triton_flat_adagrad, cuda_sharded_adagrad, cuda_sorted_adagrad),
}
HOPPER = [pytest.mark.gpu, pytest.mark.skipif(not available(), reason="needs a Hopper GPU (sm_90a) and cuda-bindings")]


def watch_of(flags: int = 2) -> Watch:
    return Watch(*(torch.zeros(n, dtype=t, device=DEVICE) for n, t in ((flags, torch.int32), (1, torch.int64))))


def updates(by: str) -> list[Callable[[Tensor, Tensor, Tensor, Watch], None]]:
    """Returns functions of weights and state [4, 16], gradients that fit them, and a watch."""
    flat, sharded, of_sorted = UPDATES[by]
    rate = torch.tensor([0.1], device=DEVICE)
    ids = torch.tensor([0, 1, 1, 3], dtype=torch.int32, device=DEVICE)
    bags = torch.arange(4, dtype=torch.int32, device=DEVICE)

    def run_flat(weights: Tensor, state: Tensor, grad: Tensor, watch: Watch) -> None:
        flat(weights.view(-1), state.view(-1), grad.view(-1), rate, EPS, None, watch)

    def run_sharded(weights: Tensor, state: Tensor, grad: Tensor, watch: Watch) -> None:
        grads, workings = (PeerTensors([tensor.view(-1)], 0) for tensor in (grad, weights))
        sharded(weights.view(-1), state.view(-1), grads, workings, 0, rate, EPS, watch)

    def run_sorted(weights: Tensor, state: Tensor, grad: Tensor, watch: Watch) -> None:
        of_sorted(weights, state, grad, ids, bags, rate, EPS, watch)

    return [run_flat, run_sharded, run_sorted]


@pytest.mark.parametrize(
    "by", ["plain", pytest.param("triton", marks=needs_triton), pytest.param("cuda", marks=HOPPER)]
)
@pytest.mark.parametrize("update", range(3), ids=["flat", "sharded", "sorted"])
def test_an_update_does_nothing_where_a_flag_is_raised(update: int, by: str) -> None:
    run = updates(by)[update]
    weights, state, grad = torch.rand(3, 4, 16, device=DEVICE).unbind()
    watch = watch_of()
    kept, kept_state = weights.clone(), state.clone()
    watch.stopped[1] = 1
    run(weights, state, torch.full_like(grad, torch.nan), watch)
    assert torch.equal(weights, kept)
    assert torch.equal(state, kept_state)
    watch.stopped.zero_()
    run(weights, state, grad, watch)
    assert not torch.equal(weights, kept)
    assert weights.isfinite().all()
    assert watch.bad == 0


@pytest.mark.parametrize(
    "by", ["plain", pytest.param("triton", marks=needs_triton), pytest.param("cuda", marks=HOPPER)]
)
@pytest.mark.parametrize("update", range(3), ids=["flat", "sharded", "sorted"])
def test_an_update_leaves_what_would_not_be_finite_and_tells(update: int, by: str) -> None:
    """The last row's gradient has one whose square is not finite, where ids name it."""
    run = updates(by)[update]
    weights, state, grad = torch.rand(3, 4, 16, device=DEVICE).unbind()
    expected, expected_state = weights.clone(), state.clone()
    run(expected, expected_state, grad, watch_of())
    watch, before, before_state = watch_of(), weights.clone(), state.clone()
    places = {(0, 3): torch.nan, (0, 4): torch.inf, (1, 15): -torch.inf, (3, 0): 1e20}
    for place, value in places.items():
        grad[place] = value
        expected[place], expected_state[place] = before[place], before_state[place]
    run(weights, state, grad, watch)
    assert watch.bad == 1
    assert not watch.stopped.any()
    torch.testing.assert_close(weights, expected, rtol=0, atol=0)
    torch.testing.assert_close(state, expected_state, rtol=0, atol=0)


@pytest.mark.parametrize(
    "update",
    [
        pytest.param(lambda *arguments: SortedAdagrad(*arguments).triton(tile=8, chunk=16), marks=needs_triton),
        pytest.param(lambda *arguments: SortedAdagrad(*arguments).cuda(chunk=16), marks=HOPPER),
    ],
)
def test_runs_that_cross_chunks_are_not_merged_where_a_flag_is_raised(update: Callable[..., None]) -> None:
    ids = torch.zeros(64, dtype=torch.int32, device=DEVICE)
    bags = torch.arange(64, dtype=torch.int32, device=DEVICE)
    weights, state = torch.rand(2, 1, 16, device=DEVICE).unbind()
    kept, rate = weights.clone(), torch.tensor([0.1], device=DEVICE)
    watch = watch_of(1)
    watch.stopped.fill_(1)
    grad = torch.rand(64, 16, device=DEVICE)
    update(weights, state, grad, ids, bags, rate, EPS, watch)
    assert torch.equal(weights, kept)
    watch.stopped.zero_()
    grad[40, 5] = torch.nan  # of a run that is merged
    update(weights, state, grad, ids, bags, rate, EPS, watch)
    assert watch.bad == 1
    assert (weights == kept)[0].nonzero().tolist() == [[5]]
    assert state.isfinite().all()
