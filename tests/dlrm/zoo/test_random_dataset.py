"""Padded batches: the samples of the plain ones, the same number of ids in every batch, little of it padding."""

from itertools import islice

import pytest
import torch

from dlrm_bench.dlrm.zoo.config import SequenceData, SequenceModel
from dlrm_bench.dlrm.zoo.models import SequenceBatch
from dlrm_bench.dlrm.zoo.random_dataset import capacity, draw_samples, spare_sequences, zeros

MODEL = SequenceModel(rows=50, item_features=2)
SIZE = 64


def drawn(data: SequenceData, count: int) -> list[SequenceBatch]:
    made = list(islice(draw_samples(MODEL, data, seed=3, rank=1, world_size=2, local_batch_size=SIZE), count))
    assert all(isinstance(batch, SequenceBatch) for batch in made)
    return made  # type: ignore[return-value]


def test_padding_comes_after_the_samples() -> None:
    room, sequences = capacity(MODEL, SIZE), SIZE + spare_sequences(MODEL, SIZE)
    for plain, padded in zip(drawn(SequenceData(), 40), drawn(SequenceData(padded=True), 40), strict=True):
        for name in ("dense", "labels"):
            assert torch.equal(getattr(padded, name), getattr(plain, name))
        assert torch.equal(padded.bags.values(), plain.bags.values())
        ids, lengths = padded.history.values(), padded.history.lengths()
        assert (len(ids), len(lengths), padded.history.stride()) == (room, sequences, sequences)
        assert lengths.sum() == room
        assert torch.equal(lengths[:SIZE], plain.history.lengths())
        assert torch.equal(ids[: plain.history.values().numel()], plain.history.values())
        assert lengths.max() <= MODEL.longest


def test_histories_of_one_length_need_no_padding() -> None:
    (batch,) = drawn(SequenceData(full=True, padded=True), 1)
    assert batch.history.stride() == SIZE
    assert batch.history.values().numel() == SIZE * MODEL.longest


def test_a_batch_of_zeros_has_the_form_of_the_others() -> None:
    for data in (SequenceData(), SequenceData(padded=True), SequenceData(full=True)):
        batch, (other,) = zeros(MODEL, data, SIZE), drawn(data, 1)
        assert isinstance(batch, SequenceBatch)
        assert batch.history.stride() == other.history.stride()
        assert batch.history.values().numel() == other.history.values().numel() or data == SequenceData()


@pytest.mark.parametrize(("size", "share"), [(64, 0.17), (512, 0.07), (4096, 0.03), (16384, 0.02)])
def test_little_is_padding(size: int, share: float) -> None:
    mean = size * (MODEL.shortest_history + MODEL.longest_history) / 2
    assert 0 < 1 - mean / capacity(MODEL, size) < share
