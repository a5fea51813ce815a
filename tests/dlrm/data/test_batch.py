import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dlrm_bench.dlrm.data.batch import ALIGNMENT, Batch, feature_blocks, storage_bytes
from dlrm_bench.dlrm.dcnv2.config import ModelConfig


@given(size=st.integers(1, 300))
def test_parts_are_aligned_and_disjoint(size: int) -> None:
    model = ModelConfig(num_embeddings=(5, 7), multi_hot_sizes=(3, 1), dense_in_features=13)
    batch = Batch.empty(size, model)
    assert batch.dense.shape == (size, 13)
    assert batch.dense.dtype == torch.float32
    assert batch.labels.shape == (size,)
    assert batch.labels.dtype == torch.float32
    assert batch.ids.shape == (size * 4,)
    assert batch.ids.dtype == torch.int32
    assert batch.num_valid == size
    base = batch.storage.data_ptr()
    for part in (batch.dense, batch.labels, batch.ids):
        assert (part.data_ptr() - base) % ALIGNMENT == 0
    batch.dense.fill_(1)
    batch.labels.fill_(2)
    batch.ids.fill_(3)
    assert batch.dense.eq(1).all()
    assert batch.labels.eq(2).all()


def test_raw_ids_have_64_bits() -> None:
    model = ModelConfig(num_embeddings=(5, 7), multi_hot_sizes=(3, 1), raw_ids=True)
    batch = Batch.empty(9, model)
    assert batch.ids.dtype == torch.int64
    assert batch.ids.shape == (9 * 4,)
    assert batch.ids.data_ptr() + batch.ids.nbytes == batch.storage.data_ptr() + storage_bytes(9, model)
    assert (batch.ids.data_ptr() - batch.storage.data_ptr()) % ALIGNMENT == 0


def test_one_copy_of_the_buffer_carries_everything(model: ModelConfig) -> None:
    batch = Batch.empty(8, model)
    batch.storage.random_(0, 100)
    copy = Batch.over(batch.storage.clone(), batch.layout, num_valid=5)
    assert copy.num_valid == 5
    assert torch.equal(copy.dense, batch.dense)
    assert torch.equal(copy.labels, batch.labels)
    assert torch.equal(copy.ids, batch.ids)
    assert batch.storage.numel() == storage_bytes(8, model)


def test_feature_blocks_are_views_in_kjt_order() -> None:
    ids = torch.arange(12, dtype=torch.int32)
    first, second = feature_blocks(ids, (1, 3))
    np.testing.assert_array_equal(first, [[0], [1], [2]])
    np.testing.assert_array_equal(second, [[3, 4, 5], [6, 7, 8], [9, 10, 11]])
    first[0, 0] = 99
    assert ids[0] == 99


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_pinned(model: ModelConfig) -> None:
    batch = Batch.empty(8, model, pin=True)
    assert batch.storage.is_pinned()
    assert batch.ids.is_pinned()
