"""TorchRec's output dist of table-wise tables without what one all-to-all each way does not need.

TorchRec puts two autograd functions around the all-to-all, so that several can be under way at once, joins them by a
dummy tensor, copies what it sends into a buffer of its own, and calls record_stream on the result. Where tables of one
sharding type alone are exchanged there is nothing to join.
"""

import math
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
        self._exchanges: dict[tuple[int, ...], _Exchange] = {}

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
        sizes = tuple(sharding_ctx.batch_size_per_rank)
        exchange = self._exchanges.get(sizes)
        if exchange is None:
            exchange = _Exchange(self._group, self._dims, sizes, self._rank, local_embs.device)
            self._exchanges = {sizes: exchange}  # of the last sizes alone: they hardly ever change
        return _PooledOnTheirWay(local_embs, exchange)


class _Exchange:
    """Who gets how much, in which order, and the all-to-alls, for batches of one size."""

    def __init__(
        self, group: dist.ProcessGroup, dims: list[int], batch_sizes: tuple[int, ...], rank: int, device: torch.device
    ) -> None:
        self._group, self.ranks, self.local_batch_size = group, len(dims), batch_sizes[rank]
        self._by_table = [size * dims[rank] for size in batch_sizes]
        self._by_sample = [self.local_batch_size * dim for dim in dims]
        # What comes from the ranks is [rank, sample, columns of the rank]; all columns are multiples of one width.
        self._width = math.gcd(*dims)
        order, first = [], 0
        for dim in dims:
            blocks = dim // self._width
            order.append(first + torch.arange(self.local_batch_size * blocks).view(self.local_batch_size, blocks))
            first += self.local_batch_size * blocks
        self._to_samples = torch.cat(order, dim=1).view(-1).to(device)
        self._to_ranks = torch.argsort(self._to_samples)

    def start(self, sent: Tensor, forward: bool) -> tuple[Tensor, Any]:
        """What is received, and the work to wait for. sent: flat."""
        splits = (self._by_sample, self._by_table) if forward else (self._by_table, self._by_sample)
        received = torch.empty(sum(splits[0]), dtype=sent.dtype, device=sent.device)
        return received, dist.all_to_all_single(received, sent, *splits, group=self._group, async_op=True)

    def by_sample(self, received: Tensor) -> Tensor:
        """[local batch, columns of all ranks] from what all ranks sent."""
        return self._reordered(received, self._to_samples).view(self.local_batch_size, -1)

    def by_rank(self, grad: Tensor) -> Tensor:
        """What to send to each rank, flat: the other way round."""
        return self._reordered(grad, self._to_ranks).view(-1)

    def _reordered(self, values: Tensor, order: Tensor) -> Tensor:
        """One kernel, where a cat or a copy for each rank needs several or makes the host assemble lists of views."""
        return values.reshape(-1, self._width).index_select(0, order)


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
        return exchange.by_sample(received)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        exchange: _Exchange = ctx.exchange
        received, work = exchange.start(exchange.by_rank(grad), forward=False)
        work.wait()
        if get_gradient_division():
            received.div_(exchange.ranks)
        return received.view(ctx.shape), None, None
