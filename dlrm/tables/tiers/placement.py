"""The place of each row in two tiers of memory, and the rows to move when a batch is known: bookkeeping without data.

Places 0 .. P - 1 are on the device, P .. R - 1 in host memory; each of the R rows has one place, and no place is empty.
Rows only exchange places, one in host memory with one on the device: an incoming row overwrites an outgoing one.

Of the device's rows G are guests: a ring of places that incoming rows pass through. The others are residents. Batch
b + 1 is planned while batch b trains:

- Missing rows are those that b + 1 names and that are in host memory. Those that b does not name are moved first,
  `early`. A row that b also names is updated in host memory at the same time: it is moved after that update, `late`.
- The k-th missing row takes the place of the k-th row in a window of the ring that may leave: a row that neither b nor
  b + 1 names. Missing rows beyond these are used where they are.
- A guest whose turn has come is first compared with the least frequent of eight residents, the next ones in a walk over
  the device: if the guest has been named more often, the two swap roles, and the resident is the one to leave. That
  moves no data, so it does not matter who names them. Placement thus follows frequency, with no traffic but that of
  missing rows. The walk is strided, so that a batch compares with rows of all tables: place by place it would pass
  through one table after another, and while it is in a table whose rows are all frequent, no guest would stay.
  MLPerf's tables, half of the rows on the device, 13,824 samples a batch, nothing known at first, simulated: 3.8 misses
  a sample in batches 181 to 200, 4.5 when comparing with one resident, the next place; 3.8 with the best placement by
  all counts so far. With an eighth of rows and samples 4.1 in batches 401 to 500, where the other stays at 5.0.

A row's frequency is counted in batches, up to 255, and halved every `halving` batches, a few rows in each batch. A
count starts as if the known or assumed rate of the row had held for 256 batches (`halving`, if fewer): so rows of which
little is known yet yield to rows that few batches named, but more often than them. For a fractional count, that
fraction of the rows starts with one more.
Batches have numbers 1 .. 255 in turn, and a row has the number of the last batch that named it. A row that was last
named exactly 255 batches ago is mistaken for one that b or b + 1 names: it stays where it is, which is harmless.

All of it is on the device, in fixed shapes, without host decisions, and equal batches give equal places.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dlrm_bench.kernels.embedding._placement_state import NUMBERS, Moves, PlacementState
from dlrm_bench.kernels.embedding.plan_moves import plan_moves

_ROWS_AT_A_TIME = 1 << 24  # when places are first assigned: bounds the temporary memory
_MOST = 255  # maximum count
_KNOWN = 256  # maximum number of batches that prior knowledge of a row counts as
_GOLDEN = 159  # golden section of 256


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
    """Maximum number of rows that come in with a batch; no more than guests."""
    halving: int = 4096
    """Number of batches between two halvings of a row's count."""

    def __post_init__(self) -> None:
        assert 2 <= self.device_rows <= self.rows < 1 << 31, "fewer than 2^31 rows, at least two on the device"
        assert 1 <= self.window <= self.guests < self.device_rows
        assert self.halving >= 1

    @classmethod
    def of_batches(cls, rows: int, device_rows: int, ids: int) -> "PlacementSizes":
        """Returns the sizes for batches of `ids` ids. An eighth of them may come in: with half of the rows on the
        device, about a seventieth of MLPerf's ids are missing. Guests stay for four such batches, and are at most half
        of the device's rows."""
        guests = max(1, min(device_rows // 2, 4 * max(_LEAST_WINDOW, ids // 8)))
        return cls(rows=rows, device_rows=device_rows, guests=guests, window=max(1, guests // 4))


_LEAST_WINDOW = 1024


class Placement:
    """The placement of a rank's rows; see the module's docstring."""

    COUNTED = ("batches", "misses", "moved", "in_place")
    """Names of the state's `counters`: batches; missing rows, that is, named rows in host memory; missing rows moved
    to the device; and missing rows used in place."""

    def __init__(
        self,
        sizes: PlacementSizes,
        device: torch.device,
        expected: NDArray[np.float32],
    ) -> None:
        """expected: the expected number of a batch's ids that name each row, [R]. The P rows with the largest numbers
        are on the device at first; of equal ones, the first."""
        assert expected.shape == (sizes.rows,), "expected: a number for each row"
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
        """Assigns places to the rows of a batch, and returns the exchanges that move them there; the result's memory is
        reused for the next batch.

        rows: int32 [N], ascending, negative ones are padding.
        """
        plan_moves(rows, self.state, self._moves)
        return self._moves

    def places(self, rows: Tensor, out: Tensor) -> None:
        """Writes the places of rows, int32 [N], to `out`; -1 for negative rows."""
        torch.index_select(self.state.place, 0, torch.where(rows < 0, self.sizes.rows, rows), out=out)

    def forget(self) -> None:
        """Sets the counters to zero."""
        self.state.counters.zero_()

    # Construction

    def _settle(self, expected: NDArray[np.float32]) -> None:
        """Assigns initial places, in row order, and initial counts to all rows."""
        on_device, in_host, device = 0, self.sizes.device_rows, self.place.device
        least, last = _least_and_last(expected, self.sizes.device_rows)
        counts = self.state.counts.view(-1)
        for rows in pieces(self.sizes.rows, _ROWS_AT_A_TIME):
            part = torch.from_numpy(expected[rows]).to(device)
            number = torch.arange(rows.start, rows.stop, device=device)
            stays = (part > least) | ((part == least) & (number <= last))
            of_batches = -torch.expm1(-part) * min(self.sizes.halving, _KNOWN)  # batches that name the row
            fractions = (number * _GOLDEN % 256) / 256  # from 0 to 1, evenly spread in any run of rows
            counts[rows] = (of_batches + fractions).clamp(max=_MOST).to(torch.uint8)
            of_device, of_host = stays.cumsum(0), (~stays).cumsum(0)
            self.place[rows] = torch.where(stays, of_device + (on_device - 1), of_host + (in_host - 1)).int()
            staying = stays.nonzero().view(-1) + rows.start
            self.state.occupant[on_device : on_device + len(staying)] = staying.int()
            on_device, in_host = on_device + int(of_device[-1]), in_host + int(of_host[-1])
        assert on_device == self.sizes.device_rows, f"{on_device} rows for {self.sizes.device_rows} places"


def _least_and_last(numbers: NDArray[np.float32], count: int) -> tuple[float, int]:
    """Returns the smallest of the `count` largest numbers, and its last position among these `count`."""
    least = np.partition(numbers, len(numbers) - count)[len(numbers) - count]
    equal = np.flatnonzero(numbers == least)
    return float(least), int(equal[count - np.count_nonzero(numbers > least) - 1])


def pieces(rows: int, size: int) -> Iterator[slice]:
    """Yields ranges of at most `size` rows that together cover `rows`."""
    return (slice(first, min(first + size, rows)) for first in range(0, rows, size))
