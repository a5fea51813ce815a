"""A room for ids that nearly all batches do not exceed, by a bound that holds for every number of draws."""

from math import comb

import pytest

from dlrm_bench.pipeline.five_stage.trimmed.capacity import capacity


def exceeded(ids: int, share: float, room: int) -> float:
    """The probability of more than `room` of `ids` draws, exactly."""
    return sum(comb(ids, k) * share**k * (1 - share) ** (ids - k) for k in range(room + 1, ids + 1))


@pytest.mark.parametrize("ids", [1, 6, 64, 512])
@pytest.mark.parametrize("share", [0.02, 1 / 8, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("risk", [1e-3, 1e-8])
def test_the_bound_holds_and_is_no_waste(ids: int, share: float, risk: float) -> None:
    room = capacity(ids, share, risk)
    assert exceeded(ids, share, room) <= risk
    # Chernoff's bound is within a factor of some sqrt(n) of the probability: its room is a little more than the least.
    least = next(c for c in range(ids + 1) if exceeded(ids, share, c) <= risk)
    assert least <= room <= least + 2 + 0.2 * (least - ids * share)


def test_large_batches_have_room_for_little_more_than_their_share() -> None:
    assert capacity(6912 * 100, 1 / 8, 1e-9) < 1.03 * 6912 * 100 / 8
