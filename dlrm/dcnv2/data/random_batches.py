"""Random batches in memory, for runs that measure latency and read no files."""

from collections.abc import Iterator
from itertools import cycle

import numpy as np
import torch

from dlrm_bench.dlrm.data.batch import Batch, feature_blocks
from dlrm_bench.dlrm.data.distributions import hashed_ids, log_counts, raw_ids, zipf_ids
from dlrm_bench.dlrm.dcnv2.config import DataConfig, ModelConfig

CLICK_RATE = 0.25


class RandomDataset:
    """Samples distributed like MLPerf's multi-hot data, with unpredictable labels.

    The first id of a feature is skewed. With random_ids "expanded" the others are a fixed function of it, for all
    seeds, ranks and batches, as in MLPerf's files (expansion.py): uniform over the table if each first id counts once,
    yet repeated as often as the first id. They differ from MLPerf's tables, which take 23.9 GB and minutes to draw: a
    hash of (feature, first id, position) has the same statistics and takes no memory. With "uniform" the others are
    drawn independently for each sample, which gives about twice as many distinct rows. Raw ids are those of the same
    rows.
    """

    train_samples: int | None = None
    eval_samples: int = 0
    best_auc: float | None = None

    def __init__(self, data: DataConfig, model: ModelConfig, seed: int) -> None:
        self._data = data
        self._model = model
        self._seed = seed

    def train_batches(self, rank: int, world_size: int, local_batch_size: int, pin: bool = False) -> Iterator[Batch]:
        """Draws `random_batches` batches now, from (seed, rank), and yields these objects in turn without end."""
        assert 0 <= rank < world_size
        rng = np.random.Generator(np.random.SFC64([self._seed, rank]))
        pool = [self._draw(rng, local_batch_size, pin) for _ in range(self._data.random_batches)]
        return cycle(pool)

    def eval_batches(self, rank: int, world_size: int, local_batch_size: int, pin: bool = False) -> Iterator[Batch]:
        """Raises ValueError: random labels cannot be evaluated."""
        raise ValueError("--data.source random has no evaluation samples: choose multi_hot or one_hot")

    def _draw(self, rng: np.random.Generator, batch_size: int, pin: bool) -> Batch:
        batch = Batch.empty(batch_size, self._model, pin)
        batch.dense.copy_(torch.from_numpy(log_counts(rng, batch_size, self._model.dense_in_features)))
        batch.labels.copy_(torch.from_numpy(rng.random(batch_size) < CLICK_RATE))
        blocks = feature_blocks(batch.ids, self._model.multi_hot_sizes)
        for feature, (rows, block) in enumerate(zip(self._model.rows, blocks, strict=True)):
            ids = block.numpy()
            ids[:, 0] = zipf_ids(rng, rows, self._data.random_skew, batch_size)
            if self._data.random_ids == "expanded":
                ids[:, 1:] = hashed_ids(ids[:, 0], ids.shape[1] - 1, rows, salt=feature)
            else:
                ids[:, 1:] = rng.integers(0, rows, size=(batch_size, ids.shape[1] - 1), dtype=np.int32)
            if self._model.raw_ids:
                ids[:] = raw_ids(ids, salt=feature)
        return batch
