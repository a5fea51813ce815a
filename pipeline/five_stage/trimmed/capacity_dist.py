"""The input dist of row-wise and table-row-wise tables with a fixed capacity for ids: nothing reads the device.

The number of ids for each owner depends on the ids. So each rank sends each owner of rows one message of a fixed size:
for each feature the lengths of its bags, and capacity for the ids that nearly all batches have for that owner
(capacity.py). Unused capacity is spread over the bags as ids of weight zero, with rows spread over the owner's: they
add zero to the pooled vectors, and change no row under the optimizers in owned_rows.IGNORE_ZEROS. Other optimizers,
such as Adam, change a row whose gradient is zero; for these, unused places name rows that the batch names anyway
(`named_only`), and add zero to their gradients. A batch is not distributed completely if it has more ids, or, with
`named_only`, no id of a feature for some owner: if ids are spread evenly, and all ranks together have n, about ranks *
exp(-n / ranks) of batches. Then `overflow` is 1, on all ranks, because each rank tells every other one in its message.

A message is int32: [lengths of features' bags | rows, -1 if unused | weights, if ids have them | told], and `told` is
the same for all ranks: [overflow | ids of each feature for each of its owners, if `named_only`].
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torchrec import KeyedJaggedTensor
from torchrec.distributed.sharding.twrw_sharding import BaseTwRwEmbeddingSharding

from ..batch_fields import leaves
from .batch_size_cache import BatchSizeCache
from .capacity import OVERFLOWS, capacity
from .named_rows import NamedRows
from .static_dist import AllToAll, RankGroup, Sizes, blocks_of, gather, positions

_BEYOND = 2**31 - 1
"""The row of ids beyond all rows: FBGEMM's bounds check finds it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowGroup:
    """The features of one sharding type whose tables' rows are split evenly between `parts` consecutive ranks."""

    index: int
    """Index among the EBC's sharding types."""
    features: list[str]
    hash_sizes: list[int]
    """Rows of each feature's table."""
    first_ranks: list[int]
    """The rank with each table's first rows."""
    parts: int
    batch_order: list[int]
    """The ranks in the order of their batches in the lookup."""
    offset_type: torch.dtype
    named_only: bool
    """Whether unused places may only name rows that the batch names anyway."""

    def block(self, feature: int) -> int:
        """Returns the number of rows of a part; the last part may have fewer."""
        return -(-self.hash_sizes[feature] // self.parts)

    def part(self, feature: int, rank: int) -> int | None:
        """Returns the part of a feature's table on a rank; None if there is none."""
        part = rank - self.first_ranks[feature]
        return part if 0 <= part < self.parts else None


def row_tables(sharding: Any) -> list[Any]:
    """Returns the tables of TorchRec's sharding by rows, over all ranks or within single nodes, in order."""
    return [table for _, of in _configs(sharding) for table in of.embedding_tables]


def _configs(sharding: Any) -> list[tuple[int, Any]]:
    """Returns the grouped configurations, each with the first rank that has its tables."""
    if not isinstance(sharding, BaseTwRwEmbeddingSharding):
        return [(0, of) for of in sharding._grouped_embedding_configs]
    nodes = enumerate(sharding._grouped_embedding_configs_per_node)
    return [(node * sharding._local_size, of) for node, of_node in nodes for of in of_node]


def row_group(index: int, sharding: Any, ranks: int, offset_type: torch.dtype, named_only: bool) -> RowGroup:
    """Returns the RowGroup of TorchRec's sharding by rows."""
    parts = sharding._local_size if isinstance(sharding, BaseTwRwEmbeddingSharding) else ranks
    tables = [(first, table) for first, of in _configs(sharding) for table in of.embedding_tables]
    return RowGroup(
        index=index,
        features=[name for _, table in tables for name in table.feature_names],
        hash_sizes=[table.num_embeddings for _, table in tables for _ in table.feature_names],
        first_ranks=[first for first, table in tables for _ in table.feature_names],
        parts=parts,
        # Ranks at the same position in their nodes are adjacent: TorchRec's reduce-scatter within a node sums for them.
        batch_order=[node * parts + local for local in range(parts) for node in range(ranks // parts)],
        offset_type=offset_type,
        named_only=named_only,
    )


@dataclass(frozen=True, slots=True)
class _Message:
    """Layout of the messages to one rank, the same from all ranks."""

    features: list[tuple[int, int]]
    """Group and feature, in lookup order."""
    lengths: dict[tuple[int, int], int]
    """Offset of each feature's lengths."""
    rows: dict[tuple[int, int], int]
    weights: int
    """Distance from a row to its weight."""
    size: int

    @staticmethod
    def to(
        rank: int, groups: Sequence[RowGroup], rooms: Sequence[Sequence[int]], stride: int, weighted: bool
    ) -> "_Message":
        """Returns the layout of messages to `rank`. rooms: capacities of each group's features."""
        told = _told(groups)
        own = [
            (g, f)
            for g, group in enumerate(groups)
            for f in range(len(group.features))
            if group.part(f, rank) is not None
        ]
        lengths = dict(zip(own, accumulate((stride for _ in own), initial=0), strict=False))
        *firsts, end = accumulate((rooms[g][f] for g, f in own), initial=stride * len(own))
        weights = end - stride * len(own)
        return _Message(own, lengths, dict(zip(own, firsts, strict=True)), weights, end + weights * weighted + told)


@dataclass(frozen=True, slots=True)
class _Source:
    """Tensors for writing a rank's messages, for one group and batch size; by part and feature, [regions]."""

    kept_index: Tensor | None
    lengths: Tensor
    """Lengths of the bags, [features * stride]."""
    blocks: Tensor
    rooms: Tensor
    rows_at: Tensor
    """Offset of each region in the messages."""
    weights_at: Tensor
    """Distance from a region's rows to its weights."""
    lengths_at: Tensor
    """Offsets for the lengths of its bags, [regions * stride]."""
    places: Tensor
    """0 .. ids - 1."""
    shares: Tensor
    """0 .. stride."""


@dataclass(frozen=True, slots=True)
class _Own:
    """This rank's lookups, for one group and batch size."""

    index: int
    keys: list[str]
    stride: int
    length_per_key: list[int]
    offset_per_key: list[int]
    filler: Tensor | NamedRows
    """The rows that unused places name, int32 [ids], or NamedRows if they must be rows of the batch."""
    offset_type: torch.dtype


@dataclass(frozen=True, slots=True)
class _Layout:
    empty: Tensor
    """Messages without ids, by rank; and a place for dropped ids."""
    told_at: Tensor
    """Offsets of the told numbers for each rank, [ranks, told]."""
    send_splits: list[int]
    receive_splits: list[int]
    sources: list[_Source]
    own: list[_Own]
    receive_index: Tensor
    """Index of each group's lengths, then rows, then weights if there are any; then of the told numbers of all
    ranks."""
    received: list[int]
    """The sizes of these parts."""


class CapacityDist:
    """The input dist of groups of tables split by rows, all of whose features have declared sizes."""

    def __init__(
        self, groups: Sequence[RowGroup], keys: Sequence[str], sizes: Sizes, rank_group: RankGroup, headroom: float
    ) -> None:
        """keys: of the input, in order, all declared. headroom: ratio of the ids for one owner to uniformly drawn ids;
        for independent ids with that share, an overflow is as rare as OVERFLOWS."""
        self.groups = list(groups)
        self._keys, self._sizes, self._rank_group, self._headroom = list(keys), sizes, rank_group, headroom
        self._layouts = BatchSizeCache[_Layout]()

    def rooms(self, stride: int) -> list[list[int]]:
        """Returns the number of ids of each group's features that a rank may send to each owner."""
        pairs = self._rank_group.world_size * sum(len(group.features) * group.parts for group in self.groups)
        return [
            [
                capacity(
                    self._sizes.ids(name, stride),
                    min(1.0, self._headroom * group.block(f) / group.hash_sizes[f]),
                    OVERFLOWS / max(pairs, 1),
                )
                for f, name in enumerate(group.features)
            ]
            for group in self.groups
        ]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors for all sizes of batches so far."""
        return sum(leaf.nbytes for leaf in leaves(self._layouts.values()) if isinstance(leaf, Tensor))

    def start(self, features: KeyedJaggedTensor) -> "CapacityInFlight":
        """Starts the distribution of one batch, whose lengths are trusted."""
        weighted, dtype = _weights(features) is not None, features.values().dtype
        make = partial(self._lay_out, features.stride(), weighted, dtype)
        size = (features.stride(), weighted, dtype)
        layout = self._layouts.get(size, self._rank_group.device, make, None)
        return CapacityInFlight(self, layout, features)

    def messages(self, layout: _Layout, features: KeyedJaggedTensor) -> Tensor:
        """Returns the messages of a batch to all ranks, int32."""
        wire, overflows, named = layout.empty.clone(), [], []
        for group, source in zip(self.groups, layout.sources, strict=True):
            weights = _weights(features)
            lengths, rows, weights, _, _ = torch.ops.fbgemm.block_bucketize_sparse_features(
                source.lengths,
                gather(features.values(), source.kept_index),
                False,
                False,
                source.blocks,
                group.parts,
                weights=None if weights is None else gather(weights.float(), source.kept_index),
            )
            stride = len(source.shares) - 1
            ends = torch.ops.fbgemm.asynchronous_complete_cumsum(lengths.to(torch.int64))
            starts = ends[::stride]
            unused = source.rooms - starts.diff()
            overflows.append((unused < 0).any())
            if group.named_only:
                named.append(starts.diff().to(torch.int32))
            before = unused.clamp(min=0).unsqueeze(1) * source.shares // stride  # unused places before each bag
            wire[source.lengths_at] = (lengths + before.diff(dim=1).view(-1)).to(torch.int32)
            bag = torch.searchsorted(ends, source.places, right=True) - 1
            region = bag // stride
            within = source.places - starts[region]
            at = source.rows_at[region] + within + before.view(-1)[bag + region]
            fits, nowhere = within < source.rooms[region], len(wire) - 1
            rows = rows.masked_fill((rows < 0) | (rows > _BEYOND), _BEYOND)
            wire.scatter_(0, torch.where(fits, at, nowhere), rows.to(torch.int32))
            if weights is not None:
                at = at + source.weights_at[region]
                wire.scatter_(0, torch.where(fits, at, nowhere), weights.view(torch.int32))
        overflow = torch.stack(overflows).any().to(torch.int32)
        wire[layout.told_at] = torch.cat([overflow.unsqueeze(0), *named])
        return wire[:-1]

    def exchange(self, messages: Tensor, layout: _Layout) -> AllToAll:
        """Starts the all-to-all."""
        return AllToAll.start(messages, layout.send_splits, layout.receive_splits, self._rank_group)

    def _lay_out(self, stride: int, weighted: bool, dtype: torch.dtype) -> _Layout:
        rank_group, rooms = self._rank_group, self.rooms(stride)
        ranks, device = range(rank_group.world_size), rank_group.device
        to = [_Message.to(rank, self.groups, rooms, stride, weighted) for rank in ranks]
        starts = list(accumulate((message.size for message in to), initial=0))
        empty = torch.zeros(starts[-1] + 1, dtype=torch.int32)
        for start, message in zip(starts, to, strict=False):
            first = start + stride * len(message.features)
            empty[first : first + message.weights] = -1
        mine = to[rank_group.rank]
        own, index, told = [], list[Tensor](), torch.arange(-_told(self.groups), 0)
        for g in range(len(self.groups)):
            of_group, at = self._own(g, mine, rooms[g], stride, weighted)
            own.append(of_group)
            index += at
        index.append(torch.cat([(rank + 1) * mine.size + told for rank in ranks]))
        return _Layout(
            empty=empty.to(device),
            told_at=torch.stack([start + told for start in starts[1:]]).to(device),
            send_splits=[message.size for message in to],
            receive_splits=[mine.size for _ in ranks],
            sources=[self._source(g, to, starts, rooms[g], stride, dtype) for g in range(len(self.groups))],
            own=own,
            receive_index=torch.cat(index).to(device),
            received=[len(part) for part in index],
        )

    def _source(
        self, g: int, to: Sequence[_Message], starts: Sequence[int], rooms: Sequence[int], stride: int, dtype: Any
    ) -> _Source:
        group, device = self.groups[g], self._rank_group.device
        ids = partial(self._sizes.ids, stride=stride)
        regions = [(group.first_ranks[f] + part, f) for part in range(group.parts) for f in range(len(group.features))]
        lengths_at = torch.tensor([starts[rank] + to[rank].lengths[g, f] for rank, f in regions])
        per_bag = torch.tensor([self._sizes.per_bag[name] for name in group.features])
        return _Source(
            kept_index=positions(*blocks_of(group.features, self._keys, ids), device),
            lengths=per_bag.repeat_interleave(stride).to(device),
            blocks=torch.tensor([group.block(f) for f in range(len(group.features))], dtype=dtype, device=device),
            rooms=torch.tensor([rooms[f] for _, f in regions], device=device),
            rows_at=torch.tensor([starts[rank] + to[rank].rows[g, f] for rank, f in regions], device=device),
            weights_at=torch.tensor([to[rank].weights for rank, _ in regions], device=device),
            lengths_at=(lengths_at.unsqueeze(1) + torch.arange(stride)).view(-1).to(device),
            places=torch.arange(int(per_bag.sum()) * stride, device=device),
            shares=torch.arange(stride + 1, device=device),
        )

    def _own(
        self, g: int, mine: _Message, rooms: Sequence[int], stride: int, weighted: bool
    ) -> tuple[_Own, list[Tensor]]:
        """Returns the lookups, and the positions of the group's lengths, rows and weights in what this rank
        receives."""
        group, rank_group = self.groups[g], self._rank_group
        from_ranks = torch.tensor(group.batch_order).unsqueeze(1) * mine.size
        features = [f for of, f in mine.features if of == g]
        lengths = [from_ranks + mine.lengths[g, f] + torch.arange(stride) for f in features]
        rows = [from_ranks + mine.rows[g, f] + torch.arange(rooms[f]) for f in features]
        filler, length_per_key = (
            [torch.zeros(0, dtype=torch.int64)],
            [len(group.batch_order) * rooms[f] for f in features],
        )
        for f, count in zip(features, length_per_key, strict=True):
            part = group.part(f, rank_group.rank)
            assert part is not None, "one of this rank's"
            filler.append(torch.arange(count) % min(group.block(f), group.hash_sizes[f] - part * group.block(f)))
        own = _Own(
            index=group.index,
            keys=[group.features[f] for f in features],
            stride=len(group.batch_order) * stride,
            length_per_key=length_per_key,
            offset_per_key=list(accumulate(length_per_key, initial=0)),
            filler=NamedRows.of(length_per_key, rank_group.device)
            if group.named_only
            else torch.cat(filler).to(rank_group.device, torch.int32),
            offset_type=group.offset_type,
        )
        weights = [at + mine.weights for at in rows] if weighted else []
        return own, [_flat(of) for of in ((lengths, rows, weights) if weighted else (lengths, rows))]


class CapacityInFlight:
    """The input dist of one batch; see static_dist.InFlight."""

    overflow: Tensor
    """1 if some rank exceeded its capacity, or named no row that unused places need, else 0; int32, the same on all
    ranks; set by `finish`."""

    def __init__(self, dist: CapacityDist, layout: _Layout, features: KeyedJaggedTensor) -> None:
        self._dist, self._layout = dist, layout
        self._features: KeyedJaggedTensor | None = features
        self._ids, self._weighted = features.values().dtype, _weights(features) is not None
        self._result: dict[int, KeyedJaggedTensor] = {}

    def launch(self) -> None:
        """Starts the all-to-all of messages."""
        if self._features is not None:
            self._all_to_all = self._dist.exchange(self._dist.messages(self._layout, self._features), self._layout)
            self._features = None

    def finish(self) -> dict[int, KeyedJaggedTensor]:
        """Makes the current stream wait for the all-to-all; returns the KJT of each group, by the group's index."""
        self.launch()
        if not self._result:
            received = self._all_to_all.wait().index_select(0, self._layout.receive_index)
            *parts, told = received.split(self._layout.received)
            each = iter(parts)
            for own in self._layout.own:
                self._result[own.index] = self._kjt(own, next(each), next(each), next(each) if self._weighted else None)
            overflow, named = told.view(len(self._layout.told_at), -1).split([1, self._layout.told_at.shape[1] - 1], 1)
            unnamed = (named.sum(0) == 0).any().to(torch.int32)
            self.overflow = torch.maximum(overflow.max(), unnamed)
        return self._result

    def _kjt(self, own: _Own, lengths: Tensor, rows: Tensor, weights: Tensor | None) -> KeyedJaggedTensor:
        """Returns a complete KJT: neither its lookup nor `sync` has to read the device."""
        used, filler = rows >= 0, own.filler
        values = filler.fill(rows) if isinstance(filler, NamedRows) else torch.where(used, rows, filler)
        return KeyedJaggedTensor(
            keys=own.keys,
            values=values.to(self._ids),
            weights=used.to(torch.float32) if weights is None else weights.view(torch.float32),
            lengths=lengths,
            offsets=torch.ops.fbgemm.asynchronous_complete_cumsum(lengths.to(own.offset_type)),
            stride=own.stride,
            length_per_key=own.length_per_key,
            offset_per_key=own.offset_per_key,
        )


def _weights(features: KeyedJaggedTensor) -> Tensor | None:
    """Returns the weights, unless they are integers, which TorchRec's kernels take for none."""
    weights = features.weights_or_none()
    return weights if weights is not None and weights.is_floating_point() else None


def _told(groups: Sequence[RowGroup]) -> int:
    """Returns the number of numbers that a rank tells each other rank."""
    return 1 + sum(group.parts * len(group.features) for group in groups if group.named_only)


def _flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([torch.zeros(0, dtype=torch.int64), *(of.reshape(-1) for of in tensors)])
