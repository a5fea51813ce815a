"""Plans moves of rows between two memory tiers for the next batch; dlrm/tables/tiers/placement.py explains them.

Fixed shapes, and no host decisions. In each pool one kernel marks the batch's rows and the missing ones; one searches
the window of the ring for rows that may leave; after a sum over blocks, the k-th missing row is paired with the k-th
row that may leave.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dlrm_bench.kernels._call import function
from dlrm_bench.kernels._triton import cdiv, jit, jit_of_any, tl
from dlrm_bench.kernels.embedding._placement_state import NUMBERS, Moves, PlacementState, PoolState, walk

_BLOCK, _WINDOW_BLOCK = 256, 128
"""Elements of a program, of rows and of a window's positions. Each position takes a chain of eight comparisons, whose
rows are anywhere in memory: in blocks of 1024, 15,000 positions took 244 us on an H200."""
_BLOCKS_AT_A_TIME = 1024


class PlanMoves(NamedTuple):
    """Assigns places to the rows of a batch, and finds the exchanges that move them there."""

    rows: Sequence[Tensor]
    """The batch's rows of each pool: int32 [N], ascending; negative ones, which may be between others, are nobody's."""
    state: PlacementState
    moves: Sequence[Moves]
    """Filled with the exchanges of each pool; W is at most G."""

    def launch(self) -> None:
        """Checks the arguments and plans."""
        state = self.state
        assert len(self.rows) == len(self.moves) == len(state.pools) > 0, "rows and moves of each pool"
        for rows, moves, pool in zip(self.rows, self.moves, state.pools, strict=True):
            assert rows.dtype == torch.int32 and rows.is_contiguous(), "rows: int32, contiguous"
            assert len(moves.device) <= len(pool.ring) < pool.places, "a window no longer than the ring"
        assert state.counts.numel() >= len(state.place), "counts: one for each row"
        if state.place.is_cuda:
            self.triton()
        else:
            self.plain()

    @torch.no_grad()
    def plain(self) -> None:
        """Plans in PyTorch, with operations that a graph could capture."""
        state, before = self.state, self.state.number.clone()
        state.number.copy_(before % NUMBERS + 1)
        turn = state.batches % len(state.counts)
        state.counts.index_copy_(0, turn, state.counts.index_select(0, turn) >> 1)
        state.batches.add_(1)
        state.counters[:1].add_(1)
        for rows, moves, pool in zip(self.rows, self.moves, state.pools, strict=True):
            _plain_plan(rows, moves, pool, state, before)

    def triton(self, block: int = 0, window_block: int = 0) -> None:
        """Plans in a kernel, and six for each pool."""
        state, blocks = self.state, (block or _BLOCK, window_block or _WINDOW_BLOCK)
        halving, line = state.counts.shape
        _halve_kernel[(cdiv(line, blocks[0]),)](state.counts, state.batches, halving, line, blocks[0])
        for rows, moves, pool in zip(self.rows, self.moves, state.pools, strict=True):
            _triton_plan(rows, moves, pool, state, pool is state.pools[-1], *blocks)


plan_moves = function(PlanMoves, PlanMoves.launch)
plain_plan_moves = function(PlanMoves, PlanMoves.plain)
triton_plan_moves = function(PlanMoves, PlanMoves.triton)


def _plain_plan(rows: Tensor, moves: Moves, pool: PoolState, state: PlacementState, before: Tensor) -> None:
    """Plans a pool's moves. before: the number of the batch before, uint8 [1]."""
    device_rows, none = len(state.guest), len(state.place) - 1
    at = torch.where(rows < 0, none, rows).long()
    first = torch.ones_like(rows, dtype=torch.bool)
    torch.ne(rows[1:], rows[:-1], out=first[1:])
    missing = first & (state.place[at] >= device_rows)
    late = missing & (state.named[at] == before)
    early = missing & ~late
    _count_named(state, at)
    late_before, early_before = late.cumsum(0), early.cumsum(0)
    late_count, total = late_before[-1], late_before[-1] + early_before[-1]
    rank = torch.where(late, late_before, late_count + early_before) - 1
    window = len(moves.device)
    incoming = _compacted(rows, missing & (rank < window), rank, window, none)
    leaving, places, moved = _leaving(state, pool, before, total, window)
    incoming = torch.where(torch.arange(window, device=rows.device) < moved, incoming, none)
    host = state.place[incoming]
    moves.host.copy_(host - device_rows)
    moves.device.copy_(places)
    state.place[leaving] = host
    state.place[incoming] = places
    state.place[none:] = -1  # with a single index, CUDA would copy the number from the host
    state.occupant[places] = incoming
    late_moved = torch.minimum(late_count, moved)
    moves.late[1:].copy_(late_moved)
    moves.early.copy_(torch.stack([late_moved, moved]))
    state.counters[1:].add_(torch.stack([total, moved, total - moved]))


def _count_named(state: PlacementState, at: Tensor) -> None:
    """Records that this batch names the rows `at`, int64 [N]."""
    state.named[at] = state.number
    counts = state.counts.view(-1)
    count = counts[at]
    counts[at] = count + (count < 255).to(torch.uint8)  # equal rows write equal counts


def _leaving(
    state: PlacementState, pool: PoolState, before: Tensor, missing: Tensor, window: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Swaps roles in the used part of the window, and advances the window. Returns rows that leave and their places,
    [window], and their number."""
    none, ring = len(state.place) - 1, pool.ring
    compared, stride = walk(pool.places, window)
    step = torch.arange(window, device=before.device)
    in_ring = (pool.head + step) % len(ring)
    walked = pool.hand + torch.arange(window * compared, device=before.device).view(window, compared)
    others = (pool.first + walked % pool.places * stride % pool.places).int()
    counts = state.counts.view(-1)
    count_of_others = counts[state.occupant[others]].int() + 256 * state.guest[others].int()  # guests rank last
    least = count_of_others.argmin(1, keepdim=True)
    guest, other = ring[in_ring], others.gather(1, least).view(-1)
    of_guest, of_other = state.occupant[guest], state.occupant[other]
    swaps = (state.guest[other] == 0) & (counts[of_guest] > counts[of_other])
    place, row = torch.where(swaps, other, guest), torch.where(swaps, of_other, of_guest)
    named = state.named[row]
    may_leave = (named != before) & (named != state.number)
    nth = may_leave.cumsum(0)
    count = torch.minimum(missing, nth[-1])
    is_used = nth - may_leave.long() < missing
    swaps &= is_used
    # A compared place may be a guest of this window: the guests' own values are written last.
    state.guest[other] = state.guest[other] | swaps.to(torch.uint8)
    state.guest[guest] = (~swaps).to(torch.uint8)
    ring[in_ring] = torch.where(swaps, other, guest)
    pool.head.copy_((pool.head + is_used.sum()) % len(ring))
    pool.hand.copy_((pool.hand + compared * is_used.sum()) % pool.places)
    leaves = may_leave & (nth <= count)
    rows = _compacted(row, leaves, nth - 1, window, none)
    return rows, _compacted(place, leaves, nth - 1, window, len(state.guest)), count


def _compacted(values: Tensor, chosen: Tensor, rank: Tensor, size: int, empty: int) -> Tensor:
    """Returns the chosen values at their ranks, which are below `size`; `empty` elsewhere."""
    out = torch.full((size + 1,), empty, dtype=values.dtype, device=values.device)
    out[torch.where(chosen, rank, size)] = values  # the last one is nobody's
    return out[:size]


def _triton_plan(
    rows: Tensor, moves: Moves, pool: PoolState, state: PlacementState, is_last: bool, block: int, window_block: int
) -> None:
    """Plans a pool's moves in six kernels. is_last: whether no other pool of this batch is still to be planned."""
    window, count, device = len(moves.device), len(rows), rows.device
    blocks, window_blocks = cdiv(count, block), cdiv(window, window_block)
    kind = torch.empty(count, dtype=torch.int8, device=device)
    incoming, leaving, other, victim = torch.empty(4, window, dtype=torch.int32, device=device).unbind()
    choice = torch.empty(window, dtype=torch.int8, device=device)
    late, early, free = (
        torch.empty(size, dtype=torch.int32, device=device) for size in (blocks, blocks, window_blocks)
    )
    totals = torch.empty(4, dtype=torch.int32, device=device)
    device_rows, guests, (compared, stride) = len(state.guest), len(pool.ring), walk(pool.places, window)
    of_rows = (rows, count, state.place, state.named, state.counts, state.number)
    _mark_kernel[(blocks,)](*of_rows, kind, late, early, device_rows, block)
    of_window = (state.occupant, state.guest, pool.ring, state.named, state.counts)
    chosen, of_walk = (choice, leaving, other, free), (pool.first, pool.places, guests, window, stride, compared)
    _window_kernel[(window_blocks,)](*of_window, pool.head, pool.hand, state.number, *chosen, *of_walk, window_block)
    _sums_kernel[(1,)](late, early, free, totals, blocks, window_blocks, window, _BLOCKS_AT_A_TIME)
    _incoming_kernel[(blocks,)](rows, kind, late, early, totals, incoming, count, window, block)
    of_ring = (state.guest, pool.ring, pool.head)
    _outgoing_kernel[(window_blocks,)](*chosen, totals, *of_ring, victim, moves.device, guests, window, window_block)
    walked = (pool.head, pool.hand, state.batches, state.number, state.counters)
    sizes = (device_rows, pool.places, guests, window, compared, int(is_last))
    _exchange_kernel[(window_blocks,)](
        incoming, victim, totals, *moves, state.place, state.occupant, *walked, *sizes, window_block
    )


@jit
def _halve_kernel(count, batches, halving, stripe, block: tl.constexpr) -> None:
    at = tl.program_id(0) * block + tl.arange(0, block)
    line = count + (tl.load(batches) % halving) * stripe
    tl.store(line + at, tl.load(line + at, at < stripe) >> 1, at < stripe)


@jit_of_any("size", "device_rows")
def _mark_kernel(
    rows,
    size,
    place,
    named,
    count,
    number,
    kind,
    late_of_block,
    early_of_block,
    device_rows,
    block: tl.constexpr,
) -> None:
    at = tl.program_id(0) * block + tl.arange(0, block)
    row = tl.load(rows + at, at < size, other=-1)
    previous = tl.load(rows + at - 1, (at > 0) & (at < size), other=-1)
    first = (row >= 0) & (row != previous)  # only one program lane per row reads and writes its state
    before = tl.load(number).to(tl.int32)
    missing = first & (tl.load(place + row, first, other=0) >= device_rows)
    late = missing & (tl.load(named + row, first, other=0).to(tl.int32) == before)
    seen = tl.load(count + row, first, other=0).to(tl.int32)
    tl.store(named + row, (before % 255 + 1 + row * 0).to(tl.uint8), first)
    tl.store(count + row, tl.minimum(seen + 1, 255).to(tl.uint8), first)
    tl.store(kind + at, (missing.to(tl.int32) + late.to(tl.int32)).to(tl.int8), at < size)
    late_rows, all_rows = tl.sum(late.to(tl.int32), 0), tl.sum(missing.to(tl.int32), 0)
    tl.store(late_of_block + tl.program_id(0), late_rows)
    tl.store(early_of_block + tl.program_id(0), all_rows - late_rows)


@jit_of_any("first", "places", "guests", "window", "stride")
def _window_kernel(
    occupant,
    guest,
    ring,
    named,
    count,
    head,
    hand,
    number,
    choice,
    leaving,
    other_place,
    free_of_block,
    first,
    places,
    guests,
    window,
    stride,
    compared: tl.constexpr,
    block: tl.constexpr,
) -> None:
    # A choice is 1 if roles are swapped, plus 2 if the row may leave.
    at = tl.program_id(0) * block + tl.arange(0, block)
    inside = at < window
    place = tl.load(ring + (tl.load(head) + at) % guests, inside, other=0)
    row = tl.load(occupant + place, inside, other=0)
    seen = tl.load(count + row, inside, other=0).to(tl.int32)
    other, other_row, least = place * 0, row * 0, seen * 0 + 512  # above all counts, of guests too
    walked = (tl.load(hand) + at.to(tl.int64) * compared) % places * stride % places
    for _ in tl.static_range(compared):
        next_place = first + walked.to(tl.int32)
        walked += stride  # a remainder would take longer than the loads
        walked -= tl.where(walked >= places, places, 0)
        next_row = tl.load(occupant + next_place, inside, other=0)
        next_seen = tl.load(count + next_row, inside, other=0).to(tl.int32)
        next_seen += 256 * tl.load(guest + next_place, inside, other=1).to(tl.int32)  # guests come last
        seldomest = next_seen < least
        other, other_row = tl.where(seldomest, next_place, other), tl.where(seldomest, next_row, other_row)
        least = tl.where(seldomest, next_seen, least)
    swaps = seen > least
    row = tl.where(swaps, other_row, row)
    batch, before = tl.load(named + row, inside, other=0).to(tl.int32), tl.load(number).to(tl.int32)
    leaves = inside & (batch != before) & (batch != before % 255 + 1)
    tl.store(choice + at, (swaps.to(tl.int32) + 2 * leaves.to(tl.int32)).to(tl.int8), inside)
    tl.store(leaving + at, row, inside)
    tl.store(other_place + at, other, inside)
    tl.store(free_of_block + tl.program_id(0), tl.sum(leaves.to(tl.int32), 0))


@jit
def _sums_before(of_block, blocks, tile: tl.constexpr):
    """Replaces each block's sum by the sum of all blocks before it; returns the total."""
    total, start = 0, 0
    while start < blocks:
        at = start + tl.arange(0, tile)
        own = tl.load(of_block + at, at < blocks, other=0)
        tl.store(of_block + at, total + tl.cumsum(own, 0) - own, at < blocks)
        total += tl.sum(own, 0)
        start += tile
    return total


@jit_of_any("blocks", "window_blocks", "window")
def _sums_kernel(late, early, free, totals, blocks, window_blocks, window, tile: tl.constexpr) -> None:
    # Totals: late rows; all missing rows; rows that move; used part of the window.
    late_rows = _sums_before(late, blocks, tile)
    missing = late_rows + _sums_before(early, blocks, tile)
    may_leave = _sums_before(free, window_blocks, tile)
    tl.store(totals, late_rows)
    tl.store(totals + 1, missing)
    tl.store(totals + 2, tl.minimum(missing, may_leave))
    tl.store(totals + 3, tl.where(missing > may_leave, window, 0))


@jit_of_any("size", "window")
def _incoming_kernel(
    rows, kind, late_before, early_before, totals, incoming, size, window, block: tl.constexpr
) -> None:
    at = tl.program_id(0) * block + tl.arange(0, block)
    kinds = tl.load(kind + at, at < size, other=0)
    late, early = (kinds == 2).to(tl.int32), (kinds == 1).to(tl.int32)
    late_rank = tl.load(late_before + tl.program_id(0)) + tl.cumsum(late, 0) - 1
    early_rank = tl.load(totals) + tl.load(early_before + tl.program_id(0)) + tl.cumsum(early, 0) - 1
    rank = tl.where(kinds == 2, late_rank, early_rank)
    tl.store(incoming + rank, tl.load(rows + at, at < size, other=0), (kinds > 0) & (rank < window))


@jit_of_any("guests", "window")
def _outgoing_kernel(
    choice,
    leaving,
    other_place,
    free_before,
    totals,
    guest,
    ring,
    head,
    victim,
    victim_place,
    guests,
    window,
    block: tl.constexpr,
) -> None:
    at = tl.program_id(0) * block + tl.arange(0, block)
    inside = at < window
    chosen = tl.load(choice + at, inside, other=0).to(tl.int32)
    free = chosen // 2
    rank = tl.load(free_before + tl.program_id(0)) + tl.cumsum(free, 0) - free
    missing = tl.load(totals + 1)
    used = inside & (rank < missing)
    swaps = used & (chosen % 2 == 1)
    in_ring = ring + (tl.load(head) + at) % guests
    place, other = tl.load(in_ring, inside, other=0), tl.load(other_place + at, inside, other=0)
    # Places whose roles change are either not guests', or in the ring: no two programs write the same one.
    tl.store(guest + place, (place * 0).to(tl.uint8), swaps)
    tl.store(guest + other, (place * 0 + 1).to(tl.uint8), swaps)
    tl.store(in_ring, other, swaps)
    leaves = used & (free == 1)
    tl.store(victim + rank, tl.load(leaving + at, inside, other=0), leaves)
    tl.store(victim_place + rank, tl.where(swaps, other, place), leaves)
    tl.store(totals + 3 + at * 0, at + 1, leaves & (rank + 1 == missing))


@jit_of_any("device_rows", "places", "guests", "window", "compared", "is_last")
def _exchange_kernel(
    incoming,
    victim,
    totals,
    on_device,
    in_host,
    late_bounds,
    early_bounds,
    place,
    occupant,
    head,
    hand,
    batches,
    number,
    counters,
    device_rows,
    places,
    guests,
    window,
    compared,
    is_last,
    block: tl.constexpr,
) -> None:
    at = tl.program_id(0) * block + tl.arange(0, block)
    moved = tl.load(totals + 2)
    moves = at < moved
    row, place_of_victim = tl.load(incoming + at, moves, other=0), tl.load(on_device + at, moves, other=0)
    host = tl.load(place + row, moves, other=0)
    tl.store(in_host + at, host - device_rows, moves)
    tl.store(place + tl.load(victim + at, moves, other=0), host, moves)
    tl.store(place + row, place_of_victim, moves)
    tl.store(occupant + place_of_victim, row, moves)
    if tl.program_id(0) == 0:
        late, missing, used = tl.minimum(tl.load(totals), moved), tl.load(totals + 1), tl.load(totals + 3)
        tl.store(late_bounds + 1, late)
        tl.store(early_bounds, late)
        tl.store(early_bounds + 1, moved)
        tl.store(head, (tl.load(head) + used) % guests)
        tl.store(hand, (tl.load(hand) + used.to(tl.int64) * compared) % places)
        before = tl.load(number).to(tl.int32)
        tl.store(number, tl.where(is_last > 0, before % 255 + 1, before).to(tl.uint8))
        tl.store(batches, tl.load(batches) + is_last)
        tl.store(counters, tl.load(counters) + is_last)
        tl.store(counters + 1, tl.load(counters + 1) + missing)
        tl.store(counters + 2, tl.load(counters + 2) + moved)
        tl.store(counters + 3, tl.load(counters + 3) + missing - moved)
