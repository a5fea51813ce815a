"""The exchange of ids: from the ranks of their samples to the ranks that own their tables. Shapes and layouts are those
of StaticEBC; ids travel as 32-bit words, raw ids as two each."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from dlrm_bench.dlrm.tables.pooled.ways import Collectives, InPeerMemory, Layout, OverNodes, Way
from dlrm_bench.dlrm.tables.tables import Tables
from dlrm_bench.kernels.input_dist.gather_segments import Segment, SegmentTable, gather_segments
from dlrm_bench.kernels.input_dist.push_segments import SegmentPushTable, push_segments
from dlrm_bench.kernels.peer_tensors import PeerTensors


@dataclass(frozen=True, slots=True)
class IdsBuffer:
    """Memory for one batch's ids, allocated and written by an exchange."""

    own: Tensor
    """int32 [part][T][G, hot], flat: for this rank's tables; raw ids are int64."""
    peers: PeerTensors | None = None
    """The buffers of the node's ranks, int32, all as long as the longest; only with peer memory. `own` is the beginning
    of this rank's buffer."""

    @property
    def words(self) -> Tensor:
        """The memory of `own`, int32."""
        return self.own.view(torch.int32)


class IdsExchange(Protocol):
    """The part of the input dist that moves ids between ranks. Launches on the current stream."""

    def empty(self) -> IdsBuffer:
        """Returns a buffer of zeros. Collective with peer memory."""

    def exchange(self, ids: Tensor, out: IdsBuffer) -> None:
        """Sends the ids of all ranks' samples to their owners, into `out.own`. Collective.

        ids: the flat ids of one Batch, on the device: int32, or raw ids, int64.
        """


def ids_exchange(layout: Layout, way: Way) -> IdsExchange:
    """Returns the exchange for this way. Collective."""
    match way:
        case InPeerMemory():
            return PeerIdsExchange(layout, way)
        case OverNodes():
            return NodeIdsExchange(layout, way)
        case Collectives():
            return CollectiveIdsExchange(layout)


class CollectiveIdsExchange:
    """An exchange by an all-to-all with constant splits, between two kernels that reorder the ids."""

    def __init__(self, layout: Layout) -> None:
        """Makes a process group. Collective."""
        tables, plan, ranks, shape = layout.tables, layout.plan, layout.ranks, layout.shape
        self._device, self._group = ranks.device, ranks.new_group()
        self._raw, words, at = tables.raw_ids, _words(tables), 0
        starts = _feature_starts(words, shape.samples)
        send, self._send_splits = [], []
        for rank in range(ranks.world_size):
            start = at
            for shard in plan.of_rank(rank):
                length = shape.samples * words[shard.table]
                send.append(Segment(starts[shard.table], at, length))
                at += length
            self._send_splits.append(at - start)
        self._send_segments = SegmentTable(send, ranks.device)
        own = self._send_splits[ranks.rank]
        self._receive_splits = [own] * ranks.world_size
        receive, at = [], 0
        for part in range(shape.parts):
            before = 0
            for shard in plan.of_rank(ranks.rank):
                length = shape.part_samples * words[shard.table]
                for rank in range(ranks.world_size):
                    receive.append(Segment(rank * own + before + part * length, at, length))
                    at += length
                before += shape.parts * length
        self._receive_segments = SegmentTable(receive, ranks.device)

    def empty(self) -> IdsBuffer:
        """Returns a buffer of zeros, on this rank only."""
        return IdsBuffer(
            _ids(torch.zeros(sum(self._receive_splits), dtype=torch.int32, device=self._device), self._raw)
        )

    def exchange(self, ids: Tensor, out: IdsBuffer) -> None:
        """Sends [rank][its shards][B, hot], and receives [rank][T][B, hot]. Collective."""
        sent = torch.empty(sum(self._send_splits), dtype=torch.int32, device=self._device)
        gather_segments(ids.view(torch.int32), self._send_segments, sent)
        received = torch.empty(sum(self._receive_splits), dtype=torch.int32, device=self._device)
        dist.all_to_all_single(received, sent, self._receive_splits, self._send_splits, group=self._group)
        gather_segments(received, self._receive_segments, out.words)


class PeerIdsExchange:
    """An exchange by one kernel that writes ids to the ranks that own their tables, and a barrier.

    The barrier `ids`, which `exchange` launches, must come after all ranks' writes to a buffer, and before the owner
    changes, sorts or looks up the ids. The caller launches another barrier of all ranks between the owner's last use of
    a buffer and the next exchange into it, on any rank.
    """

    def __init__(self, layout: Layout, way: InPeerMemory) -> None:
        tables, plan, ranks, shape = layout.tables, layout.plan, layout.ranks, layout.shape
        self._memory, self._barrier = way.memory, way.barriers.ids
        self._raw, words = tables.raw_ids, _words(tables)
        starts = _feature_starts(words, shape.samples)
        num_words, segments = [], []
        for owner in range(ranks.world_size):
            of_owner, at = [], 0
            for part in range(shape.parts):
                for shard in plan.of_rank(owner):
                    length = shape.part_samples * words[shard.table]
                    of_owner.append(Segment(starts[shard.table] + part * length, at + ranks.rank * length, length))
                    at += ranks.world_size * length
            segments.append(of_owner)
            num_words.append(at)
        self._segments = SegmentPushTable(segments, ranks.device)
        self._own, self._longest = num_words[ranks.rank], max(num_words)

    def empty(self) -> IdsBuffer:
        """Returns buffers of zeros, of all ranks. Collective."""
        peers = self._memory.zeros(self._longest, dtype=torch.int32)
        return IdsBuffer(_ids(peers.own[: self._own], self._raw), peers)

    def exchange(self, ids: Tensor, out: IdsBuffer) -> None:
        """Writes the ids to all ranks, and waits for the other ranks' ids."""
        assert out.peers is not None, "out: a buffer of this exchange"
        push_segments(ids.view(torch.int32), self._segments, out.peers)
        self._memory.barrier(self._barrier)


class NodeIdsExchange:
    """An exchange over nodes that sends the ids of all its tables to each node once: to the rank of equal local rank,
    which writes them to the ranks of its node that hold the tables.

    However many ranks of a node hold rows or columns of one table, its ids cross the network once.

    Needs PeerIdsExchange's barriers, between the ranks of a node.
    """

    def __init__(self, layout: Layout, way: OverNodes) -> None:
        """Collective."""
        tables, plan, ranks, shape = layout.tables, layout.plan, layout.ranks, layout.shape
        self._memory, self._barrier = way.memory, way.barriers.ids
        self._device, self._group = ranks.device, ranks.new_group_across_nodes()
        self._raw, words = tables.raw_ids, _words(tables)
        starts = _feature_starts(words, shape.samples)
        size = ranks.local_world_size
        owners = [range(node * size, (node + 1) * size) for node in range(ranks.nodes)]
        send, at = [], 0
        self._send_splits: list[int] = []
        table_starts: dict[int, int] = {}
        """Offsets of each table's ids in a message from another node to this one: [table][B, hot]."""
        for node, of_node in enumerate(owners):
            start = at
            for table in sorted({shard.table for owner in of_node for shard in plan.of_rank(owner)}):
                length = shape.samples * words[table]
                send.append(Segment(starts[table], at, length))
                if node == ranks.node:
                    table_starts[table] = at - start
                at += length
            self._send_splits.append(at - start)
        self._send_segments = SegmentTable(send, ranks.device)
        own = self._send_splits[ranks.node]
        self._receive_splits = [own] * ranks.nodes
        num_words, push = [], []
        for owner in owners[ranks.node]:
            of_owner, at = [], 0
            for part in range(shape.parts):
                for shard in plan.of_rank(owner):
                    length = shape.part_samples * words[shard.table]
                    for node in range(ranks.nodes):
                        source = node * own + table_starts[shard.table] + part * length
                        samples_of = node * size + ranks.local_rank
                        of_owner.append(Segment(source, at + samples_of * length, length))
                    at += ranks.world_size * length
            push.append(of_owner)
            num_words.append(at)
        self._push_segments = SegmentPushTable(push, ranks.device)
        self._own, self._longest = num_words[ranks.local_rank], max(num_words)

    def empty(self) -> IdsBuffer:
        """Returns buffers of zeros, of all ranks of the node. Collective."""
        peers = self._memory.zeros(self._longest, dtype=torch.int32)
        return IdsBuffer(_ids(peers.own[: self._own], self._raw), peers)

    def exchange(self, ids: Tensor, out: IdsBuffer) -> None:
        """Sends [node][its tables][B, hot], and writes the received ids to the ranks of this node. Collective."""
        assert out.peers is not None, "out: a buffer of this exchange"
        sent = torch.empty(sum(self._send_splits), dtype=torch.int32, device=self._device)
        gather_segments(ids.view(torch.int32), self._send_segments, sent)
        received = torch.empty(sum(self._receive_splits), dtype=torch.int32, device=self._device)
        dist.all_to_all_single(received, sent, self._receive_splits, self._send_splits, group=self._group)
        push_segments(received, self._push_segments, out.peers)
        self._memory.barrier(self._barrier)


def _words(tables: Tables) -> list[int]:
    """Returns the 32-bit words of a sample's ids in each table."""
    return [hot * tables.id_bytes // 4 for hot in tables.hot]


def _feature_starts(words: Sequence[int], batch_size: int) -> list[int]:
    """Returns the word at which each feature's ids [batch_size, hot] start in a Batch."""
    return [batch_size * sum(words[:feature]) for feature in range(len(words))]


def _ids(words: Tensor, raw: bool) -> Tensor:
    """Returns the ids in the memory of int32 words."""
    return words.view(torch.int64) if raw else words
