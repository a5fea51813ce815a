"""Batches of an HSTU model: jagged histories, candidates, actions and labels; drawn at random, by seed."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torchrec import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from dlrm_bench.hstu.config import HstuConfig

HISTORY, CANDIDATE, USER = "history", "candidate", "user"
"""Features are named "<kind> <table>"."""


@dataclass
class HstuBatch(Pipelineable):
    """B samples of E events in all.

    features: int64 ids of all tables, keys "history <table>" (a history's events), "candidate <table>"
    (config.candidates a sample) and "user <table>" (one a sample). actions: int64 [E], the kind of each event. labels:
    fp32 [B * candidates], 1 where the user liked the candidate.

    A padded batch has more sequences, of events that belong to no sample, so that E is the same for all batches. They
    are as many in every batch, and none is longer than a history may be: FBGEMM's lookup and permutation of sequences
    have one warp for each of them, so that a single long one takes longer than all samples.
    """

    features: KeyedJaggedTensor
    actions: Tensor
    labels: Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> "HstuBatch":
        return HstuBatch(
            self.features.to(device, non_blocking),
            self.actions.to(device, non_blocking=non_blocking),
            self.labels.to(device, non_blocking=non_blocking),
        )

    def record_stream(self, stream: torch.Stream) -> None:
        self.features.record_stream(stream)
        for tensor in (self.actions, self.labels):
            tensor.record_stream(stream)

    def pin_memory(self) -> "HstuBatch":
        return HstuBatch(self.features.pin_memory(), self.actions.pin_memory(), self.labels.pin_memory())


def capacity(config: HstuConfig, batch_size: int) -> int:
    """Returns the events of a padded batch: four standard deviations more than the mean of all batches, or as many as
    the longest histories have, if that is less."""
    deviation = 2 * _spread(config) / math.sqrt(12) * math.sqrt(batch_size)
    return min(batch_size * config.max_history, math.ceil(batch_size * config.mean_history + 4 * deviation))


def spare_sequences(config: HstuConfig, batch_size: int) -> int:
    """Returns how many sequences of a padded batch belong to no sample."""
    most = capacity(config, batch_size) - batch_size * (config.mean_history - _spread(config))
    return math.ceil(most / config.max_history)


def batch_ids(config: HstuConfig, batch_size: int) -> dict[str, int]:
    """Returns the number of ids of each feature in a padded batch, as TrimmedECSharder takes it."""
    per_kind = {HISTORY: capacity(config, batch_size), CANDIDATE: batch_size * config.candidates, USER: batch_size}
    tables = {HISTORY: config.of_event(), CANDIDATE: config.of_event(), USER: config.of_user()}
    return {f"{kind} {table.name}": per_kind[kind] for kind in tables for table in tables[kind]}


def random_batches(
    config: HstuConfig, batch_size: int, seed: int, rank: int = 0, padded: bool = False
) -> Iterator[HstuBatch]:
    """Yields batches of this rank without end; equal arguments give equal batches, padded or not.

    Lengths are drawn uniformly from an interval about config.mean_history that ends at max_history at most, again
    where a batch has more events than its capacity; ids as rows ** u of a uniform u, so that few rows are named often.
    A label depends on the candidate's first id, so that losses fall.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + rank)
    low, high, room = config.mean_history - _spread(config), config.mean_history + _spread(config), 0
    spare = spare_sequences(config, batch_size) if padded else 0
    while True:
        lengths = torch.randint(low, high + 1, (batch_size,), generator=generator, dtype=torch.int32)
        events = int(lengths.sum())
        if events > capacity(config, batch_size):
            continue
        if padded:
            room = capacity(config, batch_size) - events
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
        yield HstuBatch(features, actions, labels)


def _spread(config: HstuConfig) -> int:
    """Returns how far lengths lie from their mean at most."""
    return min(config.max_history - config.mean_history, config.mean_history - 1)


def _ids(generator: torch.Generator, rows: int, count: int, more: int) -> Tensor:
    """Returns `count` ids and `more` for events of no sample, which name as many rows as there are, for no row to be
    named by all."""
    drawn = float(rows) ** torch.rand(count, generator=generator, dtype=torch.float64)
    return torch.cat([(drawn.long() - 1).clamp_(0, rows - 1), torch.arange(more) % rows])
