"""Batches drawn at random, as a data set of the training loop."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle, islice

import torch
from torchrec import KeyedJaggedTensor

from dlrm_bench.dlrm.data.field_batch import FieldBatch
from dlrm_bench.dlrm.zoo.config import BagsModel, SequenceData
from dlrm_bench.dlrm.zoo.models import BagsBatch, SequenceBatch


@dataclass
class Drawn:
    """One rank's samples of one iteration; see data.dataset.HostBatch."""

    batch: FieldBatch
    num_valid: int


Draw = Callable[[int, int, int], Iterator[FieldBatch]]
"""Yields batches without end, given (rank, number of ranks, local batch size)."""


class RandomDataset:
    """Random samples, which cannot be evaluated."""

    train_samples: int | None = None
    eval_samples: int = 0
    best_auc: float | None = None

    def __init__(self, draw: Draw, count: int) -> None:
        """count: number of distinct batches."""
        self._draw, self._count = draw, count

    def train_batches(self, rank: int, world_size: int, local_batch_size: int, pin: bool = False) -> Iterator[Drawn]:
        """Draws the batches now and yields these objects in turn without end."""
        drawn = islice(self._draw(rank, world_size, local_batch_size), self._count)
        return cycle([Drawn(batch.pin_memory() if pin else batch, local_batch_size) for batch in drawn])

    def eval_batches(self, rank: int, world_size: int, local_batch_size: int, pin: bool = False) -> Iterator[Drawn]:
        """Raises ValueError: random labels cannot be evaluated."""
        raise ValueError("random batches have no evaluation samples: leave --target-auc out")


def draw_samples(
    model: BagsModel, data: object, seed: int, rank: int, world_size: int, local_batch_size: int
) -> Iterator[BagsBatch]:
    """Yields batches of uniform ids and dense features and coin-flip labels, from seed and rank."""
    full = isinstance(data, SequenceData) and data.full
    random = torch.Generator().manual_seed((seed * 1_000_003 + rank) % 2**63)
    while True:
        yield _draw(model, local_batch_size, random, full)


def zeros(model: BagsModel, local_batch_size: int) -> BagsBatch:
    """Returns a batch with id 0, dense feature 0 and label 0, and full histories."""
    return _batch(model, local_batch_size, None, _lengths(model, local_batch_size, None))


def _draw(model: BagsModel, size: int, random: torch.Generator, full: bool) -> BagsBatch:
    return _batch(model, size, random, _lengths(model, size, None if full else random))


def _lengths(model: BagsModel, size: int, random: torch.Generator | None) -> torch.Tensor:
    """Returns the lengths of the histories, int32 [B]; without a generator, all are the longest."""
    longest = model.longest_history
    if random is None:
        return torch.full((size,), longest, dtype=torch.int32)
    return torch.randint(longest // 5, longest + 1, (size,), generator=random, dtype=torch.int32)


def _batch(model: BagsModel, size: int, random: torch.Generator | None, lengths: torch.Tensor) -> BagsBatch:
    """Returns a batch; of zeros without a generator."""

    def integers(below: int, count: int) -> torch.Tensor:
        if random is None:
            return torch.zeros(count, dtype=torch.int64)
        return torch.randint(0, below, (count,), generator=random)

    names, hot = list(model.bag_names), model.multi_hot_size
    shape = (size, model.dense_in_features)
    dense = torch.zeros(shape) if random is None else torch.rand(shape, generator=random)
    bags = KeyedJaggedTensor(
        names,
        integers(model.rows_built, size * len(names) * hot),
        lengths=torch.full((size * len(names),), hot, dtype=torch.int32),
        stride=size,
    )
    labels = integers(2, size).float()
    if not model.longest_history:
        return BagsBatch(dense, bags, labels)
    ids = integers(model.rows_built, int(lengths.sum()))
    return SequenceBatch(dense, bags, labels, KeyedJaggedTensor(["history"], ids, lengths=lengths, stride=size))
