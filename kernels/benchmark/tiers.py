"""Benchmark cases for rows in two memory tiers: rows of 128 columns with their state, 1 KB each, in 4 GiB of either
tier. Bytes are those that cross the link to the host, both directions added."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from functools import partial

import torch

from dlrm_bench.kernels.benchmark.timing import Case, sorted_ids_case
from dlrm_bench.kernels.embedding._placement_state import NUMBERS, Moves, PlacementState
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
    """Yields half of 40 million rows on the device, and uniform ids of one 20-hot table. Most rows are missing at
    first; all that fit come to the device with the first replays."""
    rows, device_rows, window, halving = 40_000_000, 20_000_000, 1 << 17, 4096
    guests, place = 4 * window, torch.arange(rows + 1, dtype=torch.int32, device="cuda")
    place[-1] = -1
    guest = torch.zeros(device_rows, dtype=torch.uint8, device="cuda")
    guest[:guests] = 1
    head, hand, batches = torch.zeros(3, 1, dtype=torch.int64, device="cuda").unbind()
    state = PlacementState(
        place=place,
        occupant=place[: device_rows + 1].clone(),
        guest=guest,
        ring=place[:guests].clone(),
        named=torch.zeros(rows + 1, dtype=torch.uint8, device="cuda"),
        counts=torch.zeros(halving, rows // halving + 1, dtype=torch.uint8, device="cuda"),
        head=head,
        hand=hand,
        batches=batches,
        number=torch.full((1,), NUMBERS, dtype=torch.uint8, device="cuda"),
        counters=torch.zeros(4, dtype=torch.int64, device="cuda"),
    )
    slots = torch.zeros(2, window, dtype=torch.int32, device="cuda").unbind()
    moves = Moves(*slots, *torch.zeros(2, 2, dtype=torch.int32, device="cuda").unbind())
    for batch in (1024, 13_824):
        ids = sorted_ids_case([rows], batch, 20)[0].sort().values
        # Per id: the id, place, batch and count; the latter two are also written.
        moved = len(ids) * (4 + 4 + 1 + 1 + 2)
        yield Case("plan_moves", f"{len(ids)} ids, a window of {window}", moved, partial(plan_moves, ids, state, moves))
