"""Packed batches in fixed shapes, for iterations in a CUDA graph: unused capacity is padding, and only the device knows
a batch's size.

Ids of B samples with capacity for E distinct events, table by table: for each of item, artist and album, E rows of
events and B rows of candidates; for each context table, B rows. A batch with each distinct item once has I rows of
items instead of E rows of events. Padding names row -1.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dlrm_bench.dlrm.dlrmv4.batch import DenseBatch
from dlrm_bench.dlrm.dlrmv4.config import CONTEXT_TABLES, EVENT_TABLES, OWN_TOKENS, ModelConfig
from dlrm_bench.dlrm.dlrmv4.data.limits import POOLS
from dlrm_bench.dlrm.dlrmv4.data.packed import (
    CANDIDATE,
    CONTEXT_ROWS,
    END,
    LABEL,
    LENGTH,
    QUERY,
    Packed,
    PackedLayout,
)
from dlrm_bench.kernels.input_dist.history_events import history_events

NO_ROW = -1


@dataclass(frozen=True, slots=True)
class IdShape:
    """Room for the ids of a batch."""

    samples: int
    """B."""
    events: int
    """E."""
    items: int | None = None
    """I, where each distinct item is named once."""

    @property
    def of_tables(self) -> tuple[int, ...]:
        """Ids of each table."""
        return (self.layout.named + self.samples,) * len(EVENT_TABLES) + (self.samples,) * len(CONTEXT_TABLES)

    @property
    def size(self) -> int:
        """Ids of all tables, K."""
        return sum(self.of_tables)

    @property
    def layout(self) -> PackedLayout:
        """The layout of the packed batch."""
        return PackedLayout(self.samples, self.events, self.items)


def padded(packed: Packed, layout: PackedLayout, pin: bool) -> Packed:
    """Returns a copy of a packed batch on the host in a layout with room for its entries, its padding excluded; unused
    entries have no item."""
    own = packed.layout
    assert own.samples == layout.samples, "as many samples"
    assert (own.items is None) == (layout.items is None), "items of the same kind"
    out = Packed.empty(layout, tokens=packed.tokens, candidates=packed.candidates, longest=packed.longest, pin=pin)
    out.samples.copy_(packed.samples)
    parts = [
        (out.item, packed.item, NO_ROW),
        (out.timestamp, packed.timestamp, 0),
        (out.action, packed.action, 0),
    ]
    if out.place is not None and packed.place is not None:
        parts.append((out.place, packed.place, 0))
    for to, of, rest in parts:
        both = min(len(to), len(of))
        to[:both].copy_(of[:both])
        to[both:].fill_(rest)
    return out


def on_device(shape: IdShape, device: torch.device) -> Packed:
    """Returns device memory for consecutive batches, without their sizes. It names no row; everything else is zero."""
    storage = torch.zeros(shape.layout.end, dtype=torch.uint8, device=device)
    packed = Packed(storage, shape.layout, tokens=0, candidates=0, longest=0)
    packed.item.fill_(NO_ROW)
    packed.samples[CANDIDATE:LABEL] = NO_ROW
    return packed


def with_no_item(of_items: Tensor) -> Tensor:
    """Returns a map of items with NO_ROW at its end, where item NO_ROW finds it."""
    return torch.cat([of_items, of_items.new_full((1,), NO_ROW)])


def write_ids(packed: Packed, artist: Tensor, album: Tensor, ids: Tensor) -> None:
    """Writes the rows that a padded batch names to `ids`, int32 [K], as IdShape lays them out. artist, album: int32 by
    item, on the device (ItemMaps), from `with_no_item`."""
    table, at = packed.samples, packed.item.long()
    parts = [packed.item, table[CANDIDATE]]
    for of_item, candidate in ((artist, table[CANDIDATE + 1]), (album, table[CANDIDATE + 2])):
        parts += [of_item[at], candidate]
    torch.cat([*parts, table[CONTEXT_ROWS:LABEL].flatten()], out=ids)


def has_factor(config: ModelConfig) -> bool:
    """Whether batches have a factor on attention, whose divisor the host does not know."""
    return config.attention_scale == "longest"


def dense_batch(packed: Packed, tokens: int, config: ModelConfig) -> DenseBatch:
    """Returns the dense network's inputs of a padded batch, with room for `tokens`, those of context and candidates
    included. Launches work without waiting for it."""
    table, size = packed.samples, packed.layout.samples
    lengths, device = table[LENGTH], table.device
    before = torch.zeros(size + 1, dtype=torch.int64, device=device)
    torch.cumsum(lengths, 0, out=before[1:])
    event = torch.empty(tokens - OWN_TOKENS * size, dtype=torch.int32, device=device)
    history_events(table[:POOLS], table[END], before, packed.action >> 1, event)  # bits 1, 2, 4
    factor = None
    if has_factor(config):  # kernels divide attention by the maximum length
        factor = config.max_length / (lengths.max() + OWN_TOKENS)
    return DenseBatch(
        lengths=lengths,
        timestamp=packed.timestamp.index_select(0, event),
        action=packed.action,
        query_timestamp=table[QUERY],
        labels=table[LABEL].float(),
        longest=config.max_length,
        event=event,
        item=packed.place,
        attention_factor=factor,
    )
