"""Sorted Adagrad against torch.optim.Adagrad through autograd, and the Triton kernels against their plain twin."""

import pytest
import torch
from torch.nn import functional

from dlrm_bench.kernels._cuda import available
from dlrm_bench.kernels.embedding.sorted_adagrad import SortedAdagrad, plain_sorted_adagrad, sorted_adagrad
from dlrm_bench.kernels.input_dist.sort_ids import sort_rows
from tests.kernels.devices import DEVICE, needs_triton

EPS = 1e-8


def make_case(
    tables: list[int], batch: int, hot: int, columns: int, dtype: torch.dtype, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """weights, state, grad, linear ids and bags of `tables` (their row counts), all bags of `hot` ids."""
    generator = torch.Generator().manual_seed(seed)
    rows, first_row, ids, bags = sum(tables), 0, [], []
    for table, table_rows in enumerate(tables):
        ids.append(first_row + torch.randint(table_rows, (batch * hot,), generator=generator))
        bags.append((torch.arange(batch) * len(tables) + table).repeat_interleave(hot))
        first_row += table_rows
    weights = torch.randn(rows, columns, generator=generator)
    state = torch.rand(rows, columns, generator=generator)
    grad = torch.randn(batch, len(tables) * columns, generator=generator).to(dtype)
    to_device = (weights, state, grad, torch.cat(ids).int(), torch.cat(bags).int())
    return tuple(tensor.to(DEVICE) for tensor in to_device)  # type: ignore[return-value]


def in_order(ids: torch.Tensor, bags: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sorted ids, of which those below 0 are padding, and their bags."""
    sorted_ids, sorted_bags = torch.empty_like(ids), torch.empty_like(bags)
    sort_rows(ids, bags, sorted_ids, sorted_bags)
    return sorted_ids, sorted_bags


def test_plain_twin_equals_autograd_and_torch_adagrad() -> None:
    tables, batch, hot, columns = [3, 50, 1000], 37, 4, 16
    weights, _, grad, ids, bags = (t.cpu() for t in make_case(tables, batch, hot, columns, torch.float32))
    parameters = [torch.nn.Parameter(part.clone()) for part in weights.split(tables)]
    optimizer = torch.optim.Adagrad(parameters, lr=0.1, eps=EPS)
    state = torch.zeros_like(weights)
    first_rows = [0, 3, 53]
    for _ in range(3):
        pooled = [
            functional.embedding_bag(part.view(batch, hot) - first, parameter, mode="sum")
            for part, first, parameter in zip(ids.long().split(batch * hot), first_rows, parameters, strict=True)
        ]
        optimizer.zero_grad()
        torch.cat(pooled, dim=1).backward(grad)
        optimizer.step()
        sorted_adagrad(weights, state, grad, *in_order(ids, bags), torch.tensor([0.1]), EPS)
        torch.testing.assert_close(weights, torch.cat(list(parameters)).detach())


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [16, *(pytest.param(c, marks=pytest.mark.gpu) for c in (32, 64, 128))])
@pytest.mark.parametrize(
    ("tables", "batch", "hot"),
    [
        ([5000], 33, 7),  # runs of one or two
        ([3, 4, 40, 10_000], 59, 1),  # runs within a chunk and over several
        ([1], 100, 2),  # one run over everything
        pytest.param([1], 11_111, 3, marks=pytest.mark.gpu),  # and over more chunks than are merged at once
        ([2, 2], 16, 1),  # less than a chunk
        ([10], 30, 8),  # every border crossed
    ],
)
def test_triton_equals_plain(tables: list[int], batch: int, hot: int, columns: int, dtype: torch.dtype) -> None:
    from dlrm_bench.kernels.embedding.sorted_adagrad import triton_sorted_adagrad

    weights, state, grad, ids, bags = make_case(tables, batch, hot, columns, dtype)
    ids[::17] = -1  # padding
    ordered = in_order(ids, bags)
    rate = torch.tensor([0.05], device=DEVICE)
    expected, expected_state = weights.double(), state.double()  # long runs show what fp32 sums round off
    plain_sorted_adagrad(expected, expected_state, grad, *ordered, rate, EPS)
    again, again_state = torch.stack([weights, state], dim=1).unbind(1)  # each row's state after its weights
    triton_sorted_adagrad(weights, state, grad, *ordered, rate, EPS)
    triton_sorted_adagrad(again, again_state, grad, *ordered, rate, EPS)
    torch.testing.assert_close(state.double(), expected_state, rtol=2e-5, atol=5e-4)
    torch.testing.assert_close(weights.double(), expected, rtol=2e-5, atol=2e-5)
    assert torch.equal(weights, again)
    assert torch.equal(state, again_state)


@pytest.mark.gpu
@pytest.mark.skipif(not available(), reason="needs a Hopper GPU (sm_90a) and cuda-bindings")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [16, 32, 64, 128])
@pytest.mark.parametrize(("chunk", "unroll"), [(0, 0), (8, 4), (128, 8)])
@pytest.mark.parametrize(
    ("tables", "batch", "hot"),
    [([5000], 33, 7), ([3, 4, 40, 10_000], 59, 1), ([1], 11_111, 3), ([2, 2], 16, 1), ([7], 1, 1), ([10], 30, 8)],
)
def test_cuda_equals_plain(
    tables: list[int], batch: int, hot: int, chunk: int, unroll: int, columns: int, dtype: torch.dtype
) -> None:
    weights, state, grad, ids, bags = make_case(tables, batch, hot, columns, dtype)
    ids[::17] = -1  # padding
    ordered, rate = in_order(ids, bags), torch.tensor([0.05], device=DEVICE)
    expected, expected_state = weights.double(), state.double()
    plain_sorted_adagrad(expected, expected_state, grad, *ordered, rate, EPS)
    again, again_state = torch.stack([weights, state], dim=1).unbind(1)
    SortedAdagrad(weights, state, grad, *ordered, rate, EPS).cuda(chunk, unroll)
    SortedAdagrad(again, again_state, grad, *ordered, rate, EPS).cuda(chunk, unroll)
    # One after another, long runs round off more than pairs of pairs, as Triton adds them up.
    torch.testing.assert_close(state.double(), expected_state, rtol=2e-4, atol=5e-3)
    torch.testing.assert_close(weights.double(), expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(weights, again)
    assert torch.equal(state, again_state)


@pytest.mark.gpu
@pytest.mark.skipif(not available(), reason="needs a Hopper GPU (sm_90a) and cuda-bindings")
@pytest.mark.parametrize("columns", [16, 32, 64, 128])
@pytest.mark.parametrize("chunk", [1, 8, 32, 128])
def test_the_bits_of_a_row_do_not_depend_on_where_it_is(chunk: int, columns: int) -> None:
    """Rows may be sorted by number or by place."""
    tables, batch, hot = [1, 3, 9, 40, 300, 10_000], 1_111, 3  # runs of one id and of 3,333
    weights, state, grad, ids, bags = make_case(tables, batch, hot, columns, torch.bfloat16)
    ordered, rate = in_order(ids, bags), torch.tensor([0.05], device=DEVICE)
    runs = torch.unique_consecutive(ordered[0], return_inverse=True)[1].cpu()
    trained = []
    for seed in range(4):
        moved = torch.randperm(int(runs.max()) + 1, generator=torch.Generator().manual_seed(seed))[runs]
        at = torch.sort(moved, stable=True).indices.to(DEVICE)
        updated = torch.stack([weights, state], dim=1)
        SortedAdagrad(*updated.unbind(1), grad, *(of[at] for of in ordered), rate, EPS).cuda(chunk)
        trained.append(updated)
    assert not torch.equal(trained[0][:, 0], weights)
    for of_order in trained[1:]:
        assert torch.equal(of_order, trained[0])


@pytest.mark.gpu
@pytest.mark.skipif(not available(), reason="needs a Hopper GPU (sm_90a) and cuda-bindings")
@pytest.mark.parametrize("columns", [16, 32, 64, 128])
@pytest.mark.parametrize("others", [0, 10, 100_000, 1_200_000])
def test_the_bits_of_a_row_do_not_depend_on_the_number_of_ids(others: int, columns: int) -> None:
    """Nor on its columns being on several ranks: plans of whole tables and of parts of columns train alike."""
    tables, batch, hot = [1, 3, 9, 40, 300], 1_111, 3
    weights, state, grad, ids, bags = make_case(tables, batch, hot, columns, torch.bfloat16)
    rate, rows = torch.tensor([0.05], device=DEVICE), len(weights)
    alone, together = torch.stack([weights, state], dim=1), torch.randn(rows + others, 2, columns, device=DEVICE).abs()
    together[others:] = alone
    SortedAdagrad(*alone.unbind(1), grad, *in_order(ids, bags), rate, EPS).cuda()
    all_ids = torch.cat([torch.arange(others, device=DEVICE, dtype=torch.int32), ids + others])
    all_bags = torch.cat([bags[:1].expand(others), bags])
    SortedAdagrad(*together.unbind(1), grad, *in_order(all_ids, all_bags), rate, EPS).cuda()
    assert not torch.equal(alone[:, 0], weights)
    assert torch.equal(together[others:], alone)
    half = columns // 2
    if half >= 16:
        part = torch.stack([weights, state], dim=1)[:, :, :half].contiguous()
        grad_of_part = grad.view(-1, columns)[:, :half].contiguous()
        SortedAdagrad(*part.unbind(1), grad_of_part, *in_order(ids, bags), rate, EPS).cuda()
        assert torch.equal(part, alone[:, :, :half])


def test_one_over_capacity_of_what_is_supported_is_refused() -> None:
    weights = torch.zeros(4, 12)
    ids = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(AssertionError, match="columns"):
        sorted_adagrad(weights, weights.clone(), torch.zeros(2, 12), ids, ids, torch.ones(1), EPS)


def test_refuses_what_the_kernels_would_read_as_other_numbers() -> None:
    weights, ids, rate = torch.zeros(4, 16), torch.zeros(2, dtype=torch.int32), torch.ones(1)
    given = (weights, weights.clone(), torch.zeros(2, 16))
    with pytest.raises(AssertionError, match="learning rate: fp32"):
        sorted_adagrad(*given, ids, ids, rate.double(), EPS)
    for wrong in (ids[:1], torch.zeros(2, 2, dtype=torch.int32)[:, 0]):
        with pytest.raises(AssertionError, match="a bag for each sorted id"):
            sorted_adagrad(*given, ids, wrong, rate, EPS)
