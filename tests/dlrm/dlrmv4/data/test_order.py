"""Steps have the reference's anchors, on every rank."""

import numpy as np
import pytest

from dlrm_bench.dlrm.dlrmv4.data import plain
from dlrm_bench.dlrm.dlrmv4.data.order import Order
from dlrm_bench.dlrm.dlrmv4.data.windows import prepare_windows


@pytest.mark.parametrize(("world_size", "local_batch"), [(1, 1), (2, 4), (3, 5), (2, 13), (4, 11)])
def test_steps_are_the_plain_batches_of_each_window_in_turn(cache, answers, world_size, local_batch):
    index = prepare_windows(cache)
    order = Order(index, 1, len(index), world_size, local_batch)
    assert order.anchors == sum(map(len, answers["windows"][1:]))
    for rank in range(world_size):
        expected = [
            batch
            for window in answers["windows"][1:]
            for batch in plain.batches(np.array(window), rank, world_size, local_batch).tolist()
        ]
        assert [order.batch(step, rank).tolist() for step in range(len(order))] == expected


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_steps_and_tails_have_each_anchor_once(cache, answers, world_size):
    index = prepare_windows(cache)
    for number, window in enumerate(answers["windows"]):
        order = Order(index, number, number + 1, world_size, 4)
        tails = [order.tail(number, rank) for rank in range(world_size)]
        assert max(map(len, tails)) <= 4
        seen = [order.batch(step, rank) for step in range(len(order)) for rank in range(world_size)]
        assert sorted(np.concatenate([*seen, *tails]).tolist()) == window


def test_what_is_not_there_is_named(cache):
    index = prepare_windows(cache)
    with pytest.raises(ValueError, match="windows 3 to 99"):
        Order(index, 3, 99, 1, 1)
    with pytest.raises(ValueError, match="step 10000"):
        Order(index, 0, 1, 1, 1).place(10_000)
