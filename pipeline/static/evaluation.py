"""Forward passes beside the training: batches are copied one ahead of the one that is evaluated."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from dlrm_bench.dlrm.data.batch import Batch
from dlrm_bench.dlrm.ranks import Ranks
from dlrm_bench.pipeline.static.graphs import Graphs

EAGER_BATCHES = 2
"""Batches that are evaluated eagerly before the capture: cuBLAS, NCCL and Triton set themselves up in them."""


class EvaluationSlot(Protocol):
    """The memory of an evaluated batch on the device."""

    batch: Batch


Slot = TypeVar("Slot", bound=EvaluationSlot)


class Evaluation(Generic[Slot]):
    """A forward pass over two slots in turn, which are its own: batches of the training in flight keep theirs.

    It may share other memory with the training (the dense network's x0 and activations): both run in order on one
    stream, and either writes all that it reads except for weights. Its graphs have a memory pool of their own.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        forward: Callable[[Slot], Tensor],
        ranks: Ranks,
        graphs: Callable[[str, Sequence[Callable[[], None]]], Graphs] | None,
    ) -> None:
        """slots: two. forward: returns logits [B] of a slot's batch. graphs: makes graphs from a name and
        functions; None evaluates eagerly."""
        self.slots, self._forward = slots, forward
        self._logits = [torch.zeros_like(slot.batch.labels) for slot in slots]
        works = [partial(self._evaluate, i) for i in range(len(slots))]
        self._works, self.graphs = works, graphs("evaluation", works) if graphs else None
        self._evaluated = 0
        self._stream: torch.cuda.Stream | None = None
        if ranks.device.type == "cuda":
            self._stream = torch.cuda.Stream()
            self._copied = [torch.cuda.Event() for _ in slots]
            self._read = [torch.cuda.Event() for _ in slots]

    def run(self, batches: Iterator[Batch]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields logits, fp32 [B], and labels of each batch; reads one batch ahead."""
        i, batch = 0, next(batches, None)
        if batch is not None:
            self._copy(batch, i)
        while batch is not None:
            evaluated = self._run(i)
            batch = next(batches, None)
            if batch is not None:
                self._copy(batch, 1 - i)
            yield evaluated
            i = 1 - i

    def _run(self, i: int) -> tuple[Tensor, Tensor]:
        """Returns logits and labels of slot i's batch, to keep."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_event(self._copied[i])
        if self.graphs is not None and self._evaluated >= EAGER_BATCHES:
            self.graphs.run(i)
        else:
            self._works[i]()
        self._evaluated += 1
        evaluated = self._logits[i].clone(), self.slots[i].batch.labels.clone()
        if self._stream is not None:
            self._read[i].record()
        return evaluated

    def _evaluate(self, i: int) -> None:
        with torch.no_grad():
            self._logits[i].copy_(self._forward(self.slots[i]))

    def _copy(self, batch: Batch, i: int) -> None:
        """Starts the copy from pinned memory, after the last reader of the slot."""
        storage = self.slots[i].batch.storage
        if self._stream is None:
            storage.copy_(batch.storage)
            return
        self._stream.wait_event(self._read[i])
        with torch.cuda.stream(self._stream):
            storage.copy_(batch.storage, non_blocking=True)
            self._copied[i].record()
