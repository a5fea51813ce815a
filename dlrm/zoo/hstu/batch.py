"""Batches of an HSTU model: jagged histories, candidates, actions and labels; drawn at random from a seed."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor
from torchrec import KeyedJaggedTensor

from dlrm_bench.dlrm.data.field_batch import FieldBatch
from dlrm_bench.dlrm.zoo.hstu.config import HstuConfig

HISTORY, CANDIDATE, USER = "history", "candidate", "user"
"""Features are named "<kind> <table>"."""


@dataclass
class HstuBatch(FieldBatch):
    """B samples of E events in all.

    features: int64 ids of all tables, keys "history <table>" (a history's events), "candidate <table>"
    (config.candidates per sample) and "user <table>" (one per sample). actions: int64 [E], the kind of each event.
    labels: fp32 [B * candidates], 1 if the user liked the candidate. lengths: int32 [B], the number of events in each
    sample's history.

    A padded batch has additional sequences, of events that belong to no sample, so that E is one of `capacities`, the
    same on all ranks. Their number is the same in every batch, and none is longer than a history may be: FBGEMM's
    lookup and permutation of sequences use one warp per sequence, so that a single long one takes longer than all
    samples.
    """

    features: KeyedJaggedTensor
    actions: Tensor
    labels: Tensor
    lengths: Tensor


def capacities(config: HstuConfig, batch_size: int) -> list[int]:
    """Returns the possible numbers of events of padded batches, ascending; each batch uses the smallest one that can
    hold every rank's events.

    The largest is four standard deviations above the mean of all batches, or the total of longest histories, if
    smaller. From there they go down in steps of one deviation, or of a sixteenth of the mean, if larger, because each
    needs a graph and its memory, to one deviation below the mean: at most six.
    """
    mean, deviation = batch_size * config.mean_history, 2 * _spread(config) / math.sqrt(12) * math.sqrt(batch_size)
    most = min(batch_size * config.max_history, math.ceil(mean + 4 * deviation))
    step = max(1, math.ceil(max(deviation, mean / 16)))
    return sorted({most, *range(most, max(0, math.floor(mean - deviation)), -step)})


def spare_sequences(config: HstuConfig, batch_size: int) -> int:
    """Returns the number of sequences of a padded batch that belong to no sample."""
    most = capacities(config, batch_size)[-1] - batch_size * (config.mean_history - _spread(config))
    return math.ceil(most / config.max_history)


def batch_ids(config: HstuConfig, batch_size: int) -> list[dict[str, int]]:
    """Returns the number of ids of each feature in padded batches of each capacity, in TrimmedECSharder's format."""
    tables = {HISTORY: config.of_event(), CANDIDATE: config.of_event(), USER: config.of_user()}
    made = []
    for capacity in capacities(config, batch_size):
        per_kind = {HISTORY: capacity, CANDIDATE: batch_size * config.candidates, USER: batch_size}
        made.append({f"{kind} {table.name}": per_kind[kind] for kind in tables for table in tables[kind]})
    return made


def random_batches(
    config: HstuConfig, batch_size: int, seed: int, rank: int = 0, padded: bool = False, ranks: int = 1
) -> Iterator[HstuBatch]:
    """Yields this rank's batches without end; equal arguments give equal batches, padded or not. ranks: number of ranks
    that pad their batches to one capacity; each rank draws the lengths of all of them.

    Lengths are uniform in an interval around config.mean_history that ends at max_history at most, and redrawn if a
    batch has more events than any capacity; ids are rows ** u for a uniform u, so that few rows are frequent. A label
    depends on the candidate's first id, so that losses can fall.
    """
    generator, room = torch.Generator().manual_seed((seed * 1_000_003 + rank) % 2**63), 0
    lengths_of = [_lengths(config, batch_size, seed, one) for one in range(max(ranks, rank + 1))]
    spare = spare_sequences(config, batch_size) if padded else 0
    for of_ranks in zip(*lengths_of, strict=True):
        lengths = of_ranks[rank]
        events = int(lengths.sum())
        if padded:
            room = _capacity(config, batch_size, of_ranks) - events
        candidates = batch_size * config.candidates
        keys, values, sizes = [], [], []
        for kind, tables, count, of_kind, more in (
            (HISTORY, config.of_event(), events, lengths, room),
            (CANDIDATE, config.of_event(), candidates, torch.full_like(lengths, config.candidates), 0),
            (USER, config.of_user(), batch_size, torch.ones_like(lengths), 0),
        ):
            keys += [f"{kind} {table.name}" for table in tables]
            values += [_ids(generator, table.rows, count, more) for table in tables]
            shares = [more // spare + (i < more % spare) for i in range(spare)]
            sizes += [torch.cat([of_kind, of_kind.new_tensor(shares)])] * len(tables)
        actions = torch.randint(config.actions, (events,), generator=generator)
        actions = torch.cat([actions, actions.new_zeros(room)])
        item = values[keys.index(f"{CANDIDATE} {config.of_event()[0].name}")]
        labels = (item % 2 == torch.rand(candidates, generator=generator).lt(0.1)).float()
        features = KeyedJaggedTensor(keys, torch.cat(values), lengths=torch.cat(sizes))
        yield HstuBatch(features, actions, labels, lengths)


def most_events(config: HstuConfig, batch_size: int, seed: int, ranks: int, padded: bool, batches: int) -> int:
    """Returns the largest number of events, padding included, that all ranks together have in one of the first
    `batches` batches of random_batches."""
    lengths_of = (_lengths(config, batch_size, seed, rank) for rank in range(ranks))
    return max(
        ranks * _capacity(config, batch_size, of_ranks) if padded else sum(int(of_rank.sum()) for of_rank in of_ranks)
        for of_ranks in islice(zip(*lengths_of, strict=True), batches)
    )


def _capacity(config: HstuConfig, batch_size: int, of_ranks: tuple[Tensor, ...]) -> int:
    """Returns the number of events of a padded batch, from the lengths of every rank's histories."""
    most = max(int(of_rank.sum()) for of_rank in of_ranks)
    return next(capacity for capacity in capacities(config, batch_size) if capacity >= most)


def _lengths(config: HstuConfig, batch_size: int, seed: int, rank: int) -> Iterator[Tensor]:
    """Yields the lengths of the histories of a rank's batches, int32 [B]."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + 500_000 + rank) % 2**63)
    low, high = config.mean_history - _spread(config), config.mean_history + _spread(config)
    while True:
        lengths = torch.randint(low, high + 1, (batch_size,), generator=generator, dtype=torch.int32)
        if lengths.sum() <= capacities(config, batch_size)[-1]:
            yield lengths


def _spread(config: HstuConfig) -> int:
    """Returns the largest difference of lengths from their mean."""
    return min(config.max_history - config.mean_history, config.mean_history - 1)


def _ids(generator: torch.Generator, rows: int, count: int, more: int) -> Tensor:
    """Returns `count` random ids, and `more` padding ids spread over all rows, so that no single row gets all of
    them."""
    drawn = float(rows) ** torch.rand(count, generator=generator, dtype=torch.float64)
    return torch.cat([(drawn.long() - 1).clamp_(0, rows - 1), torch.arange(more) % rows])
