"""TorchRec's output dist of table-wise tables, reduced to one all-to-all each way.

TorchRec puts two autograd functions around the all-to-all, so that several can be in progress at once, joins them by a
dummy tensor, copies the vectors into a send buffer, and calls record_stream on the result. With only one sharding type
exchanged, there is nothing to join.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torchrec.distributed.comm_ops import get_gradient_division
from torchrec.distributed.embedding_sharding import EmbeddingShardingContext
from torchrec.distributed.sharding.tw_sharding import TwPooledEmbeddingDist
from torchrec.distributed.types import Awaitable

from ..cuda_graph import GraphedFunction
from .batch_size_cache import BatchSizeCache


class TrimmedOutputDist(nn.Module):
    """Replacement for a TwPooledEmbeddingDist, with bitwise the same results and gradients.

    `forward` launches the all-to-all; waiting for its result belongs on the same stream.
    """

    def __init__(self, stock: TwPooledEmbeddingDist, cuda_graph: bool = False) -> None:
        """stock: a dist that `can_replace` accepts. cuda_graph: replay the all-to-alls, and the kernels around them,
        for batches of the first batch's size."""
        super().__init__()
        self._cuda_graph = cuda_graph
        self._group, self.dims = stock._pg, stock._dim_sum_per_rank
        self._rank = dist.get_rank(self._group)
        self._exchanges = BatchSizeCache[_Exchange]()

    def graphed(self) -> list[GraphedFunction]:
        """Returns the graphs of both directions for batches of the first batch's size, if any."""
        first = self._exchanges.replayed
        return [] if first is None else first.graphed

    @staticmethod
    def can_replace(stock: nn.Module) -> bool:
        """Whether `stock` can be replaced: not if no other rank exchanges, vectors are quantised, or columns are
        reordered."""
        return (
            type(stock) is TwPooledEmbeddingDist
            and stock._codecs is None
            and not stock._callbacks
            and dist.get_world_size(stock._pg) > 1
        )

    def forward(self, local_embs: Tensor, sharding_ctx: EmbeddingShardingContext) -> Awaitable[Tensor]:
        """Returns an awaitable of [local batch, columns of all ranks]. local_embs: [global batch, own columns]."""
        divides, sizes = get_gradient_division(), tuple(sharding_ctx.batch_size_per_rank)
        make = partial(_Exchange, self._group, self.dims, sizes, self._rank, divides, local_embs.device)
        replay = _Exchange.replay if self._cuda_graph else None
        return VectorsOnTheirWay(local_embs, self._exchanges.get((divides, *sizes), local_embs.device, make, replay))


class _Exchange:
    """Splits, order and all-to-alls for batches of one size."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        dims: list[int],
        batch_sizes: tuple[int, ...],
        rank: int,
        divides: bool,
        device: torch.device,
    ) -> None:
        """divides: whether to divide the gradient by the number of ranks."""
        self._divides = divides
        self._group, self._ranks, self.rows = group, len(dims), batch_sizes[rank]
        self._by_table = [size * dims[rank] for size in batch_sizes]
        self._by_sample = [self.rows * dim for dim in dims]
        # Received blocks are [rank, sample, columns of the rank]; all numbers of columns are multiples of one width.
        self._width = math.gcd(*dims)
        order, first = [], 0
        for dim in dims:
            blocks = dim // self._width
            order.append(first + torch.arange(self.rows * blocks).view(self.rows, blocks))
            first += self.rows * blocks
        self._to_samples = torch.cat(order, dim=1).view(-1).to(device)
        self._to_ranks = torch.argsort(self._to_samples)
        self.graphed: list[GraphedFunction] = []

    def replay(self) -> None:
        """Replays both directions as CUDA graphs from now on."""
        forward, name = lambda local_embs: (self._start_forward(local_embs)(),), "the pooled vectors' all-to-all"
        self.graphed = [
            GraphedFunction(forward, name, self._group),
            GraphedFunction(lambda grad: (self._backward(grad),), "the all-to-all of their gradient", self._group),
        ]

    def start_forward(self, local_embs: Tensor) -> Callable[[], Tensor]:
        """Returns an awaitable of the columns of all ranks, by sample, from [global batch, columns of this rank]."""
        if not self.graphed:
            return self._start_forward(local_embs)
        (pooled,) = self.graphed[0](local_embs)
        return lambda: pooled

    def backward(self, grad: Tensor) -> Tensor:
        """Returns the flat gradient of the sent vectors, given the gradient of the received ones."""
        return self.graphed[1](grad)[0] if self.graphed else self._backward(grad)

    def _start_forward(self, local_embs: Tensor) -> Callable[[], Tensor]:
        received, work = self._exchange(local_embs.view(-1), self._by_sample, self._by_table)

        def finish() -> Tensor:
            work.wait()
            return self._reordered(received, self._to_samples)

        return finish

    def _backward(self, grad: Tensor) -> Tensor:
        sent = self._reordered(grad, self._to_ranks).view(-1)
        received, work = self._exchange(sent, self._by_table, self._by_sample)
        work.wait()
        return received.div_(self._ranks) if self._divides else received

    def _exchange(self, sent: Tensor, receive_splits: list[int], send_splits: list[int]) -> tuple[Tensor, Any]:
        """Starts the all-to-all; returns the receive buffer, and the work to wait for."""
        received = torch.empty(sum(receive_splits), dtype=sent.dtype, device=sent.device)
        return received, dist.all_to_all_single(
            received, sent, receive_splits, send_splits, group=self._group, async_op=True
        )

    def _reordered(self, values: Tensor, order: Tensor) -> Tensor:
        """Reorders in one kernel; a cat or a copy per rank would need several, or make the host assemble lists of
        views."""
        return values.reshape(-1, self._width).index_select(0, order)


class VectorExchange(Protocol):
    """The exchange of looked-up vectors, each way, on the current stream."""

    rows: int
    """Number of rows that arrive: samples, or ids if vectors are not pooled."""

    def start_forward(self, local_embs: Tensor) -> Callable[[], Tensor]:
        """Sends them; returns what waits for those of the local batch, in rows of any width. local_embs: what this rank
        has looked up for all ranks, [samples or ids, columns of this rank]."""

    def backward(self, grad: Tensor) -> Tensor:
        """Returns the flat gradient of the sent vectors, given the gradient of the received ones."""


class VectorsOnTheirWay(Awaitable[Tensor]):
    """The vectors of the local batch, [rows, columns], as a function of those sent."""

    def __init__(self, local_embs: Tensor, exchange: VectorExchange) -> None:
        """Sends them. local_embs: see VectorExchange."""
        super().__init__()
        self._local_embs, self._exchange = local_embs, exchange
        self._finish = exchange.start_forward(local_embs.detach())

    def _wait_impl(self) -> Tensor:
        vectors: Tensor = _Vectors.apply(self._local_embs, self._finish, self._exchange)
        return vectors.view(self._exchange.rows, -1)


class _Vectors(Function):
    """The received vectors as a function of the sent ones.

    The returned tensor is created within, and is not a view: autograd refuses in-place changes of anything else.
    """

    @staticmethod
    def forward(ctx: Any, local_embs: Tensor, finish: Callable[[], Tensor], exchange: VectorExchange) -> Tensor:
        ctx.exchange, ctx.shape = exchange, local_embs.shape
        return finish()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        exchange: VectorExchange = ctx.exchange
        return exchange.backward(grad).view(ctx.shape), None, None
