from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
import torch

from dlrm_bench.bench.presets import preset
from dlrm_bench.dlrm.data.batch import feature_blocks
from dlrm_bench.dlrm.dcnv2.config import DataConfig, ModelConfig
from dlrm_bench.dlrm.dcnv2.data.random_batches import RandomDataset

SIZES = (5, 2, 1)


@pytest.fixture
def dataset() -> RandomDataset:
    model = ModelConfig(num_embeddings=(10_000, 1, 40), multi_hot_sizes=SIZES)
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


def with_ids(dataset: RandomDataset, random_ids: str) -> RandomDataset:
    return RandomDataset(replace(dataset._data, random_ids=random_ids), dataset._model, dataset._seed)


def test_equal_first_ids_have_equal_others_in_every_batch(dataset: RandomDataset) -> None:
    batches = [*islice(dataset.train_batches(0, 2, 5000), 3), *islice(dataset.train_batches(1, 2, 5000), 3)]
    batches.append(next(RandomDataset(dataset._data, dataset._model, seed=8).train_batches(0, 1, 5000)))
    bags = np.concatenate([feature_blocks(batch.ids, SIZES)[0].numpy() for batch in batches])
    assert len(np.unique(bags, axis=0)) == len(np.unique(bags[:, 0])) > 1000
    uniform = next(with_ids(dataset, "uniform").train_batches(0, 2, 5000))
    bags = feature_blocks(uniform.ids, SIZES)[0].numpy()
    assert len(np.unique(bags, axis=0)) > 4990


def test_a_rank_draws_the_same_whatever_the_number_of_ranks(dataset: RandomDataset) -> None:
    two, eight = (next(dataset.train_batches(1, ranks, 64)) for ranks in (2, 8))
    assert torch.equal(two.ids, eight.ids)


@pytest.mark.parametrize("random_ids", ["expanded", "uniform"])
def test_ids_of_tables_of_twice_the_rows_name_all_of_them(dataset: RandomDataset, random_ids: str) -> None:
    doubled = RandomDataset(dataset._data, replace(dataset._model, table_scale=2.0), dataset._seed)
    ids = next(with_ids(doubled, random_ids).train_batches(0, 1, 20_000)).ids
    for block, rows in zip(feature_blocks(ids, SIZES), (20_000, 2, 80), strict=True):
        assert block.min() >= 0
        assert 0.99 * rows - 1 <= block.max() < rows


def number_of_distinct(ids: np.ndarray, rows: int) -> int:
    """As np.unique, which takes seconds to sort millions."""
    seen = np.zeros(rows, dtype=bool)
    seen[ids] = True
    return int(np.count_nonzero(seen))


def test_distinct_rows_of_a_global_batch_of_mlperf() -> None:
    model = preset("mlperf-dcnv2").model
    hottest = int(np.argmax(model.multi_hot_sizes))
    model = replace(model, num_embeddings=model.num_embeddings[hottest : hottest + 1], multi_hot_sizes=(100,))
    distinct = {}
    for ids in ("expanded", "uniform"):
        data = DataConfig(random_batches=1, random_ids=ids)  # type: ignore[arg-type]
        batch = next(RandomDataset(data, model, seed=0).train_batches(0, 1, 55296))
        first = number_of_distinct(feature_blocks(batch.ids, (100,))[0].numpy()[:, 0], *model.rows)
        distinct[ids] = number_of_distinct(batch.ids.numpy(), *model.rows)
    # Expected distinct rows of 5.5 million ids: birthdays in 40 million rows, 99 others for each sample, or each first
    # id.
    for ids, others in (("expanded", 99 * first), ("uniform", 99 * 55296)):
        expected = 4e7 * -np.expm1(-others / 4e7)
        assert expected < distinct[ids] < expected * 1.01 + first
    assert 2 < distinct["uniform"] / distinct["expanded"] < 2.5


@pytest.mark.parametrize("random_ids", ["expanded", "uniform"])
def test_only_first_ids_are_skewed(dataset: RandomDataset, random_ids: str) -> None:
    batch = next(with_ids(dataset, random_ids).train_batches(0, 1, 20_000))
    large, single, small = (block.numpy() for block in feature_blocks(batch.ids, SIZES))
    if random_ids == "expanded":  # Each first id once.
        large = large[np.unique(large[:, 0], return_index=True)[1]]
        assert len(large) > 2000
    else:
        assert (large[:, 0] < 10).mean() > 0.2
    assert (large[:, 1:] < 10).mean() < 0.002
    assert abs(large[:, 1:].mean() / 10_000 - 0.5) < 0.015
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
