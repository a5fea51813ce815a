"""The interface of a pipeline to the training loop, and of its options to a configuration."""

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from dlrm_bench.dlrm.dense.tallies import Tallies
from dlrm_bench.pipeline.state import StateBlocks


class Options(Protocol):
    """Options of one pipeline; each pipeline defines its own."""

    @property
    def needs_gpu(self) -> str | None:
        """The error message to raise without a GPU; None if these options work without one."""
        ...


def check_device(options: Options, device: torch.device) -> None:
    """Raises ValueError if the options need a GPU and `device` is not one; allocates nothing."""
    if device.type != "cuda" and options.needs_gpu is not None:
        raise ValueError(options.needs_gpu)


Capacities = dict[str, dict[str, int]]
"""Sizes by name, for each kind of iteration."""


class StepMetrics(Protocol):
    """Metrics of training batches, in sums on the device."""

    def update(self, predictions: Tensor, labels: Tensor) -> None:
        """Adds a batch, on the current stream: predicted probabilities and labels, fp32 [B]. A CUDA graph can hold it
        after a first call with the same B."""
        ...

    def reset(self) -> None:
        """Forgets all batches, on the current stream; the memory of the sums stays, for graphs that hold it."""
        ...


class Pipeline(Protocol):
    """A sharded model with its optimizer and its schedule, ready to train.

    The reader thread calls `prepare`, so that its cost stays off the launching thread. All ranks make the same calls in
    the same order.
    """

    def prepare(self, batch: Any) -> Any:
        """Returns the batch in the form for `train_step` and `evaluate`, still in (pinned) host memory."""
        ...

    def warm_up(self, evaluates: bool) -> None:
        """Runs everything that takes longer the first time, such as captures, before the first batch; afterwards,
        weights and optimizer state are bitwise unchanged. Collective.

        evaluates: whether the run will evaluate.
        """
        ...

    def measure(self, metrics: StepMetrics) -> None:
        """Adds the batch of every training step from now on to `metrics`: within the graph, if one holds the iteration
        of the static pipeline. Comes before `warm_up`, after which `metrics` are empty."""
        ...

    def train_step(self, batches: Iterator[Any]) -> Tensor:
        """Trains on the next batch; may read further ahead. Returns this rank's mean loss, detached, on the device; its
        memory may be reused a million steps later.

        Raises StopIteration when `batches` has ended and every batch read has been trained on.
        """
        ...

    def evaluate(self, batches: Iterator[Any]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields logits [B] and labels [B] of each batch, in order, on the device. Training can continue afterwards."""
        ...

    def set_learning_rate(self, value: float) -> None:
        """Sets the learning rate of tables and dense weights from the next step on, the same on all ranks. ValueError
        for an invalid rate."""
        ...

    def capacities(self) -> Capacities:
        """Returns the capacities of the next iterations that grow with the batches so far, by kind of iteration, the
        same on all ranks; empty if no shape depends on earlier batches. The bits of sums depend on shapes."""
        ...

    def go_on_after(self, iterations: int, capacities: Capacities) -> None:
        """Continues a training, in a run that resumes a checkpoint; comes before `warm_up`. Collective.

        iterations: number of iterations trained so far, on which random numbers depend. capacities: the pipeline's own
        after these iterations, or none. ValueError for capacities that no pipeline has.
        """
        ...

    def tallies(self) -> Tallies:
        """Returns this rank's counts of saturated and non-finite numbers so far, on the device. If any was not finite,
        no weight on any rank changes from the next step on."""
        ...

    def state_blocks(self) -> StateBlocks:
        """Returns weights and optimizer state after the last step, as this rank holds them. Collective; waits for the
        device.

        Table blocks are the trained memory itself. Dense tensors may be copies: a caller that writes to blocks passes
        them to `take_blocks` afterwards.
        """
        ...

    def take_blocks(self, blocks: StateBlocks) -> None:
        """Continues from the values written to `blocks`, the last result of `state_blocks`. Collective."""
        ...

    def describe(self) -> dict[str, Any]:
        """Returns the record's facts about this pipeline beyond the configuration, such as the sharding plan.
        `paused_after`: the numbers of iterations after which it paused to capture graphs or to allocate memory.

        Collective, after training.
        """
        ...

    def close(self) -> None:
        """Frees resources that must not outlive the process group, such as graphs with collectives; the last call.

        NCCL does not release a communicator while a graph that captured it exists.
        """
        ...
