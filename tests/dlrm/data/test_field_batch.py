"""Batches of tensors and KJTs: copies, and KJTs that have computed nothing."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torchrec import KeyedJaggedTensor

from dlrm_bench.dlrm.data.field_batch import FieldBatch


@dataclass
class Two(FieldBatch):
    features: KeyedJaggedTensor
    labels: Tensor


def batch() -> Two:
    lengths = torch.tensor([2, 0, 1, 3], dtype=torch.int32)
    features = KeyedJaggedTensor(["a", "b"], torch.arange(6), lengths=lengths, stride=2)
    return Two(features, torch.tensor([0.0, 1.0]))


def assert_equal(one: Two, other: Two) -> None:
    assert one.features.keys() == other.features.keys()
    for of_one, of_other in (
        (one.features.values(), other.features.values()),
        (one.features.lengths(), other.features.lengths()),
        (one.labels, other.labels),
    ):
        assert torch.equal(of_one.cpu(), of_other.cpu())


def test_untouched_shares_memory_and_nothing_computed() -> None:
    used = batch()
    used.features.sync()
    assert used.features.length_per_key_or_none() is not None
    fresh = used.untouched()
    assert fresh.features.length_per_key_or_none() is None
    assert fresh.features.values().data_ptr() == used.features.values().data_ptr()
    assert_equal(fresh, used)
    assert fresh.features.stride() == 2


def test_untouched_has_the_weights() -> None:
    used = batch()
    used.features = KeyedJaggedTensor(
        ["a", "b"], used.features.values(), weights=torch.rand(6), lengths=used.features.lengths(), stride=2
    )
    assert used.untouched().features.weights().data_ptr() == used.features.weights().data_ptr()


def test_a_copy_is_of_its_type() -> None:
    copy = batch().to(torch.device("cpu"))
    assert type(copy) is Two
    assert_equal(copy, batch())


@pytest.mark.gpu
def test_copies_on_a_gpu_on_either_stream() -> None:
    device = torch.device("cuda", 0)
    pinned, stream = batch().pin_memory(), torch.cuda.Stream()
    assert pinned.features.values().is_pinned()
    copies = pinned.to(device, non_blocking=True), pinned.to(device, True, data_copy_stream=stream)
    torch.cuda.synchronize()
    for copy in copies:
        copy.record_stream(stream)
        assert_equal(copy, batch())
