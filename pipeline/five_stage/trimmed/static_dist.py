"""TorchRec's input dist without exchanges of sizes, for features whose multi-hot sizes were declared.

An input dist converts the KJT of the local batch to one KJT per sharding type, each with the bags of the global batch
that this rank looks up. StaticDist is for groups of features of declared sizes; dynamic_dist.py is for all others.

Ranks exchange over one process group, with collectives in the order of the calls. A dist's methods and both of its
waits belong on one stream, which orders the reuse of all memory; a reader on another stream waits for an event
recorded after the second wait, and keeps the KJTs until an event of its own.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec import KeyedJaggedTensor
from torchrec.distributed.types import Awaitable

from ..cuda_graph import GraphedFunction
from .batch_size_cache import BatchSizeCache
from .owned_rows import OwnedRows, owned_rows
from .packed_ids import IdFormat

_LOOKED_UP_AT_ONCE = 16
"""Maximum ids per bag in unpooled lookups: a warp of FBGEMM's kernel looks up one bag, id after id."""
_INT32_ELEMENTS = 1 << 31
"""Number of elements from which TorchRec's backward of unpooled vectors overflows int32: it multiplies lengths by the
width and sums them in the lengths' own type, and FBGEMM's permutation then reads out of bounds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The features of one sharding type of an EBC, in lookup order; once for each shard that reads them."""

    index: int
    """Index among the EBC's sharding types."""
    features: list[list[str]]
    """Names of each rank's features."""
    exchanged: bool
    """False if every rank looks up its own batch: data-parallel tables."""
    hash_sizes: list[int] | None = None
    """Rows of each feature's table if tables are split by rows, evenly; all ranks then have all features."""
    offset_type: torch.dtype = torch.int64
    """The dtype of offsets for the lookup."""
    width: int = 1
    """Elements of an id's vector, if vectors are returned unpooled."""


@dataclass(slots=True, kw_only=True)
class RankGroup:
    """The ranks that exchange, from the point of view of one of them."""

    group: dist.ProcessGroup
    rank: int
    world_size: int
    device: torch.device
    start: "Callable[[Tensor, list[int], list[int]], AllToAll] | None" = None
    """Starts all-to-alls of values in place of the group's collectives, unless it is None; as AllToAll.start."""


class InFlight(Protocol):
    """The input dist of one batch. Each method does its work once, however often it is called."""

    def launch(self) -> None:
        """Starts the values' all-to-all."""

    def finish(self) -> dict[int, KeyedJaggedTensor]:
        """Makes the current stream wait for the all-to-all; returns the KJT of each group, by the group's index."""


class FirstWait(Awaitable[Awaitable[KeyedJaggedTensor]]):
    """The first wait of one group: launches the exchange of all groups; waiting for its result finishes that."""

    def __init__(self, in_flight: InFlight, index: int) -> None:
        super().__init__()
        self._in_flight, self._index = in_flight, index

    def _wait_impl(self) -> "_SecondWait":
        self._in_flight.launch()
        return _SecondWait(self._in_flight, self._index)


class _SecondWait(Awaitable[KeyedJaggedTensor]):
    def __init__(self, in_flight: InFlight, index: int) -> None:
        super().__init__()
        self._in_flight, self._index = in_flight, index

    def _wait_impl(self) -> KeyedJaggedTensor:
        return self._in_flight.finish()[self._index]


@dataclass(slots=True)
class AllToAll:
    """One asynchronous all-to-all of values; keeps the memory that it reads and writes alive."""

    sent: Tensor
    received: Tensor
    work: Any

    @staticmethod
    def start(sent: Tensor, send_splits: list[int], receive_splits: list[int], rank_group: RankGroup) -> "AllToAll":
        """Starts it. Splits: number of rows for and from each rank. A single rank receives its own rows."""
        if rank_group.world_size == 1:
            return AllToAll(sent, sent, None)
        if rank_group.start is not None:
            return rank_group.start(sent, send_splits, receive_splits)
        received = torch.empty(sum(receive_splits), *sent.shape[1:], dtype=sent.dtype, device=sent.device)
        group = rank_group.group
        work = dist.all_to_all_single(received, sent, receive_splits, send_splits, group=group, async_op=True)
        return AllToAll(sent, received, work)

    def wait(self) -> Tensor:
        """Waits; returns the received tensor."""
        if self.work is not None:
            self.work.wait()
        return self.received


@dataclass(frozen=True, slots=True)
class Sizes:
    """Numbers of ids of the declared features."""

    per_bag: Mapping[str, int]
    """Number of ids in every bag, for features where it is fixed."""
    per_batch: Sequence[Mapping[str, int]] = ({},)
    """Number of ids in a batch, for unpooled features where it is fixed, whatever the lengths of sequences; one or more
    kinds of batches, which name the same features."""

    def __contains__(self, name: str) -> bool:
        return name in self.per_bag or name in self.per_batch[0]

    def ids(self, name: str, stride: int, kind: int = 0) -> int:
        """Returns the number of a feature's ids in a batch of `stride` bags and of this kind."""
        of_batch = self.per_batch[kind].get(name)
        return stride * self.per_bag[name] if of_batch is None else of_batch


@dataclass(frozen=True, slots=True)
class KJTLayout:
    """A group's KJT except its ids and weights, which are the batch's from `start` to `end`."""

    group: Group
    start: int
    end: int
    keys: list[str]
    lengths: Tensor
    offsets: Tensor | None
    stride: int
    length_per_key: list[int]
    offset_per_key: list[int]
    owned: OwnedRows | None = None
    """Mapping of row-wise tables' ids to this rank's rows; None without such tables."""

    def kjt(self, values: Tensor, weights: Tensor | None) -> KeyedJaggedTensor:
        """Returns a complete KJT: neither its lookup nor `sync` has to read the device."""
        ids, weights = values[self.start : self.end], None if weights is None else weights[self.start : self.end]
        if self.owned is not None:
            ids, weights = self.owned.local(ids, weights)
        return KeyedJaggedTensor(
            keys=self.keys,
            values=ids,
            weights=weights,
            lengths=self.lengths,
            offsets=self.offsets,
            stride=self.stride,
            length_per_key=self.length_per_key,
            offset_per_key=self.offset_per_key,
        )


@dataclass(slots=True)
class _Layout:
    """The properties common to batches of one stride. An index of None means that the order is already right."""

    kept_index: Tensor | None
    """Positions in the input's values of those to send, by rank, then of those looked up here."""
    num_kept: int
    send_splits: list[int]
    receive_splits: list[int]
    receive_index: Tensor | None
    exchanged: list[KJTLayout]
    local: list[KJTLayout]
    graphed: GraphedFunction | None = None
    """StaticDist.exchange of such batches, if it is to be replayed."""


class StaticDist:
    """The input dist of groups whose features all have declared multi-hot sizes. For row-wise tables, every rank
    receives all ids.

    A batch takes a gather, an all-to-all of values and another gather; no host read, no lengths, no splits. If nothing
    is exchanged, only the first gather remains, and a gather is skipped if the order is already right. If an input also
    has keys of undeclared sizes, whose values shift the others', the first gather is replaced by FBGEMM's permute by
    lengths, which takes a few launches.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        keys: Sequence[str],
        sizes: Sizes,
        rank_group: RankGroup,
        cuda_graph: bool = False,
        pooled: bool = True,
    ) -> None:
        """keys: of the input, in order. sizes: of the groups' features and possibly of other keys. pooled: False if the
        lookup is id by id, so that any bags will do.

        cuda_graph: replay the gathers and the all-to-all, if there is an exchange and all keys are declared, for
        batches like the first one.
        """
        self.groups = groups
        self._cuda_graph = cuda_graph and rank_group.world_size > 1 and any(group.exchanged for group in groups)
        self._exchanged = [group for group in groups if group.exchanged]
        self._local = [group for group in groups if not group.exchanged]
        self._sizes, self.rank_group, self._keys, self._pooled = sizes, rank_group, list(keys), pooled
        ranks = range(rank_group.world_size)
        self._send = [[name for group in self._exchanged for name in group.features[rank]] for rank in ranks]
        self._kept = [name for names in self._send for name in names]
        self._kept += [name for group in self._local for name in group.features[rank_group.rank]]
        rows = [keys.index(name) for name in self._kept]
        self._kept_rows = torch.tensor(rows, dtype=torch.int32, device=rank_group.device)
        self._all_declared = all(key in sizes for key in keys)
        self._layouts = BatchSizeCache[_Layout]()

    def start(self, features: KeyedJaggedTensor, kind: int = 0) -> InFlight:
        """Starts one batch, of one of the sizes' kinds, whose lengths are trusted. A new stride and kind copies its
        indices to the device."""
        lengths = features.lengths_or_none()
        size = (features.stride(), kind, features.offsets().dtype if lengths is None else lengths.dtype)
        replay = self._replay if self._cuda_graph and self._all_declared else None
        layout = self._layouts.get(size, self.rank_group.device, partial(self._lay_out, *size), replay)
        return _StaticInFlight(self, layout, features)

    def graphed(self) -> list[GraphedFunction]:
        """Returns the graph of batches like the first one, if there is one."""
        first = self._layouts.replayed
        return [] if first is None or first.graphed is None else [first.graphed]

    def exchange(self, layout: _Layout, values: Tensor) -> tuple[Tensor, ...]:
        """Returns the values of all ranks that this rank looks up; and, if it needs its own batch, `kept`."""
        kept = gather(values, layout.kept_index)
        all_to_all = self.all_to_all(kept, layout)
        assert all_to_all is not None
        received = gather(all_to_all.wait(), layout.receive_index)
        return (received, kept) if layout.local else (received,)

    def format_of(self, features: KeyedJaggedTensor) -> IdFormat:
        """Returns the exchange format of a batch's ids: with their weights, if they have any and are pooled."""
        return IdFormat.of(features) if self._pooled else IdFormat(features.values().dtype, None)

    def packed(self, features: KeyedJaggedTensor, form: IdFormat) -> Tensor:
        """Returns the ids of the input, packed with their weights."""
        return form.pack(features.values(), None if form.weights is None else features.weights())

    def kept(self, features: KeyedJaggedTensor, form: IdFormat, layout: _Layout) -> Tensor:
        """Returns the ids to send, by rank, then those looked up here, packed with their weights."""
        if self._all_declared:
            return gather(self.packed(features, form), layout.kept_index)
        lengths = features.lengths().view(len(self._keys), -1)
        weights = None if form.weights is None else features.weights()
        _, ids, weights = torch.ops.fbgemm.permute_2D_sparse_data(
            self._kept_rows, lengths, features.values(), weights, layout.num_kept
        )
        return form.pack(ids, weights)

    def all_to_all(self, kept: Tensor, layout: _Layout) -> AllToAll | None:
        """Starts the exchange; returns None if no group is exchanged."""
        if not self._exchanged:
            return None
        sent = kept[: sum(layout.send_splits)]
        return AllToAll.start(sent, layout.send_splits, layout.receive_splits, self.rank_group)

    def _replay(self, layout: _Layout) -> None:
        layout.graphed = GraphedFunction(partial(self.exchange, layout), "the input dist", self.rank_group.group)

    def _lay_out(self, stride: int, kind: int, dtype: torch.dtype) -> _Layout:
        world_size, device = self.rank_group.world_size, self.rank_group.device
        ids, kept_index = partial(self._sizes.ids, stride=stride, kind=kind), None
        if self._all_declared:
            kept_index = positions(*blocks_of(self._kept, self._keys, ids), device)
        # Received [rank][feature][sample]; looked up [feature][rank][sample].
        own = [ids(name) for name in self._send[self.rank_group.rank]]
        *starts, per_rank = accumulate(own, initial=0)
        blocks = [
            (rank * per_rank + start, n) for start, n in zip(starts, own, strict=True) for rank in range(world_size)
        ]
        send_splits = [sum(map(ids, names)) for names in self._send]
        return _Layout(
            kept_index=kept_index,
            num_kept=sum(map(ids, self._kept)),
            send_splits=send_splits,
            receive_splits=[per_rank] * world_size,
            receive_index=positions(blocks, world_size * per_rank, device),
            exchanged=self._kjt_layouts(self._exchanged, 0, world_size, stride, ids, dtype),
            local=self._kjt_layouts(self._local, sum(send_splits), 1, stride, ids, dtype),
        )

    def _kjt_layouts(
        self,
        groups: Sequence[Group],
        start: int,
        batches: int,
        stride: int,
        ids_of: Callable[[str], int],
        dtype: torch.dtype,
    ) -> list[KJTLayout]:
        """Returns layouts. batches: number of ranks whose batches, of `stride` bags each, are included."""
        layouts, device = [], self.rank_group.device
        for group in groups:
            keys = group.features[self.rank_group.rank]
            ids = list(map(ids_of, keys))
            bags = stride if self._pooled else -(-max(ids, default=1) // _LOOKED_UP_AT_ONCE)
            lengths = torch.cat([torch.empty(0, dtype=torch.int64), *(_even(n, bags).repeat(batches) for n in ids)])
            offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
            length_per_key = [batches * n for n in ids]
            offset_per_key = list(accumulate(length_per_key, initial=0))
            countable = offset_per_key[-1] * group.width < _INT32_ELEMENTS
            on_device = lengths.to(device, dtype if countable else torch.int64), offsets.to(device, group.offset_type)
            end = start + offset_per_key[-1]
            owned = None
            if group.hash_sizes is not None:
                rank_group = self.rank_group
                owned = owned_rows(group.hash_sizes, length_per_key, rank_group.rank, rank_group.world_size, device)
            known = *on_device, batches * bags, length_per_key, offset_per_key, owned
            layout = KJTLayout(group, start, end, keys, *known)
            layouts.append(layout)
            start = end
        return layouts


def _even(count: int, bags: int) -> Tensor:
    """Returns lengths of `bags` bags with `count` ids in all."""
    lengths = torch.full((bags,), count // bags)
    lengths[: count % bags] += 1
    return lengths


def blocks_of(
    names: Sequence[str], keys: Sequence[str], ids: Callable[[str], int]
) -> tuple[list[tuple[int, int]], int]:
    """Returns the value ranges of `names`, and the number of values, in an input of `keys`, all declared."""
    starts = dict(zip(keys, accumulate(map(ids, keys), initial=0), strict=False))
    return [(starts[name], ids(name)) for name in names], sum(map(ids, keys))


class _StaticInFlight:
    def __init__(self, static: StaticDist, layout: _Layout, features: KeyedJaggedTensor) -> None:
        self._static, self._layout = static, layout
        self._features: KeyedJaggedTensor | None = features
        self._format = static.format_of(features)
        self._all_to_all: AllToAll | None = None
        self._result: dict[int, KeyedJaggedTensor] = {}

    def launch(self) -> None:
        if self._features is None:
            return
        static, layout = self._static, self._layout
        if layout.graphed is not None and static.rank_group.start is None:
            received, *kept = layout.graphed(static.packed(self._features, self._format))
            self._add(received, layout.exchanged)
        else:
            kept = [static.kept(self._features, self._format, layout)]
            self._all_to_all = static.all_to_all(kept[0], layout)
        if layout.local:
            self._add(kept[0], layout.local)
        self._features = None

    def finish(self) -> dict[int, KeyedJaggedTensor]:
        self.launch()
        if self._all_to_all is not None:
            self._add(gather(self._all_to_all.wait(), self._layout.receive_index), self._layout.exchanged)
            self._all_to_all = None
        return self._result

    def _add(self, rows: Tensor, layouts: Sequence[KJTLayout]) -> None:
        ids, weights = self._format.unpack(rows)
        self._result |= {each.group.index: each.kjt(ids, weights) for each in layouts}


def gather(source: Tensor, index: Tensor | None) -> Tensor:
    """Returns the rows of `source` at the index; without one, all rows."""
    return source if index is None else source.index_select(0, index)


def positions(blocks: Sequence[tuple[int, int]], total: int, device: torch.device) -> Tensor | None:
    """Returns the positions in the blocks (first, length), one after another; None if they are 0 .. total - 1.

    kernels.gather_segments would need no index, but Triton launches from Python: the scarce resource is host time.
    """
    of_blocks = [torch.arange(first, first + length, dtype=torch.int32) for first, length in blocks]
    index = torch.cat(of_blocks) if of_blocks else torch.empty(0, dtype=torch.int32)
    if torch.equal(index, torch.arange(total, dtype=torch.int32)):
        return None
    return index.to(device)
