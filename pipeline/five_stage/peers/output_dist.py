"""Output dists of pooled vectors through peer memory, each way, with bitwise the same results and gradients.

The vectors of tables split by columns, or not at all, are copied: a rank writes its columns where its peers' samples
have them. Those of tables split by rows are sums of what all ranks have looked up: each rank writes its terms to the
rank of the sample, which adds them in rank order; of two ranks NCCL's sum has the same bits. Every rank writes its
gradients where the owners' lookups read them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torchrec.distributed.comm_ops import get_gradient_division
from torchrec.distributed.embedding_sharding import EmbeddingShardingContext
from torchrec.distributed.sharding.dp_sharding import DpPooledEmbeddingDist
from torchrec.distributed.sharding.rw_sharding import RwPooledEmbeddingDist
from torchrec.distributed.sharding.tw_sharding import TwPooledEmbeddingDist
from torchrec.distributed.types import Awaitable

from .. import reasons
from ..sharded_modules import Sharded
from ..trimmed.ec_sharder import TrimmedEC
from ..trimmed.output_dist import PooledOnTheirWay, TrimmedOutputDist
from .push import Block, Layout, sum_of_ranks

if TYPE_CHECKING:
    from .exchanges import Peers, Pushed


def output_dists(peers: "Peers", one: Sharded) -> tuple[dict[nn.Module, Callable[..., Any]], dict[str, str]]:
    """Returns the forwards that put a module's output dists through peer memory; and why NCCL keeps the others, by
    what they exchange."""
    if isinstance(one.collection, TrimmedEC):
        return {}, {f"vectors of {one.name}": reasons.PEERS_UNPOOLED()}
    forwards, kept = dict[nn.Module, Callable[..., Any]](), dict[str, str]()
    for kind, stock in zip(one.collection._sharding_types, one.collection._output_dists, strict=True):
        name = f"pooled vectors of {one.name}, {kind}"
        if type(stock) is DpPooledEmbeddingDist:
            continue
        if getattr(stock, "_codecs", None) is not None:
            kept[name] = reasons.PEERS_QUANTISED()
        elif type(stock) is TrimmedOutputDist:
            forwards[stock] = partial(_columns, peers, name, stock.dims, ())
        elif type(stock) is TwPooledEmbeddingDist:
            forwards[stock] = partial(_columns, peers, name, stock._dim_sum_per_rank, stock._callbacks or ())
        elif type(stock) is RwPooledEmbeddingDist:
            forwards[stock] = partial(_rows, peers, name)
        else:
            kept[name] = reasons.PEERS_OTHER_DIST(kind=type(stock).__name__)
    return forwards, kept


def _columns(
    peers: "Peers",
    name: str,
    dims: Sequence[int],
    callbacks: Sequence[Callable[[Tensor], Tensor]],
    local_embs: Tensor,
    sharding_ctx: EmbeddingShardingContext,
) -> Awaitable[Tensor]:
    """Stands for the forward of a TwPooledEmbeddingDist. dims: columns of each rank."""
    awaitable = PooledOnTheirWay(local_embs, _OfColumns(peers, name, sharding_ctx.batch_size_per_rank, dims))
    awaitable.callbacks.extend(callbacks)
    return awaitable


def _rows(peers: "Peers", name: str, local_embs: Tensor, sharding_ctx: EmbeddingShardingContext) -> Awaitable[Tensor]:
    """Stands for the forward of a RwPooledEmbeddingDist."""
    dims = [local_embs.shape[1]] * peers.ranks
    return PooledOnTheirWay(local_embs, _OfRows(peers, name, sharding_ctx.batch_size_per_rank, dims))


class _Pooled(ABC):
    """The exchange of one batch, each way; see PooledExchange. Rank r has sizes[r] samples, and looks up dims[r]
    columns for all of them: [samples of all ranks, dims[r]]."""

    def __init__(self, peers: "Peers", name: str, sizes: Sequence[int], dims: Sequence[int]) -> None:
        self._peers, self._name, self._sizes, self._dims = peers, name, tuple(sizes), tuple(dims)
        self._own, self.local_batch_size = dims[peers.rank], sizes[peers.rank]
        self._before = list(accumulate(self._sizes, initial=0))
        """Samples of all earlier ranks; at the end, of all ranks."""
        self._divides = get_gradient_division()

    def start_forward(self, local_embs: Tensor) -> Callable[[], Tensor]:
        """Sends them; returns what waits for those of the local batch, [local batch, columns]."""
        pushed = self._send(self._name, local_embs, self._along)
        return lambda: self._arrived(pushed.wait())

    def backward(self, grad: Tensor) -> Tensor:
        """Returns the flat gradient of the sent vectors, given that of the local batch's."""
        pushed = self._send(f"gradients of the {self._name}", grad, self._back)
        received = pushed.wait()[: self._before[-1] * self._own]
        return received.div_(self._peers.ranks) if self._divides else received

    def _send(self, name: str, values: Tensor, lay_out: Callable[[int], Layout]) -> "Pushed":
        """Sends parts of rows, [any, columns]. lay_out: of their distance, which is any too."""
        values = values if values.stride(1) == 1 else values.contiguous()
        distance, shared = values.stride(0), (self._sizes, self._dims)
        return self._peers.push(name, "vectors", values, shared, partial(lay_out, distance), distance)

    @abstractmethod
    def _along(self, distance: int) -> Layout:
        """Returns the form of the exchange of vectors whose rows lie `distance` elements apart."""

    @abstractmethod
    def _back(self, distance: int) -> Layout:
        """Returns the form of the exchange of gradients whose rows lie `distance` elements apart."""

    @abstractmethod
    def _arrived(self, received: Tensor) -> Tensor:
        """Returns the local batch's vectors, [local batch, columns], of the buffer that the ranks have written."""


class _OfColumns(_Pooled):
    """Each rank has other columns of the vectors of all samples."""

    def _along(self, distance: int) -> Layout:
        first, width = sum(self._dims[: self._peers.rank]), sum(self._dims)
        blocks = [
            Block(distance * before, distance, first, width, size, self._own)
            for before, size in zip(self._before, self._sizes, strict=False)
        ]
        return Layout(blocks, width * max(self._sizes))

    def _back(self, distance: int) -> Layout:
        before = self._before[self._peers.rank]
        firsts = accumulate(self._dims, initial=0)
        blocks = [
            Block(first, distance, before * dim, dim, self.local_batch_size, dim)
            for first, dim in zip(firsts, self._dims, strict=False)
        ]
        return Layout(blocks, max(self._dims) * self._before[-1])

    def _arrived(self, received: Tensor) -> Tensor:
        pooled = received[: self.local_batch_size * sum(self._dims)].view(self.local_batch_size, -1)
        return pooled.clone() if self._peers.copies else pooled


class _OfRows(_Pooled):
    """Each rank has terms of the vectors of all samples."""

    def _along(self, distance: int) -> Layout:
        assert len(set(self._sizes)) == 1, "as TorchRec's reduce-scatter"
        size = self.local_batch_size
        to = size * self._own * self._peers.rank
        blocks = [Block(distance * before, distance, to, self._own, size, self._own) for before in self._before[:-1]]
        return Layout(blocks, self._own * self._before[-1])

    def _back(self, distance: int) -> Layout:
        to = self._own * self._before[self._peers.rank]
        block = Block(0, distance, to, self._own, self.local_batch_size, self._own)
        return Layout([block] * self._peers.ranks, self._own * self._before[-1])

    def _arrived(self, received: Tensor) -> Tensor:
        pooled = torch.empty(self.local_batch_size * self._own, dtype=received.dtype, device=received.device)
        sum_of_ranks(received.view(self._peers.ranks, -1), pooled)
        return pooled.view(self.local_batch_size, -1)
