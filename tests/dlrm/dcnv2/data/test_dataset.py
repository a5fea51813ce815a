from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dlrm_bench.dlrm.config import DataConfig, ModelConfig
from dlrm_bench.dlrm.data.batch import Batch, feature_blocks
from dlrm_bench.dlrm.dcnv2.data.dataset import FileDataset, open_dataset
from dlrm_bench.dlrm.dcnv2.data.manifest import MARKER, Manifest
from dlrm_bench.dlrm.dcnv2.data.random_batches import RandomDataset

Writer = Callable[..., dict[str, np.ndarray]]
DAYS = (37, 5, 20, 31)
TRAIN, EVAL = sum(DAYS[:-1]), 16


@pytest.fixture
def arrays(tmp_path: Path, model: ModelConfig, day_writer: Writer) -> list[dict[str, np.ndarray]]:
    return [day_writer(tmp_path, day, n, model, first=sum(DAYS[:day])) for day, n in enumerate(DAYS)]


def config(path: Path, source: str = "multi_hot", train_days: int = 3) -> DataConfig:
    return DataConfig(source=source, path=path, train_days=train_days)  # type: ignore[arg-type]


def numbers(batches: list[Batch]) -> list[int]:
    return [int(n) for batch in batches for n in batch.dense[: batch.num_valid, 0]]


@given(world_size=st.integers(1, 5), batch_size=st.integers(1, 12), source=st.sampled_from(["multi_hot", "one_hot"]))
@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None, max_examples=40
)
def test_every_sample_exactly_once(
    tmp_path: Path,
    model: ModelConfig,
    arrays: list[dict[str, np.ndarray]],
    world_size: int,
    batch_size: int,
    source: str,
) -> None:
    dataset = open_dataset(config(tmp_path, source), model, seed=0)
    assert dataset.train_samples == TRAIN
    assert dataset.eval_samples == EVAL
    assert dataset.best_auc is None
    ranks = range(world_size)
    train = [list(dataset.train_batches(rank, world_size, batch_size)) for rank in ranks]
    evaluation = [list(dataset.eval_batches(rank, world_size, batch_size)) for rank in ranks]
    global_batch = world_size * batch_size
    for batches in train:
        assert len(batches) == TRAIN // global_batch
        assert all(batch.num_valid == batch_size for batch in batches)
    for batches in evaluation:
        assert len(batches) == -(-EVAL // global_batch)
    in_order = [batch for index in range(TRAIN // global_batch) for batch in (train[rank][index] for rank in ranks)]
    assert numbers(in_order) == list(range(TRAIN // global_batch * global_batch))
    in_order = [batch for step in zip(*evaluation, strict=True) for batch in step]
    assert numbers(in_order) == list(range(TRAIN, TRAIN + EVAL))


@pytest.mark.parametrize("source", ["multi_hot", "one_hot"])
def test_a_batch_across_three_days_holds_the_files_values(
    tmp_path: Path, model: ModelConfig, arrays: list[dict[str, np.ndarray]], source: str
) -> None:
    (batch,) = open_dataset(config(tmp_path, source), model, seed=0).train_batches(0, 1, 50)
    everything = {name: np.concatenate([day[name] for day in arrays])[:50] for name in arrays[0]}
    np.testing.assert_array_equal(batch.dense, everything["dense"])
    np.testing.assert_array_equal(batch.labels, everything["labels"][:, 0])
    for feature, block in enumerate(feature_blocks(batch.ids, model.multi_hot_sizes)):
        np.testing.assert_array_equal(block, everything[str(feature)])


def test_padding_is_valid_and_some_ranks_may_have_only_that(
    tmp_path: Path, model: ModelConfig, arrays: list[dict[str, np.ndarray]]
) -> None:
    dataset = open_dataset(config(tmp_path), model, seed=0)
    last = [list(dataset.eval_batches(rank, 4, 6))[-1] for rank in range(4)]
    assert [batch.num_valid for batch in last] == [6, 6, 4, 0]
    for batch in last:
        assert batch.dense.shape == (6, 2)
        assert not batch.dense[batch.num_valid :].any()
        assert not batch.labels[batch.num_valid :].any()
        for block in feature_blocks(batch.ids, model.multi_hot_sizes):
            assert not block[batch.num_valid :].any()


def test_epochs_repeat(tmp_path: Path, model: ModelConfig, arrays: list[dict[str, np.ndarray]]) -> None:
    dataset = open_dataset(config(tmp_path), model, seed=0)
    first, second = (list(dataset.train_batches(1, 2, 4)) for _ in range(2))
    assert all(torch.equal(a.ids, b.ids) for a, b in zip(first, second, strict=True))


def test_too_few_samples_for_one_batch(tmp_path: Path, model: ModelConfig, arrays: list[dict[str, np.ndarray]]) -> None:
    with pytest.raises(ValueError, match=r"62 training samples do not fill.*--local-batch-size"):
        open_dataset(config(tmp_path), model, seed=0).train_batches(0, 2, 32)


def test_a_missing_directory_names_the_generator(tmp_path: Path, model: ModelConfig) -> None:
    with pytest.raises(ValueError, match=r"--data.path .*nowhere.*dlrm-bench data generate"):
        open_dataset(config(tmp_path / "nowhere"), model, seed=0)


def test_a_missing_day(tmp_path: Path, model: ModelConfig, arrays: list[dict[str, np.ndarray]]) -> None:
    with pytest.raises(ValueError, match=r"day_4_dense.npy does not exist.*--data.train-days"):
        open_dataset(config(tmp_path, train_days=4), model, seed=0)


def test_files_are_checked_before_tables_are_drawn(tmp_path: Path, model: ModelConfig) -> None:
    with pytest.raises(ValueError, match=r"day_0_dense.npy does not exist"):
        open_dataset(config(tmp_path, "one_hot"), model, seed=0)
    assert not list(tmp_path.iterdir())


def test_an_unfinished_data_set(tmp_path: Path, model: ModelConfig, arrays: list[dict[str, np.ndarray]]) -> None:
    (tmp_path / MARKER).touch()
    with pytest.raises(ValueError, match="unfinished"):
        open_dataset(config(tmp_path), model, seed=0)


def test_the_manifest(tmp_path: Path, model: ModelConfig, arrays: list[dict[str, np.ndarray]]) -> None:
    Manifest(
        parameters={},
        rows=list(model.rows),
        multi_hot_sizes=list(model.multi_hot_sizes),
        dense_in_features=2,
        samples_per_day=list(DAYS),
        train_samples=TRAIN,
        eval_samples=EVAL,
        best_auc=0.9,
    ).write(tmp_path)
    assert open_dataset(config(tmp_path), model, seed=0).best_auc == 0.9
    # Another day evaluates, of which the manifest knows nothing.
    assert open_dataset(config(tmp_path, train_days=2), model, seed=0).best_auc is None


def test_bad_values_surface_while_reading(
    tmp_path: Path, model: ModelConfig, arrays: list[dict[str, np.ndarray]]
) -> None:
    labels = arrays[2]["labels"].copy()
    labels[3] = 7
    np.save(tmp_path / "day_2_labels.npy", labels)
    batches = iter(FileDataset(config(tmp_path), model).train_batches(0, 1, 10))
    for _ in range(4):
        next(batches)
    with pytest.raises(ValueError, match=r"day_2_labels.npy: the label of sample 3 is 7"):
        next(batches)


def test_random_needs_no_files(model: ModelConfig) -> None:
    assert isinstance(open_dataset(DataConfig(), model, seed=0), RandomDataset)
