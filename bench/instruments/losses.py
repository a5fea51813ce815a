"""The loss of every iteration, and the pipeline's tallies, read without stopping the GPU."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from dlrm_bench.dlrm.dense.tallies import GRADIENTS, Tallies


class NonFiniteError(ValueError):
    """A number is not finite: all pipelines leave all weights unchanged from then on."""

    def __init__(self, message: str, known: list[float], whole: int | None) -> None:
        """known: all losses read so far, including those of later iterations. whole: the number of iterations whose
        updates the weights hold; None if they hold a part of an iteration's update."""
        super().__init__(message)
        self.known, self.whole = known, whole

    @classmethod
    def of_loss(cls, iteration: int, loss: float, known: list[float], partly: bool) -> "NonFiniteError":
        """iteration: counted from 1. partly: whether gradients were not finite before it."""
        weights = "with a part of an update" if partly else f"with the weights as iteration {iteration - 1} left them"
        message = f"the loss of iteration {iteration} is {loss}: the run stops, {weights}"
        return cls(message, known, None if partly else iteration - 1)

    @classmethod
    def of_tensors(cls, names: list[str], first: int, last: int, known: list[float]) -> "NonFiniteError":
        """first, last: the iterations since the last check, counted from 1."""
        return cls(
            f"not finite in iteration {first} to {last}, with finite losses: {', '.join(names)}. The run stops: all "
            "weights are finite, and unchanged from the next iteration on",
            known,
            None,
        )


class LossHistory:
    """Global mean losses, collected on the device and averaged over the ranks every `interval` iterations.

    The averages are copied to pinned memory behind the queued work and are read one interval later, so that the
    launching thread never waits for the GPU. All ranks see the same averages, hence stop alike.
    """

    def __init__(
        self, device: torch.device, interval: int, before: int = 0, tallies: Callable[[], Tallies] | None = None
    ) -> None:
        """Sets up the first average, on a GPU. Collective. before: number of earlier iterations, for messages. tallies:
        the pipeline's, which travel with the losses."""
        self._before, self._tallies = before, tallies
        self._names: tuple[str, ...] = ()
        self.too_large: dict[str, int] = {}
        """Counts of numbers too large for their rounded format, by tensor, on all ranks until the last read; counts
        above 0 only, to seven digits."""
        self._device = device
        self._interval = interval
        self._pending: list[Tensor] = []
        self._in_flight: tuple[Tensor, int, torch.cuda.Event | None] | None = None
        self._values: list[float] = []
        if device.type == "cuda":
            # The first average sets up kernels, communicator and pinned memory: in training it would be an iteration of
            # 12 to 19 ms (4 x H200).
            self._pending = [torch.zeros((), device=device) for _ in range(interval)]
            self._average()
            self._receive()
            self._values.clear()

    def add(self, loss: Tensor) -> None:
        """Adds one iteration's mean loss of this rank, a detached scalar. Collective at every `interval`-th call.

        Raises NonFiniteError on every rank if a loss of the previous interval, or anything tallied, was not finite.
        """
        self._pending.append(loss)
        if len(self._pending) == self._interval:
            self._collect()
            self._average()

    @property
    def known(self) -> list[float]:
        """Returns the losses read so far; for any thread."""
        return list(self._values)

    def finish(self) -> list[float]:
        """Waits for all losses and returns them. Collective, and raises NonFiniteError like `add`."""
        self._collect()
        if self._pending:
            self._average()
            self._collect()
        return self._values

    def _average(self) -> None:
        losses = torch.stack(self._pending).float()
        self._pending = []
        count = len(losses)
        if self._tallies is not None:
            tallies = self._tallies()
            self._names = tallies.names
            losses = torch.cat([losses, tallies.counts.flatten().float()])
        dist.all_reduce(losses)
        losses[:count] /= dist.get_world_size()
        if self._device.type == "cuda":
            host = torch.empty(losses.shape, pin_memory=True).copy_(losses, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
            self._in_flight = (host, count, copied)
        else:
            self._in_flight = (losses, count, None)

    def _collect(self) -> None:
        first = len(self._values)
        received = self._receive()
        if received is None:
            return
        losses, counts = received
        self.too_large = {name: int(large) for name, (large, _) in counts.items() if large}
        bad = (~losses.isfinite()).nonzero()
        if len(bad):
            at = int(bad[0])
            partly = any(counts[name][1] for name in counts if name.endswith(GRADIENTS))
            raise NonFiniteError.of_loss(self._before + first + at + 1, losses[at].item(), self._values, partly)
        if names := [name for name, (_, not_finite) in counts.items() if not_finite]:
            first, last = self._before + first + 1, self._before + len(self._values)
            raise NonFiniteError.of_tensors(names, first, last, self._values)

    def _receive(self) -> tuple[Tensor, dict[str, tuple[float, float]]] | None:
        """Waits for the losses in flight and keeps them; returns them, and the tallies beside them by name."""
        if self._in_flight is None:
            return None
        host, count, copied = self._in_flight
        self._in_flight = None
        if copied is not None:
            copied.synchronize()
        self._values += host[:count].tolist()
        pairs = ((large, not_finite) for large, not_finite in host[count:].view(-1, 2).tolist())
        return host[:count], dict(zip(self._names, pairs, strict=True))
