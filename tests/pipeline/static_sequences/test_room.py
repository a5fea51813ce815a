"""Rooms for batches: few, little more than is needed, and the same on all ranks."""

from collections.abc import Callable
from typing import Any

import pytest

from dlrm_bench.dlrm.dense.static_sequences import Needs
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.static_sequences.room import Agreement, IdRoom, room_for_tokens, rooms_down


def test_rooms_for_tokens_are_few_and_hold_little_padding() -> None:
    for tokens in (0, 1, 63, 64, 65, 2_131_968):
        assert tokens <= room_for_tokens(tokens) <= 1.05 * tokens + 128
        assert room_for_tokens(tokens) % 64 == 0
    rooms = {room_for_tokens(tokens) for tokens in range(1_590_000, 2_530_000, 97)}
    assert len(rooms) <= 11  # of the benchmark's batches
    assert all(room_for_tokens(room) == room for room in rooms)


@pytest.mark.parametrize("tokens", [1, 100, 5_000, 2_131_968])
def test_rooms_down_are_all_between(tokens: int) -> None:
    most = room_for_tokens(tokens)
    expected = {room_for_tokens(of) for of in range(most // 2, most + 1, max(1, most // 5000))}
    assert rooms_down(most, most // 2) == sorted((of for of in expected if of >= most // 2), reverse=True)
    assert rooms_down(most, most) == [most]


def test_room_for_ids_grows_where_a_batch_has_none() -> None:
    room = IdRoom(1024, 1024, 2048)
    assert room.takes(Needs(1024, 1024, 2048, 10**9))
    assert not room.takes(Needs(1025, 1, 1, 1))
    assert not room.takes(Needs(1, 1025, 1, 1))
    assert not room.takes(Needs(1, 1, 2049, 1))
    assert room.grown(Needs(1, 1, 3000, 1)) == IdRoom(1024, 1024, 5120)
    assert room.grown(Needs(10_000, 1, 1, 1)) == IdRoom(15_360, 1024, 2048)
    assert room.grown(Needs(1, 2000, 1, 1)) == IdRoom(1024, 3072, 2048)


def test_capacities_that_were_large_enough_grow_with_the_one_that_was_not() -> None:
    room = IdRoom(1024, 2048, 4096)
    assert room.grown(Needs(1025, 2000, 3000, 1)) == IdRoom(2048, 3072, 5120)
    assert room.grown(Needs(2048, 1000, 2000, 1)) == IdRoom(3072, 2048, 4096)


def agree(ranks: Ranks) -> list[Needs]:
    agreement = Agreement(ranks)
    own = [Needs(10 * ranks.rank + n, 3, 100 - ranks.rank, 7) for n in range(3)]
    asked = [agreement.ask(needs) for needs in own]  # on their way together
    return [of.needs() for of in asked]


@pytest.mark.parametrize("world_size", [1, 3])
def test_ranks_agree_on_the_most(run_ranks: Callable[..., list[Any]], world_size: int) -> None:
    last = world_size - 1
    expected = [Needs(10 * last + n, 3, 100, 7) for n in range(3)]
    assert run_ranks(world_size, agree) == [expected] * world_size
