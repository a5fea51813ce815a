"""Rows in two tiers of memory: kernels against plain functions, and lookup and update against rows in one memory."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from dlrm_bench.kernels._cuda import available
from dlrm_bench.kernels.embedding import tiered_rows
from dlrm_bench.kernels.embedding.pooled_lookup import (
    LookupTable,
    PooledTable,
    pooled_lookup,
    triton_pooled_lookup,
)
from dlrm_bench.kernels.embedding.sorted_adagrad import sorted_adagrad, triton_sorted_adagrad
from dlrm_bench.kernels.embedding.tiered_rows import (
    ExchangeRows,
    Tiers,
    copy_rows,
    exchange_rows,
    plain_copy_rows,
    plain_exchange_rows,
    triton_copy_rows,
    triton_exchange_rows,
)
from dlrm_bench.kernels.peer_tensors import PeerTensors
from tests.kernels.devices import DEVICE, needs_triton

ROWS = 60
SPLITS = [2, 30, 59, 60]
"""Rows on the device."""


@dataclass(frozen=True, slots=True)
class Example:
    """The same rows in one memory, [ROWS, 2, C], and in two, each at its place."""

    whole: Tensor
    tiers: Tiers
    place: Tensor
    """int32 [ROWS]."""

    def again(self) -> Tensor:
        """Returns the rows of the tiers in their order, [ROWS, 2, C]."""
        return torch.cat([self.tiers.device, self.tiers.host.to(DEVICE)])[self.place.long()]


def example(on_device: int, columns: int = 16) -> Example:
    generator = torch.Generator().manual_seed(on_device)
    whole = torch.rand(ROWS, 2, columns, generator=generator)
    place = torch.randperm(ROWS, generator=generator)
    placed = torch.empty_like(whole)
    placed[place] = whole
    return Example(whole.to(DEVICE), in_tiers(placed[:on_device], placed[on_device:]), place.int().to(DEVICE))


def in_tiers(device: Tensor, host: Tensor) -> Tiers:
    """Returns copies of rows, which are on the CPU, in the memory of their tiers."""
    host = host.clone()
    return Tiers(device.clone().to(DEVICE), host.pin_memory() if DEVICE.type == "cuda" else host)


@pytest.mark.parametrize("on_device", SPLITS)
@pytest.mark.parametrize("copy", [copy_rows, plain_copy_rows, pytest.param(triton_copy_rows, marks=needs_triton)])
def test_rows_are_read_and_written_where_they_are(copy: "type[copy_rows]", on_device: int) -> None:
    case = example(on_device)
    some = torch.randperm(ROWS, generator=torch.Generator().manual_seed(1))[:37].to(DEVICE)
    new = torch.rand(37, 16, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    for which, column, columns in ((0, 0, 16), (1, 0, 16), (1, 5, 3)):
        rows = torch.zeros(37, columns, device=DEVICE)
        copy(case.tiers, case.place[some], which, column, rows, writes=False)
        assert torch.equal(rows, case.whole[some, which, column : column + columns])
    copy(case.tiers, case.place[some], 1, 0, new, writes=True)
    copy(case.tiers, case.place[some], 0, 4, new[:, :7].contiguous(), writes=True)
    case.whole[some, 1] = new
    case.whole[some, 0, 4:11] = new[:, :7]
    assert torch.equal(case.again(), case.whole)


@needs_triton
@pytest.mark.parametrize("columns", [16, 64, 128, 512])
def test_rows_are_exchanged(columns: int) -> None:
    """On Hopper exchange_rows is the kernel in CUDA C++; the pairs are more than a warp's at a time."""
    count = 23
    for bounds in ([0, count], [3, 20], [7, 7], [22, 23]):
        cases = [example(30, columns) for _ in range(3)]
        generator = torch.Generator().manual_seed(0)
        on_device, in_host = (torch.randperm(30, generator=generator)[:count].int().to(DEVICE) for _ in range(2))
        limits = torch.tensor(bounds, dtype=torch.int32, device=DEVICE)
        for case, exchange in zip(cases, (exchange_rows, plain_exchange_rows, triton_exchange_rows), strict=True):
            exchange(case.tiers, on_device, in_host, limits)
        which = slice(*bounds)
        a, b = on_device[which].long(), 30 + in_host[which].long()
        expected = torch.cat([example(30, columns).tiers.device, example(30, columns).tiers.host.to(DEVICE)])
        expected[torch.cat([a, b])] = expected[torch.cat([b, a])]
        for case in cases:
            assert torch.equal(torch.cat([case.tiers.device, case.tiers.host.to(DEVICE)]), expected)


@needs_triton
@pytest.mark.parametrize("count", [200, pytest.param(5000, marks=pytest.mark.gpu)])
def test_more_rows_are_exchanged_than_are_under_way_at_a_time(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel in CUDA C++ has eight of each multiprocessor under way."""
    monkeypatch.setattr(tiered_rows, "_PROGRAMS", 2)
    generator = torch.Generator().manual_seed(0)
    rows = torch.rand(2, count, 2, 64, generator=generator)
    all_tiers = [in_tiers(*rows) for _ in range(3)]
    on_device, in_host = (torch.randperm(count, generator=generator).int().to(DEVICE) for _ in range(2))
    bounds = torch.tensor([3, count - 2], dtype=torch.int32, device=DEVICE)
    for tiers, exchange in zip(all_tiers, (plain_exchange_rows, exchange_rows, triton_exchange_rows), strict=True):
        exchange(tiers, on_device, in_host, bounds)
        for tier, expected in zip(tiers, all_tiers[0], strict=True):
            assert torch.equal(tier.to(DEVICE), expected.to(DEVICE))
    assert not torch.equal(all_tiers[0].host, rows[1])


@pytest.mark.gpu
@pytest.mark.skipif(not available(), reason="needs a Hopper GPU (sm_90a) and cuda-bindings")
@pytest.mark.parametrize(("blocks", "warps"), [(1, 1), (3, 4), (8, 16), (200, 32)])
def test_rows_are_exchanged_by_several_warps_of_few_blocks(blocks: int, warps: int) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.rand(2, 5000, 2, 64, generator=generator)
    plain, tiers = in_tiers(*rows), in_tiers(*rows)
    on_device, in_host = (torch.randperm(5000, generator=generator).int().to(DEVICE) for _ in range(2))
    bounds = torch.tensor([3, 4998], dtype=torch.int32, device=DEVICE)
    plain_exchange_rows(plain, on_device, in_host, bounds)
    ExchangeRows(tiers, on_device, in_host, bounds).cuda(blocks, warps)
    for tier, expected in zip(tiers, plain, strict=True):
        assert torch.equal(tier.to(DEVICE), expected.to(DEVICE))


@needs_triton
@pytest.mark.parametrize(
    ("lookup", "on_device"), [*((pooled_lookup, split) for split in SPLITS), (triton_pooled_lookup, 30)]
)
def test_lookup_in_tiers_equals_that_in_one_memory(lookup: "type[pooled_lookup]", on_device: int) -> None:
    case = example(on_device)
    hots, firsts, batch = (3, 12, 1), (0, 10, 40), 7
    ids = [
        torch.randint(rows, (batch * hot,), generator=torch.Generator().manual_seed(hot)).to(DEVICE)
        for hot, rows in zip(hots, (10, 30, 20), strict=True)
    ]
    outs = [PeerTensors([torch.zeros(batch, 48, device=DEVICE)], 0) for _ in range(2)]
    for tiered, out in zip((False, True), outs, strict=True):
        tables = [
            PooledTable(hot, 0 if tiered else first, 16 * t)
            for t, (hot, first) in enumerate(zip(hots, firsts, strict=True))
        ]
        table = LookupTable(tables, batch, 1, DEVICE)
        if tiered:
            places = torch.cat([case.place[first + of] for first, of in zip(firsts, ids, strict=True)])
            lookup(case.tiers.weights, places, table, out, host=case.tiers.host)
        else:
            lookup(case.whole[:, 0], torch.cat(ids).int(), table, out)
    assert torch.equal(outs[0].own, outs[1].own)
    assert outs[0].own.all()


@needs_triton
@pytest.mark.parametrize(
    ("update", "on_device"), [*((sorted_adagrad, split) for split in SPLITS), (triton_sorted_adagrad, 30)]
)
def test_update_in_tiers_equals_that_in_one_memory(update: "type[sorted_adagrad]", on_device: int) -> None:
    case = example(on_device)
    generator = torch.Generator().manual_seed(0)
    # Rare rows, and two in runs over several chunks.
    ids = torch.cat([torch.randint(ROWS, (50,), generator=generator), torch.full((30,), 3), torch.full((30,), 57)])
    ids = torch.cat([torch.full((5,), -1), ids.sort().values]).int().to(DEVICE)
    bags = torch.randint(40, (len(ids),), generator=generator).int().to(DEVICE)
    grad = torch.randn(40, 16, generator=generator).to(DEVICE)
    rate = torch.tensor([0.05], device=DEVICE)
    places = torch.where(ids < 0, -1, case.place[ids.clamp_min(0).long()])
    update(case.tiers.weights, case.tiers.state, grad, places, bags, rate, 1e-8, host=case.tiers.host)
    update(case.whole[:, 0], case.whole[:, 1], grad, ids, bags, rate, 1e-8)
    assert torch.equal(case.again(), case.whole)
    assert not torch.equal(case.whole, example(on_device).whole)
