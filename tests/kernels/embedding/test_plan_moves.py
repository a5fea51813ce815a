"""Plans of moves: kernels against the plain function, batch by batch. tests/dlrm/tables/tiers/test_placement.py has a
model that both must obey."""

from collections.abc import Sequence
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from dlrm_bench.kernels.embedding import plan_moves as module
from dlrm_bench.kernels.embedding._placement_state import COMPARED, NUMBERS, Moves, PlacementState, PoolState, walk
from dlrm_bench.kernels.embedding.plan_moves import PlanMoves, plain_plan_moves, plan_moves
from tests.kernels.devices import DEVICE, needs_triton


def new_state(rows: int, pools: Sequence[tuple[int, int, int]], halving: int) -> PlacementState:
    """Returns a state with the rows of each pool at random places, and with counts up to the largest. pools: rows,
    places and guests of each."""
    generator = torch.Generator().manual_seed(rows)
    device_rows = sum(places for _, places, _ in pools)
    place, occupant = (torch.full((size + 1,), -1, dtype=torch.int32) for size in (rows, device_rows))
    guest = torch.zeros(device_rows, dtype=torch.uint8)
    scalar = torch.zeros(1, dtype=torch.int64)
    state_of, first_row, first, in_host = [], 0, 0, device_rows
    for count, places, guests in pools:
        order = torch.randperm(count, generator=generator)
        at = torch.cat([first + torch.arange(places), in_host + torch.arange(count - places)])
        place[first_row + order] = at.int()
        occupant[first : first + places] = (first_row + order[:places]).int()
        ring = first + torch.randperm(places, generator=generator)[:guests]
        guest[ring] = 1
        moved = (tensor.to(DEVICE) for tensor in (ring.int(), scalar.clone(), scalar.clone()))
        state_of.append(PoolState(first, places, *moved))
        first_row, first, in_host = first_row + count, first + places, in_host + count - places
    tensors = (
        place,
        occupant,
        guest,
        torch.zeros(rows + 1, dtype=torch.uint8),
        torch.randint(0, 256, (halving, rows // halving + 1), dtype=torch.uint8, generator=generator),
        scalar.clone(),
        torch.full((1,), NUMBERS, dtype=torch.uint8),
        torch.zeros(4, dtype=torch.int64),
    )
    return PlacementState(*(tensor.to(DEVICE) for tensor in tensors), pools=tuple(state_of))


def new_moves(windows: Sequence[int]) -> list[Moves]:
    slots = ([torch.zeros(window, dtype=torch.int32, device=DEVICE) for _ in range(2)] for window in windows)
    return [Moves(*of, *torch.zeros(2, 2, dtype=torch.int32, device=DEVICE).unbind()) for of in slots]


def batch_of(rows: int, ids: int, seed: int, first: int = 0) -> Tensor:
    """Returns a batch of skewed ids of a pool's rows with some padding, and a row that all batches name."""
    generator = torch.Generator().manual_seed(seed)
    drawn = (torch.rand(ids, generator=generator) ** 3 * rows).int().clamp_max(rows - 1)
    drawn[:3], drawn[3] = -1, rows - 2
    return torch.where(drawn < 0, -1, drawn + first).sort().values.to(DEVICE)


def check_equal(expected: PlacementState, got: PlacementState) -> None:
    rows, device_rows = len(expected.place) - 1, len(expected.guest)
    for field, plain, other in zip(PlacementState._fields[:-1], expected[:-1], got[:-1], strict=True):
        size = {"occupant": device_rows, "named": rows, "counts": rows}.get(field)  # what follows is nobody's
        assert torch.equal(plain.view(-1)[:size], other.view(-1)[:size]), field
    for plain, other in zip(expected.pools, got.pools, strict=True):
        assert plain[:2] == other[:2]
        assert all(torch.equal(*tensors) for tensors in zip(plain[2:], other[2:], strict=True))


# Rows, rows on the device, guests, window, ids: a window that suffices, one that does not, and no rows for the host.
SHAPES = [(400, 150, 50, 40, 50), (100, 30, 12, 5, 40), (90, 90, 20, 10, 40), (7, 3, 2, 1, 9)]


@needs_triton
@pytest.mark.parametrize("shapes", [*([shape] for shape in SHAPES), SHAPES[:3]])
def test_triton_equals_plain(shapes: list[tuple[int, int, int, int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """In several blocks, summed up two at a time: a million ids are more blocks than one sum takes; in one pool, or in
    several."""
    monkeypatch.setattr(module, "_BLOCKS_AT_A_TIME", 2)
    rows, pools = sum(shape[0] for shape in shapes), [shape[:3] for shape in shapes]
    states = [new_state(rows, pools, halving=3) for _ in range(2)]
    plain, triton = (new_moves([shape[3] for shape in shapes]) for _ in range(2))
    firsts = list(accumulate((shape[0] for shape in shapes), initial=0))
    moved, late = [0] * len(shapes), [0] * len(shapes)
    for seed in range(5):
        batch = [batch_of(shape[0], shape[4], seed, first) for shape, first in zip(shapes, firsts, strict=False)]
        plain_plan_moves(batch, states[0], plain)
        PlanMoves(batch, states[1], triton).triton(block=16, window_block=8)
        check_equal(*states)
        for pool, (one, other) in enumerate(zip(plain, triton, strict=True)):
            assert one.early.tolist() == other.early.tolist()
            assert one.late.tolist() == other.late.tolist()
            count = int(one.early[1])
            assert torch.equal(one.device[:count], other.device[:count])
            assert torch.equal(one.host[:count], other.host[:count])
            moved[pool], late[pool] = moved[pool] + count, late[pool] + int(one.late[1])
    for (count, device_rows, _, window, _), some, of_late in zip(shapes, moved, late, strict=True):
        assert (some > 0) == (device_rows < count)
        assert (of_late > 0) == (window == 5), "those that found no room when they were missing first"


def test_the_fastest_that_applies_equals_plain() -> None:
    states, moves = [new_state(500, [(500, 200, 100)], halving=4) for _ in range(2)], new_moves([50, 50])
    for seed in range(5):
        plan_moves([batch_of(500, 100, seed)], states[0], moves[:1])
        plain_plan_moves([batch_of(500, 100, seed)], states[1], moves[1:])
        check_equal(*states)


@pytest.mark.parametrize(
    ("device_rows", "window"), [(2, 1), (3, 1), (7, 6), (150, 40), (1 << 20, 4096), (102_092_294, 9)]
)
def test_the_walk_comes_to_every_place_once_and_no_place_to_two_guests(device_rows: int, window: int) -> None:
    compared, stride = walk(device_rows, window)
    assert 1 <= compared <= COMPARED
    assert window * compared <= device_rows
    some = torch.arange(min(device_rows, 1 << 20)) * stride % device_rows
    assert len(some.unique()) == len(some)
    tenths = torch.bincount(some * 10 // device_rows, minlength=10)
    assert device_rows < 100 or tenths.max() - tenths.min() < 0.02 * len(some) + 10, "all parts of the device alike"
