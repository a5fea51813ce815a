"""Forward passes between training iterations, each in parallel with the input dist of the next batch."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from dlrm_bench.dlrm.data.batch import Batch
from dlrm_bench.pipeline.static.fetch import BatchFetcher
from dlrm_bench.pipeline.static.graphs import Graphs
from dlrm_bench.pipeline.static.iteration import Iteration, Slot
from dlrm_bench.pipeline.static.streams import IterationStreams

EAGER_BATCHES = 2
"""Batches that are evaluated eagerly before the capture, in which cuBLAS, NCCL and Triton initialize themselves."""


class Evaluation:
    """A forward pass that alternates between two slots of its own: training batches in flight keep their slots.

    It may share other memory with the training (the dense network's x0 and activations): both run in order on one
    stream, and each writes everything that it reads except weights. Its graphs have a separate memory pool.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        iteration: Iteration,
        fetcher: BatchFetcher,
        streams: IterationStreams,
        graphs: Callable[[str, Sequence[Callable[[], None]]], Graphs] | None,
    ) -> None:
        """slots: two. fetcher, streams: the iteration's. graphs: makes Graphs from a name and functions; None to
        evaluate eagerly."""
        self.slots, self._iteration, self._fetcher, self._streams = slots, iteration, fetcher, streams
        self._logits = [torch.zeros_like(slot.batch.labels) for slot in slots]
        works = [partial(self._evaluate, i) for i in range(len(slots))]
        self._works, self.graphs = works, graphs("evaluation", works) if graphs else None
        self._evaluated = 0

    def run(self, batches: Iterator[Batch]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields logits, fp32 [B], and labels of each batch; reads one batch ahead."""
        i, batch = 0, next(batches, None)
        if batch is not None:
            self._launch(partial(self._iteration.input_dist, self.slots[i]), batch)
        while batch is not None:
            batch = next(batches, None)
            self._launch(partial(self._run, i), batch)
            yield self._logits[i].clone(), self.slots[i].batch.labels.clone()
            i = 1 - i

    def _launch(self, work: Callable[[], None], batch: Batch | None) -> None:
        """Launches the fetch of `batch` and its input dist; None at the end: distributes the current ids again."""
        self._streams.limit_run_ahead()
        self._fetcher.name(batch)
        work()
        self._streams.end_iteration()

    def _run(self, i: int) -> None:
        if self.graphs is not None and self._evaluated >= EAGER_BATCHES:
            self.graphs.run(i)
        else:
            self._works[i]()
        self._evaluated += 1

    def _evaluate(self, i: int) -> None:
        with torch.no_grad():
            self._logits[i].copy_(self._iteration.evaluate(self.slots[i], self.slots[1 - i]))
