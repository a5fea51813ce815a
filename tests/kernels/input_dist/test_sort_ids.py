"""Sorts of ids by row: the plain one against Python's, CUDA against the plain one, bit for bit."""

import pytest
import torch

from dlrm_bench.kernels.input_dist.sort_ids import SortTable, cuda_sort_ids, plain_sort_ids, sort_ids
from tests.kernels.devices import DEVICE

# Few ids and many, of one pass and of four; one tile, a part of one, and hundreds; the ids of a few rows alone.
CASES = [
    pytest.param(rows, count, marks=marks)
    for rows, count, marks in [
        ([1], 1, ()),
        ([3, 40], 501, ()),
        ([70_000], 501, ()),
        ([200], 1024, pytest.mark.gpu),
        ([5, 40_000_000, 3, 100_000_000], 110_592, pytest.mark.gpu),
        ([40_000_000, 17_295, 3, 7122, 63, 90_000_000], 1_479_168, pytest.mark.gpu),
        ([2], 700_001, pytest.mark.gpu),
    ]
]


def make_case(tables: list[int], count: int) -> tuple[torch.Tensor, SortTable]:
    """Skewed ids of `tables` one after another, each with a bag of its own."""
    generator = torch.Generator().manual_seed(count)
    table = torch.arange(count) * len(tables) // count
    rows = torch.tensor(tables)[table]
    ids = (torch.rand(count, generator=generator, dtype=torch.float64) ** 9 * rows).long().clamp(max=rows - 1)
    starts = torch.tensor([sum(tables[:i]) for i in range(len(tables))])[table]
    bags = torch.randperm(count, generator=generator)
    ids, starts, bags = (tensor.to(DEVICE, torch.int32) for tensor in (ids, starts, bags))
    return ids, SortTable(starts, bags, sum(tables))


@pytest.mark.parametrize(("tables", "count"), CASES[:3])
def test_is_stable(tables: list[int], count: int) -> None:
    ids, table = make_case(tables, count)
    rows = [i + start for i, start in zip(ids.tolist(), table.first_rows.tolist(), strict=True)]
    expected = sorted(zip(rows, table.bags.tolist(), strict=True), key=lambda pair: pair[0])
    outputs = torch.empty_like(ids), torch.empty_like(ids)
    for sort in (sort_ids, plain_sort_ids):
        sort(ids, table, *outputs)
        assert list(zip(*(output.tolist() for output in outputs), strict=True)) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("digit_bits", [8, 7, 9])
@pytest.mark.parametrize(("tables", "count"), CASES)
def test_cuda_equals_plain(tables: list[int], count: int, digit_bits: int) -> None:
    ids, table = make_case(tables, count)
    table = SortTable(table.first_rows, table.bags, table.rows, digit_bits)
    if table.memory is None:
        pytest.skip("not a Hopper GPU")
    for divisor in (1, 1, 3):  # what one sort leaves behind, the next one finds
        ids = ids // divisor
        got, expected = ([torch.full_like(ids, -7) for _ in range(2)] for _ in range(2))
        cuda_sort_ids(ids, table, *got)
        plain_sort_ids(ids, table, *expected)
        assert all(map(torch.equal, got, expected))


def test_ids_of_another_shape_are_refused() -> None:
    ids, table = make_case([3], 5)
    with pytest.raises(AssertionError, match="int32"):
        sort_ids(ids[:4], table, ids[:4].clone(), ids[:4].clone())
