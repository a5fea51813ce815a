"""The packed form of a batch for transfer to the device: each distinct event once, and the range of each history.

Neighbouring anchors of a user share nearly all of their histories. The events of one user that a batch needs, in order
of time, form a segment; all segments are concatenated. A sample's history consists of the events of its segment before
`end` and from the first event of their own pool, `first`, on: three pools in one order of time need four numbers per
sample. The reference sends whole histories as eight-byte numbers: 216 MB for 1,024 samples. With generated users dealt
among eight ranks by stride, packed batches take 1.8 MB in windows 60 to 75 (2.2 at most), 3.5 in windows 280 to 298
(4.1), and 6.8 (7.0) in the last window, an hour in which each user has few anchors: above 6 MB in evaluations alone.
Four ranks have about half of that, two 0.3 and one 0.15 of it; dealt by user (--data.deal users) no batch has more than
1.7 MB.

A batch may contain each distinct item once (`by_items`), because its events, of one user and of many, repeat items:
each event then has the index of its item.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dlrm_bench.dlrm.data.batch import ALIGNMENT
from dlrm_bench.dlrm.dlrmv4.data.limits import CONTEXT, POOLS
from dlrm_bench.dlrm.dlrmv4.samples import Samples

FIRST, END, LENGTH, QUERY, CANDIDATE, CONTEXT_ROWS, LABEL, SAMPLE_ROWS = 0, 3, 4, 5, 6, 9, 17, 18
"""Rows of Packed.samples: three of FIRST, three of CANDIDATE (item, artist, album), eight of context."""
assert FIRST + POOLS == END
assert CONTEXT_ROWS + CONTEXT == LABEL


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """The offsets of a packed batch's parts in its buffer."""

    samples: int
    """B."""
    events: int
    """Distinct events, E."""
    items: int | None = None
    """Distinct items, I, where each is named once; None where each event names its own."""

    @property
    def named(self) -> int:
        """Items that are named: I or E."""
        return self.events if self.items is None else self.items

    @property
    def item_start(self) -> int:
        """Byte position of the items; the table of samples comes before."""
        return _aligned(self.samples * SAMPLE_ROWS * 4)

    @property
    def timestamp_start(self) -> int:
        """Byte position of the events' times."""
        return _aligned(self.item_start + 4 * self.named)

    @property
    def action_start(self) -> int:
        """Byte position of the events' action bits."""
        return _aligned(self.timestamp_start + 4 * self.events)

    @property
    def place_start(self) -> int:
        """Byte position of the events' places among distinct items, where each of these is named once."""
        return _aligned(self.action_start + self.events)

    @property
    def end(self) -> int:
        """Size in bytes."""
        return self.action_start + self.events if self.items is None else self.place_start + 4 * self.events


@dataclass(eq=False, slots=True)
class Packed:
    """B samples with E distinct events, in one buffer, on the host or on the device."""

    storage: Tensor
    """uint8 [layout.end], the one buffer of which all others are views."""
    layout: PackedLayout
    tokens: int
    """Events of all histories together, T."""
    candidates: int
    """Events of all samples from the first event of any pool to `end`: T, plus events that their pool has dropped."""
    longest: int
    """Events of the longest history."""

    @classmethod
    def empty(cls, layout: PackedLayout, *, tokens: int, candidates: int, longest: int, pin: bool) -> "Packed":
        """Uninitialised host memory; `pin` as of Batch.of_layout: it may be dropped once its copy is enqueued."""
        storage = torch.empty(layout.end, dtype=torch.uint8, pin_memory=pin)
        return cls(storage, layout, tokens, candidates, longest)

    def to(self, device: torch.device) -> "Packed":
        """Returns a copy on the device: one transfer, which does not wait where the memory is pinned."""
        storage = self.storage.to(device, non_blocking=True)
        return Packed(storage, self.layout, self.tokens, self.candidates, self.longest)

    @property
    def samples(self) -> Tensor:
        """int32 [SAMPLE_ROWS, B]."""
        table = self.storage[: self.layout.samples * SAMPLE_ROWS * 4].view(torch.int32)
        return table.view(SAMPLE_ROWS, self.layout.samples)

    @property
    def item(self) -> Tensor:
        """int32 [E] of the events, or [I] of distinct ones."""
        start = self.layout.item_start
        return self.storage[start : start + 4 * self.layout.named].view(torch.int32)

    @property
    def timestamp(self) -> Tensor:
        """int32 [E], seconds."""
        start = self.layout.timestamp_start
        return self.storage[start : start + 4 * self.layout.events].view(torch.int32)

    @property
    def action(self) -> Tensor:
        """uint8 [E], one of the bits 1, 2, 4."""
        start = self.layout.action_start
        return self.storage[start : start + self.layout.events]

    @property
    def place(self) -> Tensor | None:
        """int32 [E], which of the distinct items each event has; None where `item` is of the events."""
        if self.layout.items is None:
            return None
        return self.storage[self.layout.place_start : self.layout.end].view(torch.int32)


def by_items(packed: Packed, pin: bool) -> Packed:
    """Returns a copy of a batch on the host that names each distinct item of its events once, in ascending order.

    Sorts E numbers. pin: page-locked."""
    item, place = packed.item.unique(return_inverse=True)
    layout = PackedLayout(packed.layout.samples, packed.layout.events, len(item))
    out = Packed.empty(layout, tokens=packed.tokens, candidates=packed.candidates, longest=packed.longest, pin=pin)
    assert out.place is not None, "of distinct items"
    for part, of in (
        (out.samples, packed.samples),
        (out.item, item),
        (out.timestamp, packed.timestamp),
        (out.action, packed.action),
        (out.place, place),
    ):
        part.copy_(of)
    return out


def events_of(packed: Packed) -> Tensor:
    """Returns the distinct event of each event of the histories, int64 [T], on the buffer's device, without waiting for
    the device.

    A plain PyTorch version with 8-byte temporaries for each of packed.candidates; a kernel needs no temporaries.
    """
    table, device = packed.samples, packed.storage.device
    first, end = table[FIRST:END].long(), table[END].long()
    start = first.amin(dim=0)
    span = end - start
    sample = torch.repeat_interleave(span, output_size=packed.candidates)
    before = torch.cumsum(span, 0) - span
    event = torch.arange(packed.candidates, device=device) + (start - before)[sample]
    pool = (packed.action >> 1).long()[event]  # bits 1, 2, 4
    held = event >= first[pool, sample]
    place = torch.where(held, torch.cumsum(held, 0) - 1, packed.tokens)
    kept = torch.empty(packed.tokens + 1, dtype=torch.int64, device=device)
    return kept.scatter_(0, place, event)[:-1]


def expand(packed: Packed, artist: Tensor, album: Tensor) -> Samples:
    """The samples, on the device of the buffer, without a wait for it. artist, album: int32 by item, on that device
    (ItemMaps)."""
    assert packed.layout.items is None, "a batch whose events name their items"
    table, kept = packed.samples, events_of(packed)
    item = packed.item[kept]
    return Samples(
        lengths=table[LENGTH],
        item=item,
        artist=artist[item],
        album=album[item],
        timestamp=packed.timestamp[kept],
        action=packed.action[kept],
        candidate_item=table[CANDIDATE],
        candidate_artist=table[CANDIDATE + 1],
        candidate_album=table[CANDIDATE + 2],
        query_timestamp=table[QUERY],
        context=table[CONTEXT_ROWS:LABEL],
        labels=table[LABEL].float(),
    )


def _aligned(position: int) -> int:
    return -(-position // ALIGNMENT) * ALIGNMENT
