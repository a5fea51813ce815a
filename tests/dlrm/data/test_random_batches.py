from itertools import islice

import numpy as np
import pytest
import torch

from dlrm_bench.dlrm.config import DataConfig, ModelConfig
from dlrm_bench.dlrm.data.batch import feature_blocks
from dlrm_bench.dlrm.data.random_batches import RandomDataset


@pytest.fixture
def dataset() -> RandomDataset:
    model = ModelConfig(num_embeddings=(10_000, 1, 40), multi_hot_sizes=(5, 2, 1))
    return RandomDataset(DataConfig(random_batches=3, random_skew=1.05), model, seed=7)


def test_a_pool_used_in_turn_without_end(dataset: RandomDataset) -> None:
    batches = list(islice(dataset.train_batches(0, 2, 16), 7))
    assert len({id(batch) for batch in batches}) == 3
    assert batches[0] is batches[3] is batches[6]
    assert dataset.train_samples is None
    assert dataset.best_auc is None


def test_seed_and_rank_decide(dataset: RandomDataset) -> None:
    first, again, other = (next(dataset.train_batches(rank, 2, 64)) for rank in (0, 0, 1))
    assert torch.equal(first.storage[: first.dense.nbytes], again.storage[: first.dense.nbytes])
    assert torch.equal(first.ids, again.ids)
    assert not torch.equal(first.ids, other.ids)


def test_only_first_ids_are_skewed(dataset: RandomDataset) -> None:
    batch = next(dataset.train_batches(0, 1, 20_000))
    large, single, small = (block.numpy() for block in feature_blocks(batch.ids, (5, 2, 1)))
    assert (large[:, 0] < 10).mean() > 0.2
    assert (large[:, 1:] < 10).mean() < 0.002
    assert abs(large[:, 1:].mean() / 10_000 - 0.5) < 0.01
    assert large.max() < 10_000
    assert not single.any()
    assert np.unique(small).size == 40
    assert set(batch.labels.tolist()) == {0.0, 1.0}
    assert abs(float(batch.labels.mean()) - 0.25) < 0.02
    assert batch.dense.isfinite().all()
    assert batch.num_valid == 20_000


def test_nothing_to_evaluate(dataset: RandomDataset) -> None:
    assert dataset.eval_samples == 0
    with pytest.raises(ValueError, match=r"--data.source"):
        dataset.eval_batches(0, 1, 8)
