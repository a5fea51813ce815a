"""The device memory that persists between updates, at fixed addresses."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torchrec.metrics.rec_metric import MAX_BUFFER_COUNT

from .layout import SUMS, Layout

MAX_PARTS = 64
"""Maximum number of thread blocks that share the batch of one task."""


class State(NamedTuple):
    """Tensors for T tasks with K slots each, and A tasks whose last C samples AUC keeps."""

    lifetime: Tensor
    """float64 [T, K]: sums since the start."""
    window: Tensor
    """float64 [T, K]: sums over the window."""
    batches: Tensor
    """float64 [1000, T, K]: the contribution of each batch of the window; a ring of TorchRec's MAX_BUFFER_COUNT
    batches."""
    batch_sizes: Tensor
    """int32 [1000, T, K]: the number of samples of each of these batches."""
    cursors: Tensor
    """int64 [3, T, K]: the index of the window's first batch, its number of batches, and its number of samples."""
    valid: Tensor
    """int32 [T, K + 1]: whether any batch was accepted, by slot and, last, by AUC; used if updates are validated."""
    samples: Tensor
    """float32 [A, 3, C]: predictions, labels and weights, a ring for each task of AUC."""
    seen: Tensor
    """int64 [A]: total number of samples written to the ring; the next one goes to seen % C."""


class Scratch(NamedTuple):
    """Memory that an update needs in addition to the state; not saved in checkpoints."""

    windows: Tensor
    """int64 [K]: the window of each slot, in samples."""
    auc_rows: Tensor
    """int32 [T]: the ring of each task, -1 for none."""
    partial_sums: Tensor
    """float64 [T, 64, 8]."""
    arrivals: Tensor
    """int32 [T]: the number of thread blocks that have written their sums; zero between updates."""


def empty_state(layout: Layout) -> State:
    """Returns a state before the first update, on the CPU."""
    tasks, slots = len(layout.tasks), len(layout.sources)
    return State(
        lifetime=torch.zeros(tasks, slots, dtype=torch.float64),
        window=torch.zeros(tasks, slots, dtype=torch.float64),
        batches=torch.zeros(MAX_BUFFER_COUNT, tasks, slots, dtype=torch.float64),
        batch_sizes=torch.zeros(MAX_BUFFER_COUNT, tasks, slots, dtype=torch.int32),
        cursors=torch.zeros(3, tasks, slots, dtype=torch.int64),
        valid=torch.zeros(tasks, slots + 1, dtype=torch.int32),
        samples=torch.zeros(len(layout.auc_tasks), 3, layout.auc_window, dtype=torch.float32),
        seen=torch.zeros(len(layout.auc_tasks), dtype=torch.int64),
    )


def scratch_of(layout: Layout) -> Scratch:
    """Returns the scratch memory for a layout, on the CPU."""
    rows = [layout.auc_tasks.index(task) if task in layout.auc_tasks else -1 for task in range(len(layout.tasks))]
    return Scratch(
        windows=torch.tensor(layout.windows, dtype=torch.int64),
        auc_rows=torch.tensor(rows, dtype=torch.int32),
        partial_sums=torch.zeros(len(layout.tasks), MAX_PARTS, len(SUMS), dtype=torch.float64),
        arrivals=torch.zeros(len(layout.tasks), dtype=torch.int32),
    )


def resized_rings(samples: Tensor, seen: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """Returns State.samples and State.seen for rings of another capacity, with the last samples that both can hold.

    samples: float32 [A, 3, C]. seen: int64 [A].
    """
    resized = samples.new_zeros(*samples.shape[:2], capacity)
    kept = seen.clamp(max=min(samples.shape[-1], capacity))
    for ring, (total, count) in enumerate(zip(seen.tolist(), kept.tolist(), strict=True)):
        places = torch.arange(total - count, total, device=samples.device) % samples.shape[-1]
        resized[ring, :, :count] = samples[ring][:, places]
    return resized, kept
