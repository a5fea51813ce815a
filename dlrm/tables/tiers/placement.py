"""The place of each row in two tiers of memory, and the rows to move when a batch is known: bookkeeping without data.

Places 0 .. P - 1 are on the device, P .. R - 1 in host memory; each of the R rows has one place, and no place is empty.
Rows only exchange places, one in host memory with one on the device: an incoming row overwrites an outgoing one. Both
belong to one pool, which thus has a constant number of rows on the device: a table with a share of its own is a pool,
and all other tables together are one. Of a pool that is all on the device, or has one row there or none, no row moves:
its missing rows are used where they are.

Of a pool's rows on the device G are guests: a ring of places that incoming rows pass through. The others are residents.
Batch b + 1 is planned while batch b trains:

- Missing rows are those that b + 1 names and that are in host memory. Those that b does not name are moved first,
  `early`. A row that b also names is updated in host memory at the same time: it is moved after that update, `late`.
- The k-th missing row takes the place of the k-th row in a window of the ring that may leave: a row that neither b nor
  b + 1 names. Missing rows beyond these are used where they are.
- A guest whose turn has come is first compared with the least frequent of eight residents, the next ones in a walk
  over the pool's places: if the guest has been named more often, the two swap roles, and the resident is the one to
  leave. That moves no data, so it does not matter who names them. Placement thus follows frequency, with no traffic but
  that of missing rows. The walk is strided, so that a batch compares with rows of all tables: place by place it would
  pass through one table after another, and while it is in a table whose rows are all frequent, no guest would stay.
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

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dlrm_bench.kernels.embedding._placement_state import NUMBERS, Moves, PlacementState, PoolState
from dlrm_bench.kernels.embedding.find_places import find_places
from dlrm_bench.kernels.embedding.plan_moves import plan_moves

_ROWS_AT_A_TIME = 1 << 24  # when places are first assigned: bounds the temporary memory
_MOST = 255  # maximum count
_KNOWN = 256  # maximum number of batches that prior knowledge of a row counts as
_GOLDEN = 159  # golden section of 256
_LEAST_WINDOW = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Rows that exchange places with one another only, and the fixed shapes of that."""

    rows: tuple[range, ...]
    """Numbers of the rows, ascending; adjacent ranges are one."""
    ids: tuple[range, ...]
    """Positions of these rows among the sorted rows of a batch: a table has a fixed number of ids."""
    device_rows: int
    """Number of them on the device at any time."""
    guests: int
    """G, below `device_rows`; 0 if no row moves."""
    window: int
    """Maximum number of rows that come in with a batch; no more than guests."""

    def __post_init__(self) -> None:
        assert 0 <= self.device_rows <= self.count < 1 << 31, "fewer than 2^31 rows"
        if self.moves:
            assert 1 <= self.window <= self.guests < self.device_rows, "two rows on the device, a guest and a resident"
        else:
            assert self.guests == self.window == 0

    @property
    def count(self) -> int:
        """Number of its rows."""
        return sum(map(len, self.rows))

    @property
    def host_rows(self) -> int:
        """Number of them in host memory."""
        return self.count - self.device_rows

    @property
    def moves(self) -> bool:
        """Whether its rows exchange places."""
        return 2 <= self.device_rows < self.count

    @classmethod
    def of_batches(cls, rows: Sequence[range], ids: Sequence[range], device_rows: int) -> "Pool":
        """Returns the pool of these rows and ids, given table by table. An eighth of a batch's ids may come in: with
        half of the rows on the device, about a seventieth of MLPerf's ids are missing. Guests stay for four such
        batches, and are at most half of the device's rows."""
        guests = 0
        if 2 <= device_rows < sum(map(len, rows)):
            guests = max(1, min(device_rows // 2, 4 * max(_LEAST_WINDOW, sum(map(len, ids)) // 8)))
        window = max(1, guests // 4) if guests else 0
        return cls(rows=_joined(rows), ids=_joined(ids), device_rows=device_rows, guests=guests, window=window)


def _joined(ranges: Sequence[range]) -> tuple[range, ...]:
    """Returns ascending ranges, adjacent ones joined."""
    joined: list[range] = []
    for each in ranges:
        if joined and joined[-1].stop == each.start:
            joined[-1] = range(joined[-1].start, each.stop)
        else:
            joined.append(each)
    return tuple(joined)


class Placement:
    """The placement of a rank's rows; see the module's docstring."""

    COUNTED = ("batches", "misses", "moved", "in_place")
    """Names of the state's `counters`: batches; missing rows, that is, named rows in host memory; missing rows moved to
    the device; and missing rows used in place."""

    def __init__(
        self, pools: Sequence[Pool], device: torch.device, expected: NDArray[np.float32], halving: int = 4096
    ) -> None:
        """pools: each of the R rows is in one. expected: the expected number of a batch's ids that name each row, [R].
        Of a pool, the rows with the largest numbers are on the device at first; of equal ones, the first. halving:
        number of batches between two halvings of a row's count."""
        self.rows, self.host_rows = len(expected), sum(pool.host_rows for pool in pools)
        assert sum(pool.count for pool in pools) == self.rows < 1 << 31, "expected: a number for each row"
        self.device_rows = max(1, self.rows - self.host_rows)
        """P: even if no row is on the device, because memory of no place would have no address."""
        self.fixed_host_rows = sum(pool.host_rows for pool in pools if not pool.moves)
        """Rows in host memory of pools whose rows do not move."""
        self._ids = [_selection(pool.ids, device) for pool in pools if pool.moves]
        fixed = [ids for pool in pools if pool.host_rows and not pool.moves for ids in pool.ids]
        self._fixed_ids = _selection(_joined(sorted(fixed, key=lambda ids: ids.start)), device) if fixed else None
        self._moves = [_no_moves(pool.window, device) for pool in pools if pool.moves]
        place = torch.full((self.rows + 1,), -1, dtype=torch.int32, device=device)
        occupant = torch.zeros(self.device_rows + 1, dtype=torch.int32, device=device)
        counts = torch.zeros(halving, self.rows // halving + 1, dtype=torch.uint8, device=device)
        guest = torch.zeros(self.device_rows, dtype=torch.uint8, device=device)
        moving, on_device, in_host = [], 0, self.device_rows
        for pool in pools:
            _settle(pool, expected, (on_device, in_host), place, occupant, counts)
            on_device, in_host = on_device + pool.device_rows, in_host + pool.host_rows
            if pool.moves:
                guest[on_device - pool.guests : on_device] = 1
                ring = torch.arange(on_device - pool.guests, on_device, dtype=torch.int32, device=device)
                head, hand = torch.zeros(2, 1, dtype=torch.int64, device=device).unbind()
                moving.append(PoolState(on_device - pool.device_rows, pool.device_rows, ring, head, hand))
        self.state = PlacementState(
            place=place,
            occupant=occupant,
            guest=guest,
            named=torch.zeros(self.rows + 1, dtype=torch.uint8, device=device),
            counts=counts,
            batches=torch.zeros(1, dtype=torch.int64, device=device),
            number=torch.full((1,), NUMBERS, dtype=torch.uint8, device=device),
            counters=torch.zeros(len(self.COUNTED), dtype=torch.int64, device=device),
            pools=tuple(moving),
        )

    @property
    def place(self) -> Tensor:
        """Place of each row, int32 [R]."""
        return self.state.place[:-1]

    def plan(self, rows: Tensor) -> Sequence[Moves]:
        """Assigns places to the rows of a batch, and returns the exchanges that move them there, pool by pool; the
        result's memory is reused for the next batch.

        rows: int32 [N], ascending, negative ones are padding.
        """
        if self._moves:
            plan_moves([_chosen(rows, ids) for ids in self._ids], self.state, self._moves)
        else:
            self.state.counters[:1].add_(1)
        if self._fixed_ids is not None:
            self._count_fixed(_chosen(rows, self._fixed_ids))
        return self._moves

    def _count_fixed(self, rows: Tensor) -> None:
        """Counts the missing rows among a batch's `rows` of pools whose rows do not move: all are used in place."""
        places, first = torch.empty_like(rows), torch.ones_like(rows, dtype=torch.bool)
        self.places(rows, places)
        torch.ne(rows[1:], rows[:-1], out=first[1:])
        self.state.counters[1::2].add_((first & (places >= self.device_rows)).sum())

    def places(self, rows: Tensor, out: Tensor) -> None:
        """Writes the places of rows, int32 [N], to `out`; -1 for negative rows."""
        find_places(self.state.place, rows, out)

    def forget(self) -> None:
        """Sets the counters to zero."""
        self.state.counters.zero_()


def _chosen(rows: Tensor, ids: slice | Tensor) -> Tensor:
    """Returns the rows at these positions, see `_selection`; -1 at positions between them."""
    return rows[ids] if isinstance(ids, slice) else torch.where(ids, rows[: len(ids)], -1)


# Construction


def _selection(ids: Sequence[range], device: torch.device) -> slice | Tensor:
    """Returns positions among a batch's rows as a slice, or, if they are not adjacent, as a mask, bool [n]."""
    if len(ids) == 1:
        return slice(ids[0].start, ids[0].stop)
    mask = torch.zeros(ids[-1].stop, dtype=torch.bool)
    for of in ids:
        mask[of.start : of.stop] = True
    return mask.to(device)


def _no_moves(window: int, device: torch.device) -> Moves:
    slots = torch.zeros(2, window, dtype=torch.int32, device=device)
    bounds = torch.zeros(2, 2, dtype=torch.int32, device=device)
    return Moves(*slots.unbind(), *bounds.unbind())


def _settle(
    pool: Pool, expected: NDArray[np.float32], first: tuple[int, int], place: Tensor, occupant: Tensor, counts: Tensor
) -> None:
    """Assigns initial places, in row order, and initial counts to a pool's rows. first: the pool's first place on the
    device, and in host memory."""
    of_pool = [expected[rows.start : rows.stop] for rows in pool.rows]
    least, last = _least_and_last(of_pool[0] if len(of_pool) == 1 else np.concatenate(of_pool), pool.device_rows)
    (on_device, in_host), device, before = first, place.device, 0
    for part in (part for rows in pool.rows for part in pieces(rows, _ROWS_AT_A_TIME)):
        numbers = torch.from_numpy(expected[part]).to(device)
        number = torch.arange(part.start, part.stop, device=device)
        nth = number + (before - part.start)
        before += len(number)
        stays = (numbers > least) | ((numbers == least) & (nth <= last))
        of_batches = -torch.expm1(-numbers) * min(len(counts), _KNOWN)  # batches that name the row
        fractions = (number * _GOLDEN % 256) / 256  # from 0 to 1, evenly spread in any run of rows
        counts.view(-1)[part] = (of_batches + fractions).clamp(max=_MOST).to(torch.uint8)
        of_device, of_host = stays.cumsum(0), (~stays).cumsum(0)
        place[part] = torch.where(stays, of_device + (on_device - 1), of_host + (in_host - 1)).int()
        staying = stays.nonzero().view(-1) + part.start
        occupant[on_device : on_device + len(staying)] = staying.int()
        on_device, in_host = on_device + int(of_device[-1]), in_host + int(of_host[-1])
    assert on_device == first[0] + pool.device_rows, f"{on_device - first[0]} rows for {pool.device_rows} places"


def _least_and_last(numbers: NDArray[np.float32], count: int) -> tuple[float, int]:
    """Returns the smallest of the `count` largest numbers, and its last position among these `count`."""
    if count == 0:
        return math.inf, -1
    least = np.partition(numbers, len(numbers) - count)[len(numbers) - count]
    equal = np.flatnonzero(numbers == least)
    return float(least), int(equal[count - np.count_nonzero(numbers > least) - 1])


def pieces(rows: range, size: int) -> Iterator[slice]:
    """Yields ranges of at most `size` rows that together cover `rows`."""
    return (slice(first, min(first + size, rows.stop)) for first in range(rows.start, rows.stop, size))
