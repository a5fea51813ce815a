"""TorchRec's output dists of table-wise tables without what one all-to-all each way does not need.

Of pooled vectors that is where tables of one sharding type alone are exchanged, so that there is nothing to join; of
unpooled ones where all numbers of ids are known before.
"""

import math
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.comm_ops import get_gradient_division
from torchrec.distributed.embedding_sharding import EmbeddingShardingContext
from torchrec.distributed.sharding.sequence_sharding import SequenceShardingContext
from torchrec.distributed.sharding.tw_sequence_sharding import TwSequenceEmbeddingDist
from torchrec.distributed.sharding.tw_sharding import TwPooledEmbeddingDist
from torchrec.distributed.types import Awaitable

from ...cuda_graph import GraphedFunction
from .batch_size_cache import BatchSizeCache
from .vectors_exchange import Exchange, Order, VectorsOnTheirWay

_MOST_REPLAYED = 1 << 24
"""Elements of unpooled vectors that are replayed at most: a graph's memory has two copies of them, and filling it takes
longer than the launches that it saves."""


class TrimmedOutputDist(nn.Module):
    """A stand-in for a TwPooledEmbeddingDist: the same results and gradients, bit by bit.

    `forward` launches the all-to-all, the wait of what it returns belongs on the same stream.
    """

    def __init__(self, stock: TwPooledEmbeddingDist, cuda_graph: bool = False) -> None:
        """stock: one that `can_replace` allows. cuda_graph: replay the all-to-alls, and what is around them, of batches
        of the first one's size."""
        super().__init__()
        self._cuda_graph = cuda_graph
        self._group, self._dims = stock._pg, stock._dim_sum_per_rank
        self._rank = dist.get_rank(self._group)
        self._exchanges = BatchSizeCache[Exchange]()

    def graphed(self) -> list[GraphedFunction]:
        """Both ways of batches of the first one's size, if any."""
        first = self._exchanges.replayed
        return [] if first is None else first.graphed

    @staticmethod
    def can_replace(stock: nn.Module) -> bool:
        """Returns whether it can: not where no other rank exchanges, vectors are quantised, or columns are
        reordered."""
        return (
            type(stock) is TwPooledEmbeddingDist
            and stock._codecs is None
            and not stock._callbacks
            and dist.get_world_size(stock._pg) > 1
        )

    def forward(self, local_embs: Tensor, sharding_ctx: EmbeddingShardingContext) -> Awaitable[Tensor]:
        """local_embs: [global batch, columns of this rank]. What is awaited: [local batch, columns of all ranks]."""
        divides, sizes = get_gradient_division(), tuple(sharding_ctx.batch_size_per_rank)
        make = partial(self._exchange, sizes, divides, local_embs.device)
        replay = Exchange.replay if self._cuda_graph else None
        return VectorsOnTheirWay(local_embs, self._exchanges.get((divides, *sizes), local_embs.device, make, replay))

    def _exchange(self, batch_sizes: tuple[int, ...], divides: bool, device: torch.device) -> Exchange:
        dims, local = self._dims, batch_sizes[self._rank]
        # What comes from the ranks is [rank, sample, columns of the rank]; all columns are multiples of one width.
        width, order, first = math.gcd(*dims), [], 0
        for dim in dims:
            blocks = dim // width
            order.append(first + torch.arange(local * blocks).view(local, blocks))
            first += local * blocks
        return Exchange(
            self._group,
            send_splits=[size * dims[self._rank] for size in batch_sizes],
            receive_splits=[local * dim for dim in dims],
            shape=(local, -1),
            before=None,
            after=Order.of(torch.cat(order, dim=1).view(-1).to(device), width),
            divides=divides,
        )


class KnownSequences(SequenceShardingContext):
    """TorchRec's context of one lookup of unpooled embeddings, whose sizes the host knows. `own_ids` is set after its
    construction: TorchRec 1.6's has a constructor, later ones are dataclasses."""

    own_ids: tuple[int, ...] = ()
    """Ids of each feature that this rank looks up, of one rank's batch; alike on all ranks."""


class TrimmedSequenceDist(nn.Module):
    """A stand-in for a TwSequenceEmbeddingDist, as TrimmedOutputDist is one."""

    def __init__(self, stock: TwSequenceEmbeddingDist, cuda_graph: bool = False) -> None:
        """As TrimmedOutputDist's. Many vectors are not replayed."""
        super().__init__()
        self._cuda_graph, self._group = cuda_graph, stock._dist._pg
        self._exchanges = BatchSizeCache[Exchange]()

    def graphed(self) -> list[GraphedFunction]:
        """Both ways of batches of the first one's size, if any."""
        first = self._exchanges.replayed
        return [] if first is None else first.graphed

    @staticmethod
    def can_replace(stock: nn.Module) -> bool:
        """Returns whether it can: not where no other rank exchanges, or vectors are quantised."""
        if type(stock) is not TwSequenceEmbeddingDist:
            return False
        all_to_all: Any = stock._dist
        return all_to_all._codecs is None and dist.get_world_size(all_to_all._pg) > 1

    def forward(self, local_embs: Tensor, sharding_ctx: KnownSequences) -> Awaitable[Tensor]:
        """local_embs: [ids of this rank's features in the global batch, width], by feature and rank. What is awaited:
        [ids of all features in the local batch, width]."""
        divides, width, device = get_gradient_division(), local_embs.shape[1], local_embs.device
        size = (divides, width, sharding_ctx.own_ids, tuple(sharding_ctx.input_splits))
        few = max(sum(sharding_ctx.input_splits), len(local_embs)) * width <= _MOST_REPLAYED
        replay = Exchange.replay if self._cuda_graph and few else None
        make = partial(self._exchange, sharding_ctx, width, divides, device)
        return VectorsOnTheirWay(local_embs, self._exchanges.get(size, device, make, replay))

    def _exchange(self, context: KnownSequences, width: int, divides: bool, device: torch.device) -> Exchange:
        ranks, own = len(context.output_splits), torch.tensor(context.own_ids, dtype=torch.int64)
        starts = ranks * (own.cumsum(0) - own)
        order = [
            start + rank * n + torch.arange(n)
            for rank in range(ranks)
            for start, n in zip(starts.tolist(), context.own_ids, strict=True)
        ]
        index = torch.cat(order) if order else torch.empty(0, dtype=torch.int64)
        in_order = len(context.own_ids) < 2
        return Exchange(
            self._group,
            send_splits=[n * width for n in context.output_splits],
            receive_splits=[n * width for n in context.input_splits],
            shape=(-1, width),
            before=None if in_order else Order.of(index.to(device), width),
            after=None,
            divides=divides,
        )
