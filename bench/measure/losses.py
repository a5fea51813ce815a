"""The loss of every iteration, read without stopping the GPU."""

import torch
import torch.distributed as dist
from torch import Tensor


class NonFiniteLossError(ValueError):
    """A loss that is no number: from its iteration on, all pipelines leave all weights as they are."""

    def __init__(self, iteration: int, loss: float, known: list[float]) -> None:
        """iteration: counted from 1. known: all losses read so far, this one and later ones included."""
        super().__init__(
            f"the loss of iteration {iteration} is {loss}: the run stops, with the weights as iteration "
            f"{iteration - 1} left them"
        )
        self.iteration, self.known = iteration, known


class LossHistory:
    """Global mean losses, collected on the device and averaged over the ranks every `interval` iterations.

    The averages are copied to pinned memory after the work that is queued already and are read one interval later, so
    that the launching thread never waits for the GPU. All ranks see the same averages, hence stop alike.
    """

    def __init__(self, device: torch.device, interval: int, before: int = 0) -> None:
        """Sets up the first average, on a GPU. Collective. before: iterations before the first, for messages."""
        self._before = before
        self._device = device
        self._interval = interval
        self._pending: list[Tensor] = []
        self._in_flight: tuple[Tensor, torch.cuda.Event | None] | None = None
        self._values: list[float] = []
        if device.type == "cuda":
            # Kernels, communicator and pinned memory of an average are set up at the first one: in the training that
            # would be an iteration of 12 to 19 ms (4 x H200).
            self._pending = [torch.zeros((), device=device) for _ in range(interval)]
            self._average()
            self._collect()
            self._values.clear()

    def add(self, loss: Tensor) -> None:
        """Adds one iteration's mean loss of this rank, a detached scalar. Collective at every `interval`-th call.

        Raises NonFiniteLossError on every rank if a loss of the interval before was not finite.
        """
        self._pending.append(loss)
        if len(self._pending) == self._interval:
            self._collect()
            self._average()

    @property
    def known(self) -> list[float]:
        """The losses read so far; any thread may ask."""
        return list(self._values)

    def finish(self) -> list[float]:
        """All losses so far; waits for them. Collective, and raises NonFiniteLossError like `add`."""
        self._collect()
        if self._pending:
            self._average()
            self._collect()
        return self._values

    def _average(self) -> None:
        losses = torch.stack(self._pending).float()
        self._pending = []
        dist.all_reduce(losses)
        losses /= dist.get_world_size()
        if self._device.type == "cuda":
            host = torch.empty(losses.shape, pin_memory=True).copy_(losses, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
            self._in_flight = (host, copied)
        else:
            self._in_flight = (losses, None)

    def _collect(self) -> None:
        if self._in_flight is None:
            return
        host, copied = self._in_flight
        self._in_flight = None
        if copied is not None:
            copied.synchronize()
        first = len(self._values) + 1
        self._values += host.tolist()
        bad = (~host.isfinite()).nonzero()
        if len(bad):
            at = int(bad[0])
            raise NonFiniteLossError(self._before + first + at, host[at].item(), self._values)
