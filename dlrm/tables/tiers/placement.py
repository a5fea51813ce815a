"""The place of each row in two tiers of memory, and which rows move when a batch is known: bookkeeping without data.

Places 0 .. P - 1 are on the device, P .. R - 1 in host memory; each of the R rows has one, and no place is empty. Rows
only ever exchange places, one of the host's with one of the device's: what comes in is written where what leaves was.

Of the device's rows G are guests: a ring of places, through which rows that come in pass. The others are residents.
Batch b + 1 is planned while batch b trains:

- Missing are the rows that b + 1 names and that are in host memory. Those that b does not name come first thing,
  `early`. A row that b names too is updated in host memory beside this: it comes after that update, `late`.
- The k-th missing row takes the place of the k-th row of a window of the ring that may leave: one that neither b nor
  b + 1 names. Missing rows beyond those are used where they are.
- A guest whose turn has come is first compared with the resident named least of eight, the next in a walk over all of
  the device: where the guest has been named more often, the two change roles, and the resident is the one to leave. No
  data moves for that, so it does not matter who names them. Placement thus follows frequency, by no traffic but that of
  missing rows. The walk is in strides, so that a batch compares with rows of all tables: place by place it comes to one
  table after another, and while it is at one whose rows are all named often, no guest stays.
  MLPerf's tables, half of the rows on the device, 13,824 samples a batch, nothing known at first, simulated: 3.8 misses
  a sample in batches 181 to 200, 4.5 by one resident, the next place; 3.8 by the best places that all counts so far
  could give. With an eighth of rows and samples 4.1 in batches 401 to 500, where the other stays at 5.0.

How often a row is named is counted in batches, up to 255, and halved every `halving` batches, some rows with each. A
count begins as that of 256 batches (`halving`, if fewer) of what is known or assumed of the row: so rows of which
little is known yet leave a place to those that few batches named, but that are named more often than theirs. Of a
fraction, as many of the rows as it says begin with one more.
Batches have numbers 1 .. 255 in turn, and a row has the number of the last one that named it. A row that was named 255
batches ago, and not since, is taken for one that b or b + 1 names: it stays where it is, and no harm is done.

All of it is on the device, in fixed shapes, with nothing for the host to decide, and equal batches give equal places.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dlrm_bench.kernels.embedding._placement_state import NUMBERS, Moves, PlacementState
from dlrm_bench.kernels.embedding.plan_moves import plan_moves

_ROWS_AT_A_TIME = 1 << 24  # when places are first made: bounds the memory for that
_MOST = 255  # that a count holds
_KNOWN = 256  # batches, at most, that what is known or assumed of a row counts as
_GOLDEN = 159  # of 256, their golden section


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementSizes:
    """The fixed shapes of a placement."""

    rows: int
    """R."""
    device_rows: int
    """P, at least 2 and at most R."""
    guests: int
    """G, at least 1 and below P."""
    window: int
    """Rows that come in with a batch, at most; no more than guests."""
    halving: int = 4096
    """Number of batches between two halvings of a row's count."""

    def __post_init__(self) -> None:
        assert 2 <= self.device_rows <= self.rows < 1 << 31, "rows that int32 counts, two of them on the device"
        assert 1 <= self.window <= self.guests < self.device_rows
        assert self.halving >= 1

    @classmethod
    def of_batches(cls, rows: int, device_rows: int, ids: int) -> "PlacementSizes":
        """Returns the sizes for batches of `ids` ids. An eighth of them may come in: of MLPerf's ids with half of the
        rows on the device some seventieth is missing. Guests stay for four such batches, and are half of the device's
        rows at most."""
        guests = max(1, min(device_rows // 2, 4 * max(_LEAST_WINDOW, ids // 8)))
        return cls(rows=rows, device_rows=device_rows, guests=guests, window=max(1, guests // 4))


_LEAST_WINDOW = 1024


class Placement:
    """See above."""

    COUNTED = ("batches", "misses", "moved", "in_place")
    """Names of the state's `counters`: batches; rows that they name and that were in host memory; those of them that
    came to the device, and those that were used in place."""

    def __init__(
        self,
        sizes: PlacementSizes,
        device: torch.device,
        expected: NDArray[np.float32],
    ) -> None:
        """expected: the number of a batch's ids that are expected to name each row, [R]. The P rows of the largest
        numbers are on the device at first, of equal ones the first."""
        assert expected.shape == (sizes.rows,), "a number for each row"
        self.sizes = sizes
        stripe = sizes.rows // sizes.halving + 1
        ring = torch.arange(sizes.device_rows - sizes.guests, sizes.device_rows, dtype=torch.int32, device=device)
        head, hand, batches = torch.zeros(3, 1, dtype=torch.int64, device=device).unbind()
        self.state = PlacementState(
            place=torch.full((sizes.rows + 1,), -1, dtype=torch.int32, device=device),
            occupant=torch.zeros(sizes.device_rows + 1, dtype=torch.int32, device=device),
            guest=torch.zeros(sizes.device_rows, dtype=torch.uint8, device=device),
            ring=ring,
            named=torch.zeros(sizes.rows + 1, dtype=torch.uint8, device=device),
            counts=torch.zeros(sizes.halving, stripe, dtype=torch.uint8, device=device),
            head=head,
            hand=hand,
            batches=batches,
            number=torch.full((1,), NUMBERS, dtype=torch.uint8, device=device),
            counters=torch.zeros(len(self.COUNTED), dtype=torch.int64, device=device),
        )
        self.state.guest[ring.long()] = 1
        slots = torch.zeros(2, sizes.window, dtype=torch.int32, device=device)
        bounds = torch.zeros(2, 2, dtype=torch.int32, device=device)
        self._moves = Moves(*slots.unbind(), *bounds.unbind())
        self._settle(expected)

    @property
    def place(self) -> Tensor:
        """Place of each row, int32 [R]."""
        return self.state.place[:-1]

    def plan(self, rows: Tensor) -> Moves:
        """Gives the rows of a batch their places, and returns the exchanges that bring them there; their memory is used
        again for the next batch.

        rows: int32 [N], ascending, those below 0 padding.
        """
        plan_moves(rows, self.state, self._moves)
        return self._moves

    def places(self, rows: Tensor, out: Tensor) -> None:
        """Writes the places of rows, int32 [N], to `out`; -1 of those below 0."""
        torch.index_select(self.state.place, 0, torch.where(rows < 0, self.sizes.rows, rows), out=out)

    def forget(self) -> None:
        """Sets the counters to zero."""
        self.state.counters.zero_()

    # Construction

    def _settle(self, expected: NDArray[np.float32]) -> None:
        """Gives all rows their first places, in the order of the rows, and their first counts."""
        on_device, in_host, device = 0, self.sizes.device_rows, self.place.device
        least, last = _least_and_last(expected, self.sizes.device_rows)
        counts = self.state.counts.view(-1)
        for rows in pieces(self.sizes.rows, _ROWS_AT_A_TIME):
            part = torch.from_numpy(expected[rows]).to(device)
            number = torch.arange(rows.start, rows.stop, device=device)
            stays = (part > least) | ((part == least) & (number <= last))
            of_batches = -torch.expm1(-part) * min(self.sizes.halving, _KNOWN)  # which name the row once or more
            fractions = (number * _GOLDEN % 256) / 256  # from 0 to 1, alike in any run of rows
            counts[rows] = (of_batches + fractions).clamp(max=_MOST).to(torch.uint8)
            of_device, of_host = stays.cumsum(0), (~stays).cumsum(0)
            self.place[rows] = torch.where(stays, of_device + (on_device - 1), of_host + (in_host - 1)).int()
            staying = stays.nonzero().view(-1) + rows.start
            self.state.occupant[on_device : on_device + len(staying)] = staying.int()
            on_device, in_host = on_device + int(of_device[-1]), in_host + int(of_host[-1])
        assert on_device == self.sizes.device_rows, f"{on_device} rows for {self.sizes.device_rows} places"


def _least_and_last(numbers: NDArray[np.float32], count: int) -> tuple[float, int]:
    """Returns the least of the `count` largest numbers, and the last of its places that is one of the `count`."""
    least = np.partition(numbers, len(numbers) - count)[len(numbers) - count]
    equal = np.flatnonzero(numbers == least)
    return float(least), int(equal[count - np.count_nonzero(numbers > least) - 1])


def pieces(rows: int, size: int) -> Iterator[slice]:
    """Yields ranges of `size` rows at most that make up `rows`."""
    return (slice(first, min(first + size, rows)) for first in range(0, rows, size))
