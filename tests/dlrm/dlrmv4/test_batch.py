"""Samples become a batch that TorchRec takes, and what cannot be one is refused by name."""

from dataclasses import fields, replace

import pytest
import torch

from dlrm_bench.dlrm.dlrmv4.batch import batch_of, check_samples, kjt_of, longest_of
from dlrm_bench.dlrm.dlrmv4.config import OWN_TOKENS, tables
from tests.dlrm.dlrmv4.cases import LENGTHS, SMALL, by_item, make_samples


def test_a_batch_names_each_features_rows() -> None:
    samples = make_samples(SMALL, LENGTHS, seed=1)
    features = kjt_of(samples, SMALL).to_dict()
    assert list(features) == [name for table in tables(SMALL) for name in table.features]
    expected = {
        "item_id": samples.item,
        "item_candidate_id": samples.candidate_item,
        "artist_id": samples.artist,
        "item_candidate_artist_id": samples.candidate_artist,
        "album_id": samples.album,
        "item_candidate_album_id": samples.candidate_album,
    } | {table.name: rows for table, rows in zip(tables(SMALL)[3:], samples.context, strict=True)}
    for name, rows in expected.items():
        assert torch.equal(features[name].values(), rows), name
        assert features[name].values().dtype == torch.int32
        one = torch.ones_like(samples.lengths)
        lengths = samples.lengths if len(rows) != len(LENGTHS) else one
        assert torch.equal(features[name].lengths(), lengths), name


def test_a_batch_keeps_its_fields_when_it_moves() -> None:
    batch = batch_of(make_samples(SMALL, LENGTHS, seed=1), SMALL)
    moved = batch.to(torch.device("cpu"))
    assert moved.longest == batch.longest == longest_of(make_samples(SMALL, LENGTHS, seed=1)) == OWN_TOKENS + 40
    assert moved.features.keys() == batch.features.keys()
    for of in fields(batch):
        value = getattr(moved, of.name)
        assert not isinstance(value, torch.Tensor) or torch.equal(value, getattr(batch, of.name))


def test_distinct_events_are_named_once() -> None:
    samples = by_item(make_samples(SMALL, LENGTHS, seed=1))
    batch = batch_of(samples, SMALL, distinct=True).to(torch.device("cpu"))
    features = batch.features.to_dict()
    pairs = sorted(set(zip(samples.item.tolist(), samples.action.tolist(), strict=True)))
    assert batch.event is not None
    assert len(pairs) < len(samples.item)
    assert list(zip(features["item_id"].values().tolist(), batch.action.tolist(), strict=True)) == pairs
    for name in ("item", "artist", "album"):
        assert torch.equal(features[f"{name}_id"].values()[batch.event], getattr(samples, name))
        lengths = features[f"{name}_id"].lengths()
        assert int(lengths.sum()) == len(pairs)
        assert int(lengths.max() - lengths.min()) <= 1
    assert torch.equal(batch.action[batch.event], samples.action)
    assert torch.equal(features["uid"].values(), samples.context[0])
    assert torch.equal(batch.timestamp, samples.timestamp)


@pytest.mark.parametrize("name", ["artist", "album"])
def test_an_item_of_two_artists_or_albums_has_no_distinct_events(name: str) -> None:
    samples = by_item(make_samples(SMALL, LENGTHS, seed=1))
    item, count = samples.item.unique(return_counts=True)
    twice = int(item[count.argmax()])
    places = (samples.item == twice).nonzero().flatten()
    actions = samples.action.index_fill(0, places, 1)
    changed = getattr(samples, name).index_fill(0, places[:1], 16)
    with pytest.raises(ValueError, match=rf"samples\.{name}: item {twice} has two"):
        batch_of(replace(samples, action=actions, **{name: changed}), SMALL, distinct=True)


def test_samples_without_history_have_no_distinct_events() -> None:
    batch = batch_of(make_samples(SMALL, (0, 0), seed=1), SMALL, distinct=True)
    assert batch.event is not None
    assert len(batch.event) == len(batch.action) == 0


def test_histories_that_are_too_long_are_refused() -> None:
    with pytest.raises(ValueError, match=r"41 events.*--model\.max-history is 40"):
        batch_of(make_samples(SMALL, (3, 41), seed=1), SMALL)


def test_a_batch_without_samples_is_refused() -> None:
    with pytest.raises(ValueError, match="no samples"):
        batch_of(make_samples(SMALL, (), seed=1), SMALL)


def test_good_samples_pass_the_check() -> None:
    check_samples(make_samples(SMALL, LENGTHS, seed=1), SMALL)
    check_samples(make_samples(SMALL, (), seed=1), SMALL)


@pytest.mark.parametrize(
    ("field", "change", "message"),
    [
        ("item", lambda of: of.index_fill(0, torch.tensor([3]), 61), "table item_id has 61 rows"),
        ("candidate_album", lambda of: of - 100, "table album_id has 29 rows"),
        ("context", lambda of: of + 12, r"table uid has 11 rows.*rows 1[2-9] to"),
        ("artist", lambda of: of[1:], r"samples.artist is torch.int32 \[66\]: it must be torch.int32 \[67\]"),
        ("action", lambda of: of.int(), r"samples.action is torch.int32"),
        ("labels", lambda of: of.int(), r"samples.labels is torch.int32 \[6\]: it must be torch.float32 \[6\]"),
        ("context", lambda of: of[:7], r"samples.context is torch.int32 \[7, 6\]: it must be torch.int32 \[8, 6\]"),
        ("lengths", lambda of: of + torch.tensor([-8, 8, 0, 0, 0, 0], dtype=torch.int32), "less than no events"),
    ],
)
def test_bad_samples_are_named(field: str, change, message: str) -> None:  # type: ignore[no-untyped-def]
    samples = make_samples(SMALL, LENGTHS, seed=1)
    with pytest.raises(ValueError, match=message):
        check_samples(replace(samples, **{field: change(getattr(samples, field))}), SMALL)
