"""Embeddings as the dense network takes them: one matrix of all rows as the rows of each feature."""

import pytest
import torch

from dlrm_bench.dlrm.dlrmv4.config import CONTEXT_TABLES, EVENT_TABLES, tables
from dlrm_bench.dlrm.dlrmv4.embedded import Embedded
from tests.dlrm.dlrmv4.cases import SMALL

EVENTS, SAMPLES = 7, 3
ROWS = len(EVENT_TABLES) * (EVENTS + SAMPLES) + len(CONTEXT_TABLES) * SAMPLES


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_matrix_is_the_rows_of_each_feature(dtype: torch.dtype) -> None:
    whole = torch.randn(ROWS, SMALL.embedding_dim, generator=torch.Generator().manual_seed(0))
    sizes = [size for _ in EVENT_TABLES for size in (EVENTS, SAMPLES)] + [SAMPLES] * len(CONTEXT_TABLES)
    features = [feature for table in tables(SMALL) for feature in table.features]
    rows = dict(zip(features, whole.split(sizes), strict=True))
    found, expected = Embedded.in_order(whole, SAMPLES, dtype), Embedded.of_features(rows, SMALL, dtype)
    for ours, theirs in zip(found.flat(), expected.flat(), strict=True):
        assert torch.equal(ours, theirs)
        assert ours.dtype == theirs.dtype
    assert all(of.data_ptr() % 4 == 0 and of.is_contiguous() for of in found.flat())
    storages = {of.untyped_storage().data_ptr() for of in found.flat()}
    assert len(storages) == 1 + (dtype != torch.float32), "views of the matrix, and of one copy in another format"


def test_leaves_are_the_same_values() -> None:
    embedded = Embedded.in_order(torch.randn(ROWS, SMALL.embedding_dim), SAMPLES, torch.bfloat16)
    leaves = embedded.leaves()
    assert all(of.requires_grad and of.is_leaf for of in leaves.flat())
    for ours, theirs in zip(leaves, embedded, strict=True):
        assert all(map(torch.equal, ours, theirs))


def test_other_numbers_of_rows_are_refused() -> None:
    with pytest.raises(AssertionError, match="equally many rows"):
        Embedded.in_order(torch.randn(ROWS + 1, 4), SAMPLES, torch.float32)
