"""Sizes of a run's samples, on which its work depends and which its configuration does not give."""

import numpy as np
import torch

from dlrm_bench.dlrm.benchmark import SampleSizes
from dlrm_bench.dlrm.config import TrainingConfig
from dlrm_bench.dlrm.data.dataset import Dataset
from dlrm_bench.dlrm.dlrmv4.config import OWN_TOKENS
from dlrm_bench.dlrm.dlrmv4.data.dataset import EventDataset
from dlrm_bench.dlrm.dlrmv4.data.item_maps import ItemMaps
from dlrm_bench.dlrm.dlrmv4.data.packed import CANDIDATE, CONTEXT_ROWS, LABEL, LENGTH, Packed, events_of
from dlrm_bench.dlrm.dlrmv4.work import EVENTS, ITEMS, ROWS, TOKENS, TOKENS_SQUARED

_BATCHES = 32
"""Maximum number of batches to inspect: histories of batches of 1,024 neighbouring samples differ by a fifth."""


def sample_sizes(dataset: Dataset, config: TrainingConfig, world_size: int, iterations: range) -> SampleSizes:
    """Returns means over batches of the first rank, evenly spread over `iterations` of the training, counted from 0."""
    assert isinstance(dataset, EventDataset)
    batches = dataset.train_batches(0, world_size, config.local_batch_size)
    last = min(iterations.stop, len(batches)) - 1
    chosen = np.unique(np.linspace(min(iterations.start, last), last, _BATCHES).round().astype(int))
    found = [_of_batch(batches[int(number)].packed, dataset.maps) for number in chosen]
    return {name: float(np.mean([of[name] for of in found])) for name in found[0]}


def _of_batch(packed: Packed, maps: ItemMaps) -> dict[str, float]:
    table, size = packed.samples, packed.layout.samples
    tokens = (table[LENGTH] + OWN_TOKENS).double()
    named = torch.cat([packed.item[events_of(packed).unique()], table[CANDIDATE]])
    items = named.unique().long().numpy()
    rows = sum(len(np.unique(of)) for of in (items, maps.artist[items], maps.album[items]))
    rows += sum(len(of.unique()) for of in table[CONTEXT_ROWS:LABEL])
    return {
        TOKENS: float(tokens.mean()),
        TOKENS_SQUARED: float((tokens**2).mean()),
        EVENTS: packed.layout.events / size,
        ITEMS: len(items) / size,
        ROWS: rows / size,
    }
