"""The plain definitions give what the reference's code gave."""

import numpy as np
import pytest

from dlrm_bench.dlrm.dlrmv4.data import plain
from dlrm_bench.dlrm.dlrmv4.data.limits import Rows

CONTEXT = ["uid", "user_x_artist", "user_x_album", "user_x_hour", "item_x_hour", "artist_x_hour", "user_x_is_organic"]
CONTEXT.append("user_x_artist_x_hour")


def test_anchors_windows_and_shares_are_the_references(cache, answers):
    assert (plain.anchors(cache) == cache.positions).all()
    assert plain.num_windows(cache) == len(answers["windows"])
    shares = iter(answers["shares"])
    for number, expected in enumerate(answers["windows"]):
        window = plain.window(cache, number)
        assert window.tolist() == expected
        for rank in range(answers["world_size"]):
            assert plain.share(window, rank, answers["world_size"]).tolist() == next(shares)


def test_samples_are_the_references(cache, maps, answers):
    numbers = np.arange(len(cache.positions))
    found = plain.samples(cache, maps, Rows(), numbers)
    expected = answers["samples"]
    assert found.lengths.tolist() == [len(sample["item_id"]) for sample in expected]
    assert {9, 8} & set(found.lengths.tolist()), "the case has full histories"
    for field, name in [
        *(("item", "item_id"), ("artist", "artist_id"), ("album", "album_id"), ("timestamp", "action_timestamp")),
        *(("action", "action_weight"), ("query_timestamp", "item_query_time"), ("labels", "item_action_weight")),
        *(("candidate_item", "item_candidate_id"), ("candidate_artist", "item_candidate_artist_id")),
        *(("candidate_album", "item_candidate_album_id"), ("query_timestamp", "dummy_query_time")),
    ]:
        assert getattr(found, field).tolist() == [value for sample in expected for value in sample[name]], name
    for row, name in zip(found.context.tolist(), CONTEXT, strict=True):
        assert row == [sample[name][0] for sample in expected], name


@pytest.mark.parametrize("local_batch", [1, 4, 1000])
def test_batches_drop_what_is_left(local_batch):
    batches = [plain.batches(np.arange(27), rank, 2, local_batch) for rank in range(2)]
    for rank, own in enumerate(batches):
        assert own.shape == (13 // local_batch, local_batch)
        assert own.ravel().tolist() == list(range(rank, 26, 2))[: own.size]
