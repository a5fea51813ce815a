"""The exchange of ids: from the ranks of their samples to the ranks that own their tables. Shapes and layouts are
StaticEBC's."""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from dlrm_bench.dlrm.batch_shape import BatchShape
from dlrm_bench.dlrm.config import ModelConfig
from dlrm_bench.dlrm.runtime.peer_memory import PeerMemory
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.dlrm.tables.plan.plan import Plan
from dlrm_bench.kernels.input_dist.gather_segments import Segment, SegmentTable, gather_segments
from dlrm_bench.kernels.input_dist.push_segments import SegmentPushTable, push_segments
from dlrm_bench.kernels.peer_tensors import PeerTensors


@dataclass(frozen=True, slots=True)
class IdsBuffer:
    """Memory for one batch's ids, which an exchange made and writes."""

    own: Tensor
    """int32 [part][T][G, hot], flat: for this rank's tables."""
    peers: PeerTensors | None = None
    """The buffers of the node's ranks, as long as the longest, in peer memory alone; `own` is the beginning of this
    rank's."""


class IdsExchange(Protocol):
    """The part of the input dist that moves ids between ranks. Launches on the current stream."""

    def empty(self) -> IdsBuffer:
        """Returns a buffer of zeros. Collective in peer memory."""

    def exchange(self, ids: Tensor, out: IdsBuffer) -> None:
        """Brings the ids of all ranks' samples to `out.own`. Collective.

        ids: int32, the flat ids of one Batch, on the device.
        """


class CollectiveIdsExchange:
    """An exchange by an all-to-all with constant splits, between two kernels that put the ids in order."""

    def __init__(self, model: ModelConfig, plan: Plan, ranks: Ranks, shape: BatchShape) -> None:
        """Makes a process group. Collective."""
        self._device, self._group = ranks.device, ranks.new_group()
        hot, starts, at = model.multi_hot_sizes, _feature_starts(model, shape.samples), 0
        send, self._send_splits = [], []
        for rank in range(ranks.world_size):
            start = at
            for shard in plan.of_rank(rank):
                length = shape.samples * hot[shard.table]
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
                length = shape.part_samples * hot[shard.table]
                for rank in range(ranks.world_size):
                    receive.append(Segment(rank * own + before + part * length, at, length))
                    at += length
                before += shape.parts * length
        self._receive_segments = SegmentTable(receive, ranks.device)

    def empty(self) -> IdsBuffer:
        """Returns a buffer of zeros, of this rank alone."""
        return IdsBuffer(torch.zeros(sum(self._receive_splits), dtype=torch.int32, device=self._device))

    def exchange(self, ids: Tensor, out: IdsBuffer) -> None:
        """Sends [rank][its shards][B, hot], and receives [rank][T][B, hot]. Collective."""
        sent = torch.empty(sum(self._send_splits), dtype=torch.int32, device=self._device)
        gather_segments(ids, self._send_segments, sent)
        received = torch.empty(sum(self._receive_splits), dtype=torch.int32, device=self._device)
        dist.all_to_all_single(received, sent, self._receive_splits, self._send_splits, group=self._group)
        gather_segments(received, self._receive_segments, out.own)


class PeerIdsExchange:
    """An exchange by one kernel that writes ids to where the ranks that own their tables read them, and a barrier.

    The barrier "ids" orders the writes of all ranks before what the owner does with its ids after it: the change in
    place by `FixedTBE.shift`, the sort, the lookup. It launches in order on every rank, as exchanges do.

    Before an exchange into a buffer, on any rank, a barrier of all ranks must come after the owner's last use of that
    buffer. In the pipeline there is one already:

    Training. Iteration n exchanges the ids of batch n + 1 into slot (n + 1) % 2, where those of batch n - 1 were. Their
    owner shifted and sorted them in iteration n - 2, whose streams join before iteration n - 1, and looked them up in
    iteration n - 1; what its update reads, `sorted_ids` and `sorted_bags`, no other rank writes. After the lookup of
    each part the owner comes to the part's barrier "pooled". Every rank passes those of iteration n - 1 in its own
    iteration n - 1, whose streams join before iteration n: its writes come after the lookup.

    The first batches. Slot 0 gets batch 0 before iteration 0; when `empty` returns on any rank, the memory of all is
    zero. Iteration 0 writes to slot 1, which nobody has read. Iteration 1 writes to slot 0 again, whose batch was
    looked up in iteration 0, before that one's barriers "pooled".

    Evaluation has two slots of its own, and runs in order on one stream. A slot's last reader is the lookup of the
    batch in it, after which the owner comes to the barriers "pooled" and "evaluated"; every rank passes both before it
    exchanges the ids of another batch, of this evaluation or the next.

    Training after an evaluation. The evaluation touched no slot of the training, and ran in order between two
    iterations: what holds of them holds with it between them.

    `embedding_load` sorts and looks up ids of the training between two iterations, without barriers: after it each
    host waits for its GPU, then for the other hosts.
    """

    def __init__(self, model: ModelConfig, plan: Plan, ranks: Ranks, shape: BatchShape, memory: PeerMemory) -> None:
        self._memory = memory
        hot, starts = model.multi_hot_sizes, _feature_starts(model, shape.samples)
        num_ids, segments = [], []
        for owner in range(ranks.world_size):
            of_owner, at = [], 0
            for part in range(shape.parts):
                for shard in plan.of_rank(owner):
                    length = shape.part_samples * hot[shard.table]
                    of_owner.append(Segment(starts[shard.table] + part * length, at + ranks.rank * length, length))
                    at += ranks.world_size * length
            segments.append(of_owner)
            num_ids.append(at)
        self._segments = SegmentPushTable(segments, ranks.device)
        self._own, self._longest = num_ids[ranks.rank], max(num_ids)

    def empty(self) -> IdsBuffer:
        """Returns buffers of zeros, of all ranks. Collective."""
        peers = self._memory.zeros(self._longest, dtype=torch.int32)
        return IdsBuffer(peers.own[: self._own], peers)

    def exchange(self, ids: Tensor, out: IdsBuffer) -> None:
        """Writes the ids to all ranks, and waits for theirs."""
        assert out.peers is not None, "a buffer of this exchange's"
        push_segments(ids, self._segments, out.peers)
        self._memory.barrier("ids")


class NodeIdsExchange:
    """An exchange over nodes that sends each node the ids of all its tables once: to the rank of equal local rank,
    which writes them to the ranks of its node that hold the tables.

    However many ranks of a node hold rows or columns of one table, its ids cross the network once.

    The barrier "ids", and why there need be none before an exchange: see PeerIdsExchange, whose barriers "pooled" are
    NodeAllToAll's here.
    """

    def __init__(self, model: ModelConfig, plan: Plan, ranks: Ranks, shape: BatchShape, memory: PeerMemory) -> None:
        """memory: of the nodes. Collective."""
        self._memory, self._device, self._group = memory, ranks.device, ranks.new_group_across_nodes()
        hot, starts = model.multi_hot_sizes, _feature_starts(model, shape.samples)
        size = ranks.local_world_size
        owners = [range(node * size, (node + 1) * size) for node in range(ranks.nodes)]
        send, at = [], 0
        self._send_splits: list[int] = []
        table_starts: dict[int, int] = {}
        """Where each table's ids start in what one node sends this one: [table][B, hot]."""
        for node, of_node in enumerate(owners):
            start = at
            for table in sorted({shard.table for owner in of_node for shard in plan.of_rank(owner)}):
                length = shape.samples * hot[table]
                send.append(Segment(starts[table], at, length))
                if node == ranks.node:
                    table_starts[table] = at - start
                at += length
            self._send_splits.append(at - start)
        self._send_segments = SegmentTable(send, ranks.device)
        own = self._send_splits[ranks.node]
        self._receive_splits = [own] * ranks.nodes
        num_ids, push = [], []
        for owner in owners[ranks.node]:
            of_owner, at = [], 0
            for part in range(shape.parts):
                for shard in plan.of_rank(owner):
                    length = shape.part_samples * hot[shard.table]
                    for node in range(ranks.nodes):
                        source = node * own + table_starts[shard.table] + part * length
                        samples_of = node * size + ranks.local_rank
                        of_owner.append(Segment(source, at + samples_of * length, length))
                    at += ranks.world_size * length
            push.append(of_owner)
            num_ids.append(at)
        self._push_segments = SegmentPushTable(push, ranks.device)
        self._own, self._longest = num_ids[ranks.local_rank], max(num_ids)

    def empty(self) -> IdsBuffer:
        """Returns buffers of zeros, of all ranks of the node. Collective."""
        peers = self._memory.zeros(self._longest, dtype=torch.int32)
        return IdsBuffer(peers.own[: self._own], peers)

    def exchange(self, ids: Tensor, out: IdsBuffer) -> None:
        """Sends [node][its tables][B, hot], and writes what comes to the ranks of this node. Collective."""
        assert out.peers is not None, "a buffer of this exchange's"
        sent = torch.empty(sum(self._send_splits), dtype=torch.int32, device=self._device)
        gather_segments(ids, self._send_segments, sent)
        received = torch.empty(sum(self._receive_splits), dtype=torch.int32, device=self._device)
        dist.all_to_all_single(received, sent, self._receive_splits, self._send_splits, group=self._group)
        push_segments(received, self._push_segments, out.peers)
        self._memory.barrier("ids")


def _feature_starts(model: ModelConfig, batch_size: int) -> list[int]:
    """Returns where each feature's ids [batch_size, hot] start in a Batch."""
    return [batch_size * sum(model.multi_hot_sizes[:feature]) for feature in range(model.num_features)]
