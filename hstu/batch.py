"""Batches of an HSTU model: jagged histories, candidates, actions and labels; drawn at random, by seed."""

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


def random_batches(config: HstuConfig, batch_size: int, seed: int, rank: int = 0) -> Iterator[HstuBatch]:
    """Yields batches of this rank without end; equal arguments give equal batches.

    Lengths are drawn uniformly from an interval about config.mean_history that ends at max_history at most, ids as
    rows ** u of a uniform u, so that few rows are named often. A label depends on the candidate's first id, so that
    losses fall.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + rank)
    spread = min(config.max_history - config.mean_history, config.mean_history - 1)

    def ids(rows: int, count: int) -> Tensor:
        drawn = float(rows) ** torch.rand(count, generator=generator, dtype=torch.float64)
        return (drawn.long() - 1).clamp_(0, rows - 1)

    while True:
        low, high = config.mean_history - spread, config.mean_history + spread
        lengths = torch.randint(low, high + 1, (batch_size,), generator=generator, dtype=torch.int32)
        events, candidates = int(lengths.sum()), batch_size * config.candidates
        of_candidates = torch.full_like(lengths, config.candidates)
        keys, values, sizes = [], [], []
        for kind, tables, count, of_kind in (
            (HISTORY, config.of_event(), events, lengths),
            (CANDIDATE, config.of_event(), candidates, of_candidates),
            (USER, config.of_user(), batch_size, torch.ones_like(lengths)),
        ):
            keys += [f"{kind} {table.name}" for table in tables]
            values += [ids(table.rows, count) for table in tables]
            sizes += [of_kind] * len(tables)
        actions = torch.randint(config.actions, (events,), generator=generator)
        item = values[keys.index(f"{CANDIDATE} {config.of_event()[0].name}")]
        labels = (item % 2 == torch.rand(candidates, generator=generator).lt(0.1)).float()
        features = KeyedJaggedTensor(keys, torch.cat(values), lengths=torch.cat(sizes))
        yield HstuBatch(features, actions, labels)
