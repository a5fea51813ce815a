"""Batches drawn at random, as a data set of the training loop."""

import math
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


def capacity(model: BagsModel, local_batch_size: int) -> int:
    """Returns the number of ids of the histories in a padded batch.

    It is four standard deviations above the mean of all batches, which 3 of 100,000 batches exceed, or the total of
    longest histories, if smaller.
    """
    lengths = model.longest_history - model.shortest_history + 1
    mean = (model.shortest_history + model.longest_history) / 2
    deviation = math.sqrt((lengths**2 - 1) / 12)
    most = local_batch_size * mean + 4 * deviation * math.sqrt(local_batch_size)
    return min(local_batch_size * model.longest_history, math.ceil(most))


def spare_sequences(model: BagsModel, local_batch_size: int) -> int:
    """Returns the number of sequences of padding in a padded batch, none of which is longer than a history may be."""
    most = capacity(model, local_batch_size) - local_batch_size * model.shortest_history
    return math.ceil(most / model.longest_history) if model.longest_history else 0


def draw_samples(
    model: BagsModel, data: object, seed: int, rank: int, world_size: int, local_batch_size: int
) -> Iterator[BagsBatch]:
    """Yields batches of uniform ids and dense features and coin-flip labels, from seed and rank, the same whether they
    are padded or not. Lengths of histories with more ids than a padded batch holds are drawn again."""
    random = torch.Generator().manual_seed((seed * 1_000_003 + rank) % 2**63)
    full, padded = isinstance(data, SequenceData) and data.full, pads(data)
    while True:
        lengths = _lengths(model, local_batch_size, None if full else random)
        yield _batch(model, local_batch_size, random, lengths, padded)


def zeros(model: BagsModel, data: object, local_batch_size: int) -> BagsBatch:
    """Returns a batch with id 0, dense feature 0 and label 0, and full histories, of half the length if padded."""
    lengths = _lengths(model, local_batch_size, None)
    return _batch(model, local_batch_size, None, lengths // 2 if pads(data) else lengths, pads(data))


def pads(data: object) -> bool:
    """Whether histories of varying lengths are padded to `capacity` ids a batch."""
    return isinstance(data, SequenceData) and data.padded and not data.full


def _lengths(model: BagsModel, size: int, random: torch.Generator | None) -> torch.Tensor:
    """Returns the lengths of the histories, int32 [B]; without a generator, all are the longest."""
    shortest, longest = model.shortest_history, model.longest_history
    if random is None:
        return torch.full((size,), longest, dtype=torch.int32)
    while True:
        lengths = torch.randint(shortest, longest + 1, (size,), generator=random, dtype=torch.int32)
        if lengths.sum() <= capacity(model, size):
            return lengths


def _batch(
    model: BagsModel, size: int, random: torch.Generator | None, lengths: torch.Tensor, padded: bool
) -> BagsBatch:
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
    if padded:
        ids, lengths = _padded(model, ids, lengths)
    history = KeyedJaggedTensor(["history"], ids, lengths=lengths, stride=len(lengths))
    return SequenceBatch(dense, bags, labels, history)


def _padded(model: BagsModel, ids: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns ids int64 [capacity] and lengths int32 [B + spare sequences]: the spare sequences share the padding ids
    evenly, which are spread over all rows, so that no single row gets all of them."""
    spare, more = spare_sequences(model, len(lengths)), capacity(model, len(lengths)) - len(ids)
    shares = [more // spare + (i < more % spare) for i in range(spare)]
    return torch.cat([ids, torch.arange(more) % model.rows_built]), torch.cat([lengths, lengths.new_tensor(shares)])
