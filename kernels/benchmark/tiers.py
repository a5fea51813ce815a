"""Benchmark cases for rows in two memory tiers: rows of 128 columns with their state, 1 KB each, in 4 GiB of either
tier. Bytes are those that cross the link to the host, both directions added."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from functools import partial

import torch

from dlrm_bench.kernels.benchmark.timing import Case, sorted_ids_case
from dlrm_bench.kernels.embedding._placement_state import NUMBERS, Moves, PlacementState, PoolState
from dlrm_bench.kernels.embedding.find_places import find_places
from dlrm_bench.kernels.embedding.plan_moves import plan_moves
from dlrm_bench.kernels.embedding.tiered_rows import Tiers, copy_rows, exchange_rows, triton_exchange_rows

_ROWS, _COLUMNS = 1 << 22, 128
# Number of missing rows for 512 and 6,912 samples per GPU on two GPUs, half of the rows on the device, by simulation.
_MISSING = (1_526, 20_159)


def _tiers() -> Tiers:
    shape = (_ROWS, 2, _COLUMNS)
    return Tiers(torch.zeros(shape, device="cuda"), torch.zeros(shape, pin_memory=True))


@functools.cache
def _factors() -> tuple[torch.Tensor, torch.Tensor, torch.cuda.Stream]:
    a, b = torch.randn(2, 8192, 4096, device="cuda", dtype=torch.bfloat16).unbind()
    return a, b.t(), torch.cuda.Stream(priority=-1)


def _beside_products(run: Callable[[], None]) -> None:
    """Exchanges rows while two pairs of matrices are multiplied (0.55 TFLOP each, some 0.7 ms), which occupies every
    multiprocessor."""
    a, b, products = _factors()
    products.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(products):
        for _ in range(2):
            torch.mm(a, b)
    run()
    torch.cuda.current_stream().wait_stream(products)


def tiered_rows_cases() -> Iterator[Case]:
    tiers, bytes_of_row = _tiers(), 4 * _COLUMNS
    for count in _MISSING:
        on_device, in_host = (torch.randperm(_ROWS, device="cuda")[:count].int() for _ in range(2))
        bounds = torch.tensor([0, count], dtype=torch.int32, device="cuda")
        for words, exchange in (("", exchange_rows), (", by Triton", triton_exchange_rows)):
            run = partial(exchange, tiers, on_device, in_host, bounds)
            yield Case("exchange_rows", f"{count} rows{words}", 4 * bytes_of_row * count, run)
            beside = partial(_beside_products, run)
            yield Case("exchange_rows", f"{count} rows{words}, beside products", 4 * bytes_of_row * count, beside)
    places = _ROWS + torch.randperm(_ROWS, device="cuda")[: _MISSING[1]].int()
    rows = torch.zeros(len(places), _COLUMNS, device="cuda")
    for writes in (False, True):
        run = partial(copy_rows, tiers, places, 0, 0, rows, writes)
        direction = "to" if writes else "from"
        yield Case("copy_rows", f"{len(places)} rows {direction} the host", bytes_of_row * len(places), run)


def plan_moves_cases() -> Iterator[Case]:
    """Yields half of 40 million rows on the device, in one pool or in four, and uniform ids of one 20-hot table. Most
    rows are missing at first; all that fit come to the device with the first replays."""
    rows, window = 40_000_000, 1 << 17
    for pools, batches in ((1, (1024, 13_824)), (4, (1024,))):
        state, of_pool = _state_of(rows, pools, 4 * window // pools), rows // pools
        slots = torch.zeros(2, pools, window // pools, dtype=torch.int32, device="cuda").unbind()
        bounds = torch.zeros(2, pools, 2, dtype=torch.int32, device="cuda").unbind()
        moves = [Moves(*of) for of in zip(*slots, *bounds, strict=True)]
        for batch in batches:
            ids = [k * of_pool + sorted_ids_case([of_pool], batch // pools, 20)[0].sort().values for k in range(pools)]
            # Per id: the id, place, batch and count; the latter two are also written.
            moved = 20 * batch * (4 + 4 + 1 + 1 + 2)
            shape = f"{20 * batch} ids, a window of {window}" + (f", {pools} pools" if pools > 1 else "")
            yield Case("plan_moves", shape, moved, partial(plan_moves, ids, state, moves))


def find_places_cases() -> Iterator[Case]:
    """Yields uniform ids of one 20-hot table of 40 million rows."""
    place = torch.randperm(40_000_000, device="cuda").int()
    for batch in (1024, 13_824):
        rows, _ = sorted_ids_case([len(place)], batch, 20)
        out = torch.empty_like(rows)
        yield Case("find_places", f"{len(rows)} rows", 3 * rows.nbytes, partial(find_places, place, rows, out))


def _state_of(rows: int, pools: int, guests: int) -> PlacementState:
    """Returns a state of pools of equal size, half of their rows on the device. guests: of each pool."""
    device_rows, halving, half = rows // 2, 4096, rows // pools // 2
    place = torch.arange(rows + 1, dtype=torch.int32, device="cuda")
    place[:rows] = place[:rows].view(2, pools, half).transpose(0, 1).reshape(-1)
    place[-1] = -1
    occupant = torch.arange(rows, dtype=torch.int32, device="cuda").view(pools, 2, half)[:, 0].reshape(-1)
    guest = torch.zeros(device_rows, dtype=torch.uint8, device="cuda")
    guest.view(pools, half)[:, :guests] = 1
    heads = torch.zeros(2, pools, 1, dtype=torch.int64, device="cuda")
    rings = [torch.arange(k * half, k * half + guests, dtype=torch.int32, device="cuda") for k in range(pools)]
    return PlacementState(
        place=place,
        occupant=torch.cat([occupant, occupant[:1]]),
        guest=guest,
        named=torch.zeros(rows + 1, dtype=torch.uint8, device="cuda"),
        counts=torch.zeros(halving, rows // halving + 1, dtype=torch.uint8, device="cuda"),
        batches=torch.zeros(1, dtype=torch.int64, device="cuda"),
        number=torch.full((1,), NUMBERS, dtype=torch.uint8, device="cuda"),
        counters=torch.zeros(4, dtype=torch.int64, device="cuda"),
        pools=tuple(PoolState(k * half, half, rings[k], *heads[:, k]) for k in range(pools)),
    )
