"""The place of each row in two tiers of memory, and which rows move when a batch is known: bookkeeping without data.

Places 0 .. P - 1 are on the device, P .. R - 1 in host memory; each of the R rows has one, and no place is empty. Rows
only ever exchange places, one of the host's with one of the device's: what comes in is written where what leaves was.

Of the device's rows G are guests: a ring of places, through which rows that come in pass. The others are residents.
Batch b + 1 is planned while batch b trains:

- Missing are the rows that b + 1 names and that are in host memory. Those that b does not name come first thing,
  `early`. A row that b names too is updated in host memory beside this: it comes after that update, `late`.
- The k-th missing row takes the place of the k-th row of a window of the ring that may leave: one that neither b nor
  b + 1 names. Missing rows beyond those are used where they are.
- A guest whose turn has come is first compared with a resident, the next in a walk over all of the device: where it has
  been named more often, the two change roles, and the resident is the one to leave. No data moves for that, so it
  does not matter who names them. Placement thus follows frequency, by no traffic but that of missing rows.

How often a row is named is counted in batches, up to 255, and halved every `halving` batches, some rows with each.
Batches have numbers 1 .. 255 in turn, and a row has the number of the last one that named it. A row that was named 255
batches ago, and not since, is taken for one that b or b + 1 names: it stays where it is, and no harm is done.

All of it is on the device, in fixed shapes, with nothing for the host to decide, and equal batches give equal places.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

_ROWS_AT_A_TIME = 1 << 24  # when places are first made: bounds the memory for that
_NUMBERS = 255
_MOST = 255
HEAD_START = 4
"""The count with which the device's rows begin where they are known to be the most frequent ones: rows that are named
once or twice in the first batches, before most of the device's are named at all, do not take their places."""


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


@dataclass(frozen=True, slots=True)
class Moves:
    """The exchanges that a batch asks for; from number bounds[0] on early ones, before it late ones."""

    device: Tensor
    """int32 [window]: places on the device."""
    host: Tensor
    """int32 [window]: places in host memory, counted from its first."""
    late: Tensor
    """int32 [2]: from which exchange on, up to which."""
    early: Tensor
    """int32 [2]: the same."""


class Placement:
    """See above."""

    COUNTED = ("batches", "misses", "moved", "in_place")
    """Names of the numbers in `counters`: batches; rows that they name and that were in host memory; those of them that
    came to the device, and those that were used in place."""

    def __init__(
        self,
        sizes: PlacementSizes,
        device: torch.device,
        resident: Callable[[int, int], Tensor],
        head_start: int = 0,
    ) -> None:
        """resident(start, stop): which of these rows are on the device at first, bool [stop - start]; P in all.
        head_start: the count with which they begin."""
        self.sizes = sizes
        # One more of each, which rows and places that do not exist are written to.
        self.place = torch.zeros(sizes.rows + 1, dtype=torch.int32, device=device)
        """int32 [R + 1]: where each row is; last -1, the place of padding."""
        self._occupant = torch.zeros(sizes.device_rows + 1, dtype=torch.int32, device=device)
        self._guest = torch.zeros(sizes.device_rows, dtype=torch.bool, device=device)
        self._named = torch.zeros(sizes.rows + 1, dtype=torch.uint8, device=device)
        stripe = sizes.rows // sizes.halving + 1
        self._count = torch.zeros(sizes.halving * stripe, dtype=torch.uint8, device=device)
        self._ring = torch.arange(sizes.device_rows - sizes.guests, sizes.device_rows, dtype=torch.int32, device=device)
        self._guest[self._ring.long()] = True
        self._head, self._hand, self._batches = torch.zeros(3, dtype=torch.int64, device=device).unbind()
        self._number = torch.full((1,), _NUMBERS, dtype=torch.uint8, device=device)
        self.counters = torch.zeros(len(self.COUNTED), dtype=torch.int64, device=device)
        """int64, see COUNTED."""
        slots = torch.zeros(2, sizes.window, dtype=torch.int32, device=device)
        bounds = torch.zeros(2, 2, dtype=torch.int32, device=device)
        self._moves = Moves(*slots.unbind(), *bounds.unbind())
        self._settle(resident, head_start)

    @torch.no_grad()
    def plan(self, rows: Tensor) -> Moves:
        """Gives the rows of a batch their places, and returns the exchanges that bring them there; their memory is used
        again for the next batch.

        rows: int32 [N], ascending, those below 0 padding.
        """
        sizes = self.sizes
        before, at = self._number.clone(), torch.where(rows < 0, sizes.rows, rows).long()
        self._number.copy_(before % _NUMBERS + 1)
        named_before = self._named[at] == before
        first = torch.ones_like(rows, dtype=torch.bool)
        torch.ne(rows[1:], rows[:-1], out=first[1:])
        missing = first & (self.place[at] >= sizes.device_rows)
        self._count_named(at)
        incoming, late, all_missing = self._in_order(rows, missing, missing & named_before)
        leaving, places, moved = self._leaving(before, all_missing)
        self._exchange(incoming, leaving, places, moved)
        late = torch.minimum(late, moved)
        self._moves.late[1:].copy_(late)
        self._moves.early.copy_(torch.stack([late, moved]))
        self.counters += torch.stack([torch.ones_like(moved), all_missing, moved, all_missing - moved])
        return self._moves

    def places(self, rows: Tensor, out: Tensor) -> None:
        """Writes the places of rows, int32 [N], to `out`; -1 of those below 0."""
        torch.index_select(self.place, 0, torch.where(rows < 0, self.sizes.rows, rows), out=out)

    def _count_named(self, at: Tensor) -> None:
        """Notes that this batch names the rows `at`, and halves a part of all counts."""
        self._named[at] = self._number
        counts = self._count.view(self.sizes.halving, -1)
        turn = (self._batches % self.sizes.halving).view(1)
        counts.index_copy_(0, turn, counts.index_select(0, turn) >> 1)
        self._batches += 1
        # Equal rows write equal counts.
        count = self._count[at]
        self._count[at] = count + (count < _MOST).to(torch.uint8)

    def _in_order(self, rows: Tensor, missing: Tensor, late: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the missing rows that fit into the window, late ones first, [window]; and the numbers of late and of
        all missing ones."""
        window, early = self.sizes.window, missing & ~late
        late_before, early_before = late.cumsum(0), early.cumsum(0)
        late_count = late_before[-1]
        rank = torch.where(late, late_before, late_count + early_before) - 1
        return (
            _compacted(rows, missing & (rank < window), rank, window, self.sizes.rows),
            late_count,
            late_count + early_before[-1],
        )

    def _leaving(self, before: Tensor, missing: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Changes roles in the window as far as it is used, and moves it on. Returns rows that leave and their places,
        [window], and their number."""
        sizes = self.sizes
        step = torch.arange(sizes.window, device=before.device)
        in_ring = (self._head + step) % sizes.guests
        guest, other = self._ring[in_ring], ((self._hand + step) % sizes.device_rows).int()
        of_guest, of_other = self._occupant[guest], self._occupant[other]
        swaps = ~self._guest[other] & (self._count[of_guest] > self._count[of_other])
        place, row = torch.where(swaps, other, guest), torch.where(swaps, of_other, of_guest)
        named = self._named[row]
        may_leave = (named != before) & (named != self._number)
        nth = may_leave.cumsum(0)
        count = torch.minimum(missing, nth[-1])
        used = torch.where(missing > nth[-1], sizes.window, (nth < count).sum() + (count > 0))
        swaps &= step < used
        # A place under the hand may be a guest of this window: the guests' own values are written last.
        self._guest[other] = self._guest[other] | swaps
        self._guest[guest] = ~swaps
        self._ring[in_ring] = torch.where(swaps, other, guest)
        self._head.copy_((self._head + used) % sizes.guests)
        self._hand.copy_((self._hand + used) % sizes.device_rows)
        leaves = may_leave & (nth <= count)
        rows = _compacted(row, leaves, nth - 1, sizes.window, sizes.rows)
        return rows, _compacted(place, leaves, nth - 1, sizes.window, sizes.device_rows), count

    def _exchange(self, incoming: Tensor, leaving: Tensor, places: Tensor, count: Tensor) -> None:
        """Has the first `count` incoming rows and leaving ones change places."""
        sizes = self.sizes
        incoming = torch.where(torch.arange(sizes.window, device=count.device) < count, incoming, sizes.rows)
        host = self.place[incoming]
        self._moves.host.copy_(host - sizes.device_rows)
        self._moves.device.copy_(places)
        self.place[leaving] = host
        self.place[incoming] = places
        self.place[sizes.rows] = -1
        self._occupant[places] = incoming

    def forget(self) -> None:
        """Sets the counters to zero."""
        self.counters.zero_()

    # Construction

    def _settle(self, resident: Callable[[int, int], Tensor], head_start: int) -> None:
        """Gives all rows their first places, in the order of the rows."""
        on_device, in_host, device = 0, self.sizes.device_rows, self.place.device
        for rows in pieces(self.sizes.rows, _ROWS_AT_A_TIME):
            stays = resident(rows.start, rows.stop).to(device)
            self._count[rows] = stays.to(torch.uint8) * head_start
            of_device, of_host = stays.cumsum(0), (~stays).cumsum(0)
            self.place[rows] = torch.where(stays, of_device + (on_device - 1), of_host + (in_host - 1)).int()
            staying = stays.nonzero().view(-1) + rows.start
            self._occupant[on_device : on_device + len(staying)] = staying.int()
            on_device, in_host = on_device + int(of_device[-1]), in_host + int(of_host[-1])
        self.place[self.sizes.rows] = -1
        assert on_device == self.sizes.device_rows, f"{on_device} rows for {self.sizes.device_rows} places"


def pieces(rows: int, size: int) -> Iterator[slice]:
    """Yields ranges of `size` rows at most that make up `rows`."""
    return (slice(first, min(first + size, rows)) for first in range(0, rows, size))


def _compacted(values: Tensor, chosen: Tensor, rank: Tensor, size: int, empty: int) -> Tensor:
    """Returns the chosen values at their ranks, which are below `size`; `empty` where there is none."""
    out = torch.full((size + 1,), empty, dtype=values.dtype, device=values.device)
    out[torch.where(chosen, rank, size)] = values  # the last one is nobody's
    return out[:size]
