"""The order of raw ids: by table, then by id, with equal ids in the order of the batch."""

import pytest
import torch

from dlrm_bench.dlrm.dcnv2.config import OptimizerConfig
from dlrm_bench.dlrm.tables.pooled.raw_order import RawOrder
from dlrm_bench.dlrm.tables.pooled.tbe import FixedTBE, TBEShape

DEVICES = [torch.device("cpu"), pytest.param(torch.device("cuda"), marks=pytest.mark.gpu)]
IDS = [0, -1, 1, -(1 << 63), (1 << 63) - 1, 5, 5 + (1 << 32), 5 - (1 << 40)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("tables", "count"), [(1, 1), (1, 300), (26, 5000), (300, 2000)])
def test_equals_a_naive_sort(tables: int, count: int, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(tables)
    of = torch.randint(tables, (count,), generator=generator, dtype=torch.int32)
    ids = torch.tensor(IDS)[torch.randint(len(IDS), (count,), generator=generator)]
    bags = torch.randperm(count, generator=generator).int()
    order = RawOrder(of.to(device), bags.to(device))
    sorted_ids, sorted_bags = torch.zeros_like(ids, device=device), torch.zeros_like(bags, device=device)
    order.sort(ids.to(device), sorted_ids, sorted_bags)
    naive = sorted(zip(of.tolist(), ids.tolist(), range(count), strict=True))
    keys = order.sorted_keys(sorted_ids)
    assert keys.tables is not None
    assert list(zip(keys.tables.tolist(), keys.ids.tolist(), strict=True)) == [(t, i) for t, i, _ in naive]
    assert sorted_bags.tolist() == [int(bags[at]) for *_, at in naive]


def test_tables_and_bags_are_those_of_row_numbers() -> None:
    """Of two parts of a batch, whose ids are rows: in the same order as rows over all tables."""
    rows, hot, samples, parts = (50, 20, 9), (2, 3, 1), 5, 2
    shape = {"rows": rows, "hot": hot, "columns": 16, "samples": samples, "dtype": torch.float32, "parts": parts}
    generator, cpu = torch.Generator().manual_seed(3), torch.device("cpu")
    ids = torch.cat(
        [torch.randint(of, (samples * n,), generator=generator).int() for of, n in zip(rows * 2, hot * 2, strict=True)]
    )
    sorts = []
    for raw in (False, True):
        tbe = FixedTBE(TBEShape(**shape, raw_ids=raw), OptimizerConfig().tables, 0.1, cpu, True, places=40)
        given = ids.long() if raw else ids
        sorted_ids, bags = torch.zeros_like(given), torch.zeros_like(ids)
        tbe.sort(given, sorted_ids, bags)
        of_batch, in_order = tbe.keys_of(given), tbe.sorted_keys(sorted_ids)
        if raw:
            first = torch.tensor(tbe.first_row)
            of_batch, in_order = (type(keys)(first[keys.tables] + keys.ids) for keys in (of_batch, in_order))
        sorts.append((of_batch.ids.long(), in_order.ids.long(), bags))
    for numbered, raw_ids in zip(*sorts, strict=True):
        assert torch.equal(numbered, raw_ids)
