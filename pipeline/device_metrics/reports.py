"""From sums to values under TorchRec's keys: by the formulas of TorchRec's own computations, on the host."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torchrec.metrics.metrics_namespace import compose_metric_key

from .layout import Layout, Slots


def sum_reports(layout: Layout, lifetime: Tensor, window: Tensor, valid: Tensor, scope: str) -> dict[str, Tensor]:
    """Values of all metrics but AUC.

    lifetime, window: float64 [T, K] on the CPU, over all ranks. valid: [T, K + 1], nonzero where any batch was taken;
    elsewhere values are 0 if updates are validated. scope: what keys of the metric's name begin with, "local_" or "".
    """
    values = {}
    for slots in layout.metrics:
        tasks = list(slots.tasks)
        # The computation of one task knows the formula; states of all tasks take its states' place.
        computation: Any = copy.copy(slots.metric._metrics_computations[0])
        for slot, state in enumerate(slots.states, slots.first):
            setattr(computation, state, lifetime[tasks, slot])
            setattr(computation, computation.get_window_state_name(state), window[tasks, slot])
        has_batch = valid[tasks, slots.first] != 0
        for report in computation._compute():
            of_tasks = torch.where(has_batch, report.value, 0.0) if layout.validate else report.value
            values.update(_keyed(layout, slots, report, of_tasks, scope))
    return values


def auc_reports(layout: Layout, samples: Tensor, seen: list[list[int]], valid: Tensor, scope: str) -> dict[str, Tensor]:
    """AUC of each task, from the same samples in the same order as TorchRec's, by its own function.

    samples: float32 [ranks, A, 3, C] on any device. seen: by rank and ring. valid: as in `sum_reports`.
    """
    slots = layout.auc
    assert slots is not None
    computation: Any = copy.copy(slots.metric._metrics_computations[0])
    by_report: dict[int, list[Tensor]] = {}
    reports: list[Any] = []
    for ring in range(len(slots.tasks)):
        of_ranks = [_in_order(samples[rank, ring], count[ring]) for rank, count in enumerate(seen)]
        predictions, labels, weights = torch.cat(of_ranks, dim=-1).unsqueeze(1)
        for name, signal in (("predictions", predictions), ("labels", labels), ("weights", weights)):
            setattr(computation, name, [signal])
        reports = computation._compute()
        for place, report in enumerate(reports):
            by_report.setdefault(place, []).append(report.value)
    values = {}
    has_batch = valid[list(slots.tasks), -1] != 0
    for place, report in enumerate(reports):
        of_tasks = torch.cat(by_report[place]).cpu()
        of_tasks = torch.where(has_batch, of_tasks, 0.0) if layout.validate else of_tasks
        values.update(_keyed(layout, slots, report, of_tasks, scope))
    return values


def _in_order(ring: Tensor, seen: int) -> Tensor:
    """The samples of a ring [3, C], oldest first; one without weight where there is none, as TorchRec has it."""
    capacity = ring.shape[-1]
    if seen == 0:
        return ring.new_zeros(3, 1)
    if seen <= capacity:
        return ring[:, :seen]
    return torch.cat([ring[:, seen % capacity :], ring[:, : seen % capacity]], dim=-1)


def _keyed(layout: Layout, slots: Slots, report: Any, values: Tensor, scope: str) -> dict[str, Tensor]:
    """Values [tasks of the metric] by key; of one element each, or of no dimension where TorchRec fuses tasks."""
    prefix = scope + report.metric_prefix.value
    by_key = {}
    for place, task in enumerate(slots.tasks):
        key = compose_metric_key(
            slots.metric._namespace, layout.tasks[task].name, report.name, prefix, report.description
        )
        by_key[key] = values[place] if slots.fused else values[place : place + 1]
    return by_key
