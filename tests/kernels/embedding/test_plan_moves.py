"""Plans of moves: kernels against the plain function, batch by batch. tests/dlrm/tables/tiers/test_placement.py has a
model that both must obey."""

import pytest
import torch
from torch import Tensor

from dlrm_bench.kernels.embedding import plan_moves as module
from dlrm_bench.kernels.embedding._placement_state import COMPARED, NUMBERS, Moves, PlacementState, walk
from dlrm_bench.kernels.embedding.plan_moves import PlanMoves, plain_plan_moves, plan_moves
from tests.kernels.devices import DEVICE, needs_triton


def new_state(rows: int, device_rows: int, guests: int, halving: int) -> PlacementState:
    """Returns a state with the rows at random places."""
    generator = torch.Generator().manual_seed(rows)
    place = torch.randperm(rows, generator=generator)
    row_at = torch.empty_like(place)
    row_at[place] = torch.arange(rows)
    ring = torch.randperm(device_rows, generator=generator)[:guests]
    guest = torch.zeros(device_rows, dtype=torch.uint8)
    guest[ring] = 1
    last, scalar = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    state = PlacementState(
        place=torch.cat([place.int(), last - 1]),
        occupant=torch.cat([row_at[:device_rows].int(), last]),
        guest=guest,
        ring=ring.int(),
        named=torch.zeros(rows + 1, dtype=torch.uint8),
        counts=torch.zeros(halving, rows // halving + 1, dtype=torch.uint8),
        head=scalar.clone(),
        hand=scalar.clone(),
        batches=scalar.clone(),
        number=torch.full((1,), NUMBERS, dtype=torch.uint8),
        counters=torch.zeros(4, dtype=torch.int64),
    )
    return PlacementState(*(tensor.to(DEVICE) for tensor in state))


def new_moves(window: int) -> Moves:
    slots = torch.zeros(2, window, dtype=torch.int32, device=DEVICE).unbind()
    return Moves(*slots, *torch.zeros(2, 2, dtype=torch.int32, device=DEVICE).unbind())


def batch_of(rows: int, ids: int, seed: int) -> Tensor:
    """Returns a batch of skewed ids with some padding, and a row that all batches name."""
    generator = torch.Generator().manual_seed(seed)
    drawn = (torch.rand(ids, generator=generator) ** 3 * rows).int().clamp_max(rows - 1)
    drawn[:3], drawn[3] = -1, rows - 2
    return drawn.sort().values.to(DEVICE)


# Rows, rows on the device, guests, window, ids: a window that suffices, one that does not, and no rows for the host.
SHAPES = [(400, 150, 50, 40, 50), (100, 30, 12, 5, 40), (90, 90, 20, 10, 40), (5, 3, 2, 1, 9)]


@needs_triton
@pytest.mark.parametrize("shape", SHAPES)
def test_triton_equals_plain(shape: tuple[int, int, int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """In several blocks, summed up two at a time: a million ids are more blocks than one sum takes."""
    monkeypatch.setattr(module, "_BLOCKS_AT_A_TIME", 2)
    rows, device_rows, guests, window, ids = shape
    states = [new_state(rows, device_rows, guests, halving=3) for _ in range(2)]
    moves = [new_moves(window) for _ in range(2)]
    moved = late = 0
    for seed in range(5):
        batch = batch_of(rows, ids, seed)
        plain_plan_moves(batch, states[0], moves[0])
        PlanMoves(batch, states[1], moves[1]).triton(block=16)
        for field, expected, got in zip(PlacementState._fields, *states, strict=True):
            size = {"occupant": device_rows, "named": rows, "counts": rows}.get(field)  # what follows is nobody's
            assert torch.equal(expected.view(-1)[:size], got.view(-1)[:size]), (seed, field)
        assert moves[0].early.tolist() == moves[1].early.tolist()
        assert moves[0].late.tolist() == moves[1].late.tolist()
        count = int(moves[0].early[1])
        assert torch.equal(moves[0].device[:count], moves[1].device[:count])
        assert torch.equal(moves[0].host[:count], moves[1].host[:count])
        moved, late = moved + count, late + int(moves[0].late[1])
    assert (moved > 0) == (device_rows < rows)
    assert (late > 0) == (window == 5), "those that found no room when they were missing first"


def test_the_fastest_that_applies_equals_plain() -> None:
    states, moves = [new_state(500, 200, 100, halving=4) for _ in range(2)], [new_moves(50) for _ in range(2)]
    for seed in range(5):
        plan_moves(batch_of(500, 100, seed), states[0], moves[0])
        plain_plan_moves(batch_of(500, 100, seed), states[1], moves[1])
        assert torch.equal(states[0].place, states[1].place)
        assert torch.equal(states[0].counters, states[1].counters)


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
