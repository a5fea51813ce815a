"""Pooled lookup into peers' memory: plain against torch's embedding bags, Triton against plain."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from dlrm_bench.kernels.embedding.pooled_lookup import (
    LookupTable,
    PooledTable,
    plain_pooled_lookup,
    pooled_lookup,
    triton_pooled_lookup,
)
from dlrm_bench.kernels.peer_tensors import PeerTensors
from tests.kernels.devices import DEVICE, needs_triton

ROWS = 50  # of each table
HOTS = [2, 100, 1, 7, 3, 20, 5]
UNTOUCHED = 77.0
Lookup = Callable[[Tensor, Tensor, LookupTable, PeerTensors, int], None]


class Example:
    """Tables of `hots` with a gap between their output columns, uniform ids, rank 1 (or the only one) as `own`."""

    def __init__(self, hots: list[int], columns: int, local_batch: int, ranks: int, first_out_row: int = 0) -> None:
        torch.manual_seed(0)
        self.columns, self.local_batch, self.ranks, self.first_out_row = columns, local_batch, ranks, first_out_row
        # Neither rows nor output columns in the order of the tables.
        self.tables = [
            PooledTable(hot, (len(hots) - 1 - t) * ROWS, 8 + t * (columns + 8)) for t, hot in enumerate(hots)
        ]
        self.weights = torch.randn(len(hots) * ROWS, columns, device=DEVICE)
        self.ids = torch.randint(ROWS, (ranks * local_batch * sum(hots),), dtype=torch.int32, device=DEVICE)
        self.table = LookupTable(self.tables, local_batch, ranks, DEVICE)

    def run(self, lookup: Lookup, dtype: torch.dtype) -> list[Tensor]:
        """Returns all ranks' outputs, with their unwritten surroundings."""
        width = 8 + len(self.tables) * (self.columns + 8)
        shape = (self.ranks, self.first_out_row + self.local_batch + 2, width + 16)
        padded = torch.full(shape, UNTOUCHED, dtype=dtype, device=DEVICE).unbind()
        outs = PeerTensors([out[:, 8 : 8 + width] for out in padded], min(1, self.ranks - 1))
        lookup(self.weights, self.ids, self.table, outs, self.first_out_row)
        return list(padded)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_equals_embedding_bags(dtype: torch.dtype) -> None:
    example = Example(HOTS, 16, local_batch=5, ranks=3, first_out_row=4)
    got = example.run(plain_pooled_lookup, dtype)
    expected = torch.full((3, *got[0].shape), UNTOUCHED, dtype=dtype, device=DEVICE)
    bags = example.ids.split([3 * 5 * hot for hot in HOTS])
    for table, flat in zip(example.tables, bags, strict=True):
        rows = example.weights[table.first_row : table.first_row + ROWS]
        pooled = embedding_bag(flat.view(-1, table.hot), rows, mode="sum").view(3, 5, 16)
        expected[:, 4:9, 8 + table.out_column : 8 + table.out_column + 16] = pooled.to(dtype)
    torch.testing.assert_close(torch.stack(got), expected)


SHAPES = [
    (HOTS, 32, 5, 3, 33),
    (HOTS, 16, 33, 1, 0),
    ([2, 12, 1, 7, 3], 64, 33, 2, 5),
    (HOTS, 128, 5, 2, 0),
    (HOTS, 128, 1, 1, 1),
    ([1], 64, 33, 3, 2),
    ([100], 64, 1, 4, 0),
    ([8, 16, 9], 64, 32, 2, 0),
]
# The dtype is that of the store alone. Where Triton is interpreted, slowly, all shapes but the first have one in turn.
CASES = [
    (*shape, dtype)
    for i, shape in enumerate(SHAPES)
    for j, dtype in enumerate((torch.bfloat16, torch.float32))
    if i == 0 or (i + j) % 2 or DEVICE.type == "cuda"
]


@needs_triton
@pytest.mark.parametrize(("hots", "columns", "local_batch", "ranks", "first_out_row", "dtype"), CASES)
def test_triton_equals_plain(
    hots: list[int], columns: int, local_batch: int, ranks: int, first_out_row: int, dtype: torch.dtype
) -> None:
    example = Example(hots, columns, local_batch, ranks, first_out_row)
    got = example.run(triton_pooled_lookup, dtype)
    expected = example.run(plain_pooled_lookup, dtype)
    # Ids are added in another order, so bf16 may round to a neighbour; what nobody writes is equal.
    for out, plain in zip(got, expected, strict=True):
        torch.testing.assert_close(out, plain, rtol=2**-7 if dtype == torch.bfloat16 else 1e-5, atol=1e-4)
        assert torch.equal(out == UNTOUCHED, plain == UNTOUCHED)
    example.weights = torch.stack([example.weights, torch.full_like(example.weights, torch.nan)], dim=1)[:, 0]
    again = example.run(triton_pooled_lookup, dtype)
    assert all(torch.equal(out, other) for out, other in zip(got, again, strict=True))


@needs_triton
@pytest.mark.parametrize(("tile", "widest_step"), [(8, 8), (16, 2), (64, 16), (32, 1)])
def test_every_tiling_gives_the_same_sums(tile: int, widest_step: int) -> None:
    example = Example(HOTS, 32, local_batch=5, ranks=2)

    def tiled(*arguments: object) -> None:
        triton_pooled_lookup(*arguments, tile=tile, widest_step=widest_step)  # type: ignore[arg-type]

    for out, plain in zip(
        example.run(tiled, torch.float32), example.run(plain_pooled_lookup, torch.float32), strict=True
    ):
        torch.testing.assert_close(out, plain, rtol=1e-5, atol=1e-4)


def test_dispatch_and_no_tables() -> None:
    example = Example([3, 1], 16, local_batch=5, ranks=2)
    for out, plain in zip(
        example.run(pooled_lookup, torch.float32), example.run(plain_pooled_lookup, torch.float32), strict=True
    ):
        torch.testing.assert_close(out, plain)
    empty = Example([1], 16, local_batch=5, ranks=2)
    empty.table = LookupTable([], 5, 2, DEVICE)
    assert all(bool((out == UNTOUCHED).all()) for out in empty.run(pooled_lookup, torch.float32))
