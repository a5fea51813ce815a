"""Picking rows: the Triton kernels against the plain twin, whatever the lists take."""

import pytest
import torch

from dlrm_bench.kernels.input_dist.pick_rows import PickedTable, Picks, PickTable, plain_pick_rows, triton_pick_rows
from tests.kernels.devices import DEVICE, needs_triton

TABLES = (PickedTable(100, 1, 4, 0), PickedTable(1, 0, 1, 500), PickedTable(3, 2, 3, 600))


def empty(table: PickTable, capacity: int) -> Picks:
    rows, sort_rows, bags = torch.full((3, capacity), 7, dtype=torch.int32, device=DEVICE)
    offsets = torch.zeros(table.num_bags + 1, dtype=torch.int32, device=DEVICE)
    return Picks(rows, sort_rows, bags, offsets, offsets[:1].clone())


@needs_triton
@pytest.mark.parametrize("share", [1.0, 0.2, 0.0], ids=["all fit", "overflow", "none"])
@pytest.mark.parametrize(("samples", "parts"), [(37, 2), (1, 1)])
def test_triton_equals_plain(samples: int, parts: int, share: float) -> None:
    table = PickTable(TABLES, samples, parts, DEVICE)
    ids = torch.randint(-1, 2000, (table.num_ids,), dtype=torch.int32, device=DEVICE)
    if share == 0:
        ids.fill_(-1)
    got, expected = (empty(table, max(1, round(share * table.num_ids))) for _ in range(2))
    triton_pick_rows(ids, table, got)
    plain_pick_rows(ids, table, expected)
    for name, mine, plain in zip(Picks._fields, got, expected, strict=True):
        assert torch.equal(mine, plain), name
