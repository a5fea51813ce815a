"""A compute in progress: a snapshot on the training's stream, and the remaining work on another."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .layout import Layout
from .reports import Reports
from .state import State


class PendingMetrics:
    """The values of a pending compute: those at the time of its call, even if updates continue."""

    def __init__(self, layout: Layout, reports: Reports, state: State, local: bool, also: dict[str, Any]) -> None:
        """Starts a compute on the state after the current stream's work: a collective, unless local.

        local: of this rank only. also: values that exist already, appended last.
        """
        self._layout, self._reports, self._local, self._also = layout, reports, local, also
        self._shape = state.lifetime.shape
        self._is_reporting = local or layout.reports_everywhere or layout.my_rank == 0
        sums = torch.cat([state.lifetime.flatten(), state.window.flatten(), state.valid.flatten(), state.seen])
        samples = state.samples.clone() if layout.auc else None
        with _beside(sums.device):
            for snapshot in (sums, samples):
                if snapshot is not None and snapshot.is_cuda:
                    snapshot.record_stream(torch.cuda.current_stream())
            of_ranks = sums[None] if local else _gather(sums, layout)
            self._samples = samples[None] if samples is not None else None
            if samples is not None and not local:
                self._samples = _gather(samples, layout)
            self._sums = _start_reading(of_ranks)
            self._arrived = torch.cuda.Event() if sums.is_cuda else None
            if self._arrived is not None:
                self._arrived.record()
        if not self._is_reporting:
            self._samples = None
        self._values: dict[str, Any] | None = None

    def done(self) -> bool:
        """Whether the sums have reached the host, so that result() waits only for the sorting of AUC."""
        return self._arrived is None or self._arrived.query()

    def result(self) -> dict[str, Any]:
        """Returns the values by TorchRec's keys, as CPU tensors; on ranks that do not report, only throughput and state
        metrics. Waits for the device if necessary, but never for work of other ranks after they started the
        compute."""
        if self._values is None:
            if self._arrived is not None:
                self._arrived.synchronize()
            self._values = {**(self._of_sums() if self._is_reporting else {}), **self._also}
            self._samples = None
        return self._values

    def _of_sums(self) -> dict[str, Tensor]:
        layout, (tasks, slots) = self._layout, self._shape
        sizes = [tasks * slots, tasks * slots, tasks * (slots + 1), len(layout.auc_tasks)]
        lifetimes, windows, valid, seen = self._sums.split(sizes, dim=1)
        scope = "local_" if self._local else ""
        lifetime, window = (part.sum(0).view(tasks, slots) for part in (lifetimes, windows))
        has_batch = valid.sum(0).view(tasks, slots + 1)
        values = self._reports.of_sums(lifetime, window, has_batch, scope)
        if self._samples is not None:
            with _beside(self._samples.device, wait=False):
                values |= self._reports.of_samples(self._samples, seen.long().tolist(), has_batch, scope)
        return values


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _beside(device: torch.device, wait: bool = True) -> Any:
    """Returns a context whose GPU work runs on another stream, after the current stream's work so far."""
    if device.type != "cuda":
        return nullcontext()
    stream = _stream(device)
    if wait:
        stream.wait_stream(torch.cuda.current_stream(device))
    return torch.cuda.stream(stream)


def _gather(tensor: Tensor, layout: Layout) -> Tensor:
    """Returns the tensors of all ranks, [ranks, ...]."""
    if not (dist.is_available() and dist.is_initialized()):
        return tensor[None]
    of_ranks = tensor.new_empty(dist.get_world_size(layout.process_group), *tensor.shape)
    dist.all_gather(list(of_ranks.unbind()), tensor, group=layout.process_group)
    return of_ranks


def _start_reading(tensor: Tensor) -> Tensor:
    """Starts a copy to the host, which is complete after the current stream has reached it."""
    if not tensor.is_cuda:
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
