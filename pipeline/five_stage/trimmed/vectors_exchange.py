"""One all-to-all of vectors from the ranks that have looked them up, and one of their gradient the other way.

TorchRec puts two autograd functions around an all-to-all, so that several can be under way at once, joins them by a
dummy tensor, copies what it sends into a buffer of its own, and calls record_stream on the result. Here is one
function, and before or after the all-to-all one gather, for batches of one size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torchrec.distributed.types import Awaitable

from ...cuda_graph import GraphedFunction


@dataclass(frozen=True, slots=True)
class Order:
    """An order of blocks of `width` elements, and the one that takes it back."""

    width: int
    index: Tensor
    inverse: Tensor

    @staticmethod
    def of(index: Tensor, width: int) -> "Order":
        """index: which block comes first, second and so on."""
        return Order(width, index, torch.argsort(index))

    def apply(self, values: Tensor, back: bool = False) -> Tensor:
        """One kernel, where a cat or a copy for each rank needs several or makes the host assemble lists of views."""
        return values.reshape(-1, self.width).index_select(0, self.inverse if back else self.index)


class Exchange:
    """Who gets how much, in which order, and the all-to-alls, for batches of one size."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        send_splits: list[int],
        receive_splits: list[int],
        shape: tuple[int, int],
        before: Order | None,
        after: Order | None,
        divides: bool,
    ) -> None:
        """Splits: elements for and from each rank, of the vectors. before, after: the order to send them in, and that
        of what is received. shape: of the result. divides: the gradient by the number of ranks."""
        self._group, self._send_splits, self._receive_splits = group, send_splits, receive_splits
        self._before, self._after, self._divides, self.shape = before, after, divides, shape
        self.graphed: list[GraphedFunction] = []

    def replay(self) -> None:
        """Both ways are replayed as CUDA graphs from now on."""
        self.graphed = [
            GraphedFunction(lambda local_embs: (self._start_forward(local_embs)(),), "the vectors' all-to-all"),
            GraphedFunction(lambda grad: (self._backward(grad),), "the all-to-all of their gradient"),
        ]

    def start_forward(self, local_embs: Tensor) -> Callable[[], Tensor]:
        """Returns an awaitable of what comes of the vectors of this rank, in order."""
        if not self.graphed:
            return self._start_forward(local_embs)
        (vectors,) = self.graphed[0](local_embs)
        return lambda: vectors

    def backward(self, grad: Tensor) -> Tensor:
        """The gradient by what was given, flat, from that by what came of it."""
        return self.graphed[1](grad)[0] if self.graphed else self._backward(grad)

    def _start_forward(self, local_embs: Tensor) -> Callable[[], Tensor]:
        sent = local_embs if self._before is None else self._before.apply(local_embs)
        received, work = self._exchange(sent.view(-1), self._receive_splits, self._send_splits)

        def finish() -> Tensor:
            work.wait()
            return received if self._after is None else self._after.apply(received)

        return finish

    def _backward(self, grad: Tensor) -> Tensor:
        sent = grad.contiguous() if self._after is None else self._after.apply(grad, back=True)
        received, work = self._exchange(sent.view(-1), self._send_splits, self._receive_splits)
        work.wait()
        received = received if self._before is None else self._before.apply(received, back=True)
        return received.div_(len(self._send_splits)) if self._divides else received

    def _exchange(self, sent: Tensor, receive_splits: list[int], send_splits: list[int]) -> tuple[Tensor, Any]:
        """Starts the all-to-all; returns what is received, and the work to wait for."""
        received = torch.empty(sum(receive_splits), dtype=sent.dtype, device=sent.device)
        return received, dist.all_to_all_single(
            received, sent, receive_splits, send_splits, group=self._group, async_op=True
        )


class VectorsOnTheirWay(Awaitable[Tensor]):
    """The all-to-all of what one lookup gave; its wait belongs on the same stream."""

    def __init__(self, local_embs: Tensor, exchange: Exchange) -> None:
        super().__init__()
        self._local_embs, self._exchange = local_embs, exchange
        self._finish = exchange.start_forward(local_embs.detach())

    def _wait_impl(self) -> Tensor:
        vectors: Tensor = _Vectors.apply(self._local_embs, self._finish, self._exchange)
        return vectors.view(self._exchange.shape)


class _Vectors(Function):
    """What arrives as a function of what was sent for it.

    The tensor that it returns is made within, and no view: autograd refuses in-place changes of anything else.
    """

    @staticmethod
    def forward(ctx: Any, local_embs: Tensor, finish: Callable[[], Tensor], exchange: Exchange) -> Tensor:
        ctx.exchange, ctx.shape = exchange, local_embs.shape
        return finish()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        exchange: Exchange = ctx.exchange
        return exchange.backward(grad).view(ctx.shape), None, None
