"""TorchRec's output dist of table-wise tables without what one all-to-all each way does not need.

TorchRec puts two autograd functions around the all-to-all, so that several can be under way at once, joins them by a
dummy tensor, copies what it sends into a buffer of its own, and calls record_stream on the result. Where tables of one
sharding type alone are exchanged there is nothing to join.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torchrec.distributed.comm_ops import get_gradient_division
from torchrec.distributed.embedding_sharding import EmbeddingShardingContext
from torchrec.distributed.sharding.tw_sharding import TwPooledEmbeddingDist
from torchrec.distributed.types import Awaitable


class TrimmedOutputDist(nn.Module):
    """In the place of a TwPooledEmbeddingDist: the same results and gradients, bit by bit.

    `forward` launches the all-to-all, the wait of what it returns belongs on the same stream.
    """

    def __init__(self, stock: TwPooledEmbeddingDist) -> None:
        """stock: one that `can_replace` allows."""
        super().__init__()
        self._group, self._dims = stock._pg, stock._dim_sum_per_rank
        self._rank = dist.get_rank(self._group)

    @staticmethod
    def can_replace(stock: nn.Module) -> bool:
        """Not where there is nobody to exchange with, where vectors are quantised, or columns are put in order."""
        return (
            type(stock) is TwPooledEmbeddingDist
            and stock._codecs is None
            and not stock._callbacks
            and dist.get_world_size(stock._pg) > 1
        )

    def forward(self, local_embs: Tensor, sharding_ctx: EmbeddingShardingContext) -> Awaitable[Tensor]:
        """local_embs: [global batch, columns of this rank]. What is awaited: [local batch, columns of all ranks]."""
        sizes = sharding_ctx.batch_size_per_rank
        return _PooledOnTheirWay(local_embs, _Exchange(self._group, self._dims, sizes, self._rank))


class _Exchange:
    """Who gets how much, and the all-to-alls of one batch."""

    def __init__(self, group: dist.ProcessGroup, dims: list[int], batch_sizes: list[int], rank: int) -> None:
        self._group, self.dims, self.local_batch_size = group, dims, batch_sizes[rank]
        self._by_table = [size * dims[rank] for size in batch_sizes]
        self.by_sample = [self.local_batch_size * dim for dim in dims]

    def start(self, sent: Tensor, forward: bool) -> tuple[Tensor, Any]:
        """What is received, and the work to wait for. sent: flat."""
        splits = (self.by_sample, self._by_table) if forward else (self._by_table, self.by_sample)
        received = torch.empty(sum(splits[0]), dtype=sent.dtype, device=sent.device)
        return received, dist.all_to_all_single(received, sent, *splits, group=self._group, async_op=True)


class _PooledOnTheirWay(Awaitable[Tensor]):
    def __init__(self, local_embs: Tensor, exchange: _Exchange) -> None:
        super().__init__()
        self._local_embs, self._exchange = local_embs, exchange
        self._received, self._work = exchange.start(local_embs.detach().view(-1), forward=True)

    def _wait_impl(self) -> Tensor:
        self._work.wait()
        result: Tensor = _Pooled.apply(self._local_embs, self._received, self._exchange)
        return result


class _Pooled(Function):
    """From what was received to [local batch, columns of all ranks], as a function of what was sent."""

    @staticmethod
    def forward(ctx: Any, local_embs: Tensor, received: Tensor, exchange: _Exchange) -> Tensor:
        ctx.exchange, ctx.shape = exchange, local_embs.shape
        of_ranks = zip(received.split(exchange.by_sample), exchange.dims, strict=True)
        return torch.cat([of_rank.view(exchange.local_batch_size, dim) for of_rank, dim in of_ranks], dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        exchange: _Exchange = ctx.exchange
        sent = torch.empty(grad.numel(), dtype=grad.dtype, device=grad.device)
        of_ranks = zip(sent.split(exchange.by_sample), exchange.dims, strict=True)
        views = [of_rank.view(exchange.local_batch_size, dim) for of_rank, dim in of_ranks]
        torch._foreach_copy_(views, list(grad.split(exchange.dims, dim=1)))
        received, work = exchange.start(sent, forward=False)
        work.wait()
        if get_gradient_division():
            received.div_(len(exchange.dims))
        return received.view(ctx.shape), None, None
