"""Cases of the kernel benchmark for rows in two tiers of memory: rows of 128 columns and their state, 1 KB each, over
4 GiB of either tier. Bytes are those that the link to the host moves, in both directions together."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from dlrm_bench.kernels.benchmark.timing import Case
from dlrm_bench.kernels.embedding.tiered_rows import Tiers, copy_rows, exchange_rows

_ROWS, _COLUMNS = 1 << 22, 128
# Missing of 512 and of 6,912 samples a GPU on two, half of the rows on the device, by a simulation.
_MISSING = (1_526, 20_159)


def _tiers() -> Tiers:
    shape = (_ROWS, 2, _COLUMNS)
    return Tiers(torch.zeros(shape, device="cuda"), torch.zeros(shape, pin_memory=True))


def tiered_rows_cases() -> Iterator[Case]:
    tiers, bytes_of_row = _tiers(), 4 * _COLUMNS
    for count in _MISSING:
        on_device, in_host = (torch.randperm(_ROWS, device="cuda")[:count].int() for _ in range(2))
        bounds = torch.tensor([0, count], dtype=torch.int32, device="cuda")
        for programs in (4, 8, 16, 32, 132):
            run = partial(exchange_rows, tiers, on_device, in_host, bounds, programs)
            yield Case("exchange_rows", f"{count} rows, {programs} programs", 4 * bytes_of_row * count, run)
    places = _ROWS + torch.randperm(_ROWS, device="cuda")[: _MISSING[1]].int()
    rows = torch.zeros(len(places), _COLUMNS, device="cuda")
    for writes in (False, True):
        run = partial(copy_rows, tiers, places, 0, 0, rows, writes)
        direction = "to" if writes else "from"
        yield Case("copy_rows", f"{len(places)} rows {direction} the host", bytes_of_row * len(places), run)
