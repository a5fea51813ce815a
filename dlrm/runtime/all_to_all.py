"""All-to-alls with constant splits: one collective over all ranks, or for several nodes a two-level exchange.

In the two-level exchange, every rank first writes its chunks to the ranks of its node through peer memory: the chunks
for local rank l of all nodes go to local rank l here. Then ranks of equal local rank exchange these chunks by a
collective. So a GPU sends one message to each other node, with as many chunks as a node has GPUs, instead of one to
each GPU of each node, and its network adapter's messages stay within the same switches.
"""

from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from dlrm_bench.dlrm.runtime.peer_memory import Barrier, PeerMemory
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.kernels.input_dist.gather_segments import Segment
from dlrm_bench.kernels.input_dist.push_segments import SegmentPushTable, push_segments

Splits = Callable[[int, int], int]
"""splits(source, destination): number of elements that one rank sends another; known to all ranks."""


class AllToAll(Protocol):
    """A reusable exchange. Launches on the current stream."""

    def exchange(self, received: Tensor, sent: Tensor) -> None:
        """Sends [destination][its chunk] and receives [source][its chunk], both flat and contiguous. Collective."""


class FlatAllToAll:
    """A collective over all ranks."""

    def __init__(self, ranks: Ranks, splits: Splits, group: dist.ProcessGroup) -> None:
        self._group, everyone = group, range(ranks.world_size)
        self._send = [splits(ranks.rank, other) for other in everyone]
        self._receive = [splits(other, ranks.rank) for other in everyone]

    def exchange(self, received: Tensor, sent: Tensor) -> None:
        """See AllToAll."""
        dist.all_to_all_single(received, sent, self._receive, self._send, group=self._group)


class NodeAllToAll:
    """An exchange within each node through peer memory, then one between ranks of equal local rank.

    The barrier `staged`, which `exchange` launches, must come after the chunks of all ranks of the node are staged, and
    before the exchange between nodes reads them. The caller launches another barrier of the node's ranks between that
    exchange and the next write to the stage, by the next `exchange` on any of these ranks.
    """

    def __init__(
        self,
        staged: Barrier,
        ranks: Ranks,
        memory: PeerMemory,
        splits: Splits,
        dtype: torch.dtype,
        across: dist.ProcessGroup,
    ) -> None:
        """staged: a barrier of this exchange only. dtype: of all elements; chunks are multiples of 4 bytes. across: the
        ranks with this local rank on all nodes. Collective."""
        self._barrier, self._memory, self._group = staged, memory, across
        locals_, nodes = range(ranks.local_world_size), range(ranks.nodes)
        words = _words(dtype)

        def rank_at(node: int, local: int) -> int:
            return node * ranks.local_world_size + local

        def chunk(source: int, destination: int) -> int:
            size = splits(source, destination)
            assert size % words == 0, f"chunks of {dtype}: a multiple of 4 bytes"
            return size // words

        # The send buffer of local rank l of this node: [node][local rank of the source][chunk for (node, l)].
        starts: list[dict[int, int]] = []
        totals: list[list[int]] = []
        for local in locals_:
            at, starts_of, sizes = 0, {}, []
            for node in nodes:
                before = at
                for source in locals_:
                    if source == ranks.local_rank:
                        starts_of[node] = at
                    at += chunk(rank_at(ranks.node, source), rank_at(node, local))
                sizes.append((at - before) * words)
            starts.append(starts_of)
            totals.append(sizes)
        segments: list[list[Segment]] = [[] for _ in locals_]
        at = 0
        for node in nodes:
            for local in locals_:
                length = chunk(ranks.rank, rank_at(node, local))
                segments[local].append(Segment(at, starts[local][node], length))
                at += length
        self._push = SegmentPushTable(segments, ranks.device)
        self._send = totals[ranks.local_rank]
        rank = ranks.rank
        self._receive = [sum(splits(rank_at(node, source), rank) for source in locals_) for node in nodes]
        # The same size on all ranks of a node.
        self._staged = memory.zeros(max(map(sum, totals)), dtype=dtype)
        self._words = self._staged.viewed(torch.int32) if words > 1 or dtype != torch.int32 else self._staged

    def exchange(self, received: Tensor, sent: Tensor) -> None:
        """See AllToAll."""
        push_segments(sent.view(torch.int32), self._push, self._words)
        self._memory.barrier(self._barrier)
        staged = self._staged.own[: sum(self._send)]
        dist.all_to_all_single(received, staged, self._receive, self._send, group=self._group)


class AllToAlls:
    """Makes exchanges: two-level ones with peer memory, else flat ones. All use one group, so they run one after
    another, in the order of their launches."""

    def __init__(self, ranks: Ranks, memory: PeerMemory | None) -> None:
        """memory: the nodes' peer memory, if there are several nodes. Collective."""
        self._ranks, self._memory = ranks, memory
        self._group = ranks.new_group() if memory is None else ranks.new_group_across_nodes()

    def make(self, staged: Barrier | None, splits: Splits, dtype: torch.dtype) -> AllToAll:
        """Returns an exchange. staged, dtype: see NodeAllToAll; a flat exchange has no barrier. Collective."""
        if self._memory is None:
            return FlatAllToAll(self._ranks, splits, self._group)
        assert staged is not None, "a two-level exchange needs a barrier"
        return NodeAllToAll(staged, self._ranks, self._memory, splits, dtype, self._group)


def _words(dtype: torch.dtype) -> int:
    """Returns the number of elements in 4 bytes."""
    assert 4 % dtype.itemsize == 0, f"{dtype}: elements of 1, 2 or 4 bytes"
    return 4 // dtype.itemsize
