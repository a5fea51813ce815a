"""An update in plain PyTorch: the CPU path, and the reference for the kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .layout import Layout
from .state import Scratch, State


class Signals(NamedTuple):
    """Labels, predictions and weights of one task: one-dimensional, of equal length, of any real dtype."""

    labels: Tensor
    predictions: Tensor
    weights: Tensor


def plain_update(layout: Layout, state: State, scratch: Scratch, batch: Sequence[Signals]) -> None:
    """Adds one batch to the state. batch: one entry per task; a task without samples stays unchanged."""
    for task, signals in enumerate(batch):
        if signals.labels.numel() and not (layout.validate and not signals.weights.count_nonzero()):
            _add_to_sums(layout, state, scratch, task, signals)
            row = int(scratch.auc_rows[task])
            if row >= 0:
                _keep_samples(state, row, signals)
            if layout.validate:
                state.valid[task, :-1] = 1
                state.valid[task, -1] |= int(row >= 0)


def batch_sums(signals: Signals, eta: float, threshold: float) -> Tensor:
    """Returns a batch's sums in the order of SUMS, float64 [8]; formulas as in torchrec.metrics, in float64."""
    labels, predictions, weights = (signal.double() for signal in signals)
    inside = predictions.clamp(eta, 1 - eta)
    terms = (
        -weights * labels * torch.log2(inside) - weights * (1.0 - labels) * torch.log2(1.0 - inside),
        weights,
        weights * labels,
        weights * (1.0 - labels),
        predictions * weights,
        weights * torch.square(labels - predictions),
        weights * torch.square(labels),
        weights * ((predictions >= threshold) == labels),
    )
    return torch.stack([term.sum() for term in terms])


def _add_to_sums(layout: Layout, state: State, scratch: Scratch, task: int, signals: Signals) -> None:
    """Adds in the order of TorchRec's WindowBuffer, so that rounding is the same too."""
    added = batch_sums(signals, layout.eta, layout.threshold)[list(layout.sources)]
    size = signals.labels.numel()
    window = state.window[task]
    first, count, used = state.cursors[:, task]
    most = len(state.batches)
    slots = torch.arange(len(added), device=added.device)

    def leave_out(of: Tensor) -> None:
        window.sub_(torch.where(of, state.batches[first, task, slots], 0.0))
        used.sub_(torch.where(of, state.batch_sizes[first, task, slots], 0))
        first.copy_(torch.where(of, (first + 1) % most, first))
        count.sub_(of.long())

    state.lifetime[task] += added
    leave_out(count == most)
    last = (first + count) % most
    state.batches[last, task, slots] = added
    state.batch_sizes[last, task, slots] = size
    window += added
    used += size
    count += 1
    while (over := used > scratch.windows).any():
        leave_out(over)


def _keep_samples(state: State, row: int, signals: Signals) -> None:
    """Writes the last samples of the batch to a task's ring."""
    capacity, size = state.samples.shape[-1], signals.labels.numel()
    kept = min(size, capacity)
    places = (state.seen[row] + torch.arange(size - kept, size, device=state.seen.device)) % capacity
    for ring, signal in zip(state.samples[row], (signals.predictions, signals.labels, signals.weights), strict=True):
        ring[places] = signal[size - kept :].float()
    state.seen[row] += size
