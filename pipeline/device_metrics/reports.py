"""Values from sums under TorchRec's keys, by the formulas of TorchRec's own computations, on the host."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torchrec.metrics.metrics_namespace import compose_metric_key

from .layout import Layout, Slots

_SIGNALS = ("predictions", "labels", "weights")


class Reports:
    """Computes the values of a layout's metrics.

    TorchRec's computation of one task has the formula; a copy of it receives the states of all tasks instead.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._computations = [_copied(slots) for slots in layout.metrics]
        self._auc = _copied(layout.auc) if layout.auc else None
        self._keys: dict[tuple[object, ...], list[str]] = {}

    def of_sums(self, lifetime: Tensor, window: Tensor, valid: Tensor, scope: str) -> dict[str, Tensor]:
        """Returns the values of all metrics but AUC.

        lifetime, window: float64 [T, K] on the CPU, over all ranks. valid: [T, K + 1], nonzero if any batch was
        accepted; otherwise values are 0 if updates are validated. scope: prefix of the metric's name in keys, "local_"
        or "".
        """
        values: dict[str, Tensor] = {}
        lifetimes, windows, has_batch = lifetime.t().contiguous(), window.t().contiguous(), valid.t() != 0
        for slots, computation in zip(self._layout.metrics, self._computations, strict=True):
            chosen = _chooser(slots, len(lifetime))
            for slot, state in enumerate(slots.states, slots.first):
                setattr(computation, state, lifetimes[slot][chosen])
                setattr(computation, computation.get_window_state_name(state), windows[slot][chosen])
            for report in computation._compute():
                of_tasks = report.value
                if self._layout.validate:
                    of_tasks = torch.where(has_batch[slots.first][chosen], of_tasks, 0.0)
                values.update(self._keyed(slots, report, of_tasks, scope))
        return values

    def of_samples(
        self, samples: Tensor, seen: Sequence[Sequence[int]], valid: Tensor, scope: str
    ) -> dict[str, Tensor]:
        """Returns the AUC of each task, from the same samples in the same order as TorchRec's, by its own function.

        samples: float32 [ranks, A, 3, C] on any device. seen: by rank and ring. valid, scope: as in `of_sums`.
        """
        slots, computation = self._layout.auc, self._auc
        assert slots is not None
        assert computation is not None
        reports: list[Any] = []
        by_report: list[list[Tensor]] = []
        for rings in _alike(seen):
            of_ranks = [_in_order(samples[rank, rings], of_rank[rings.start]) for rank, of_rank in enumerate(seen)]
            joined = torch.cat(of_ranks, dim=-1) if len(of_ranks) > 1 else of_ranks[0]
            for name, signal in zip(_SIGNALS, joined.unbind(1), strict=True):
                setattr(computation, name, [signal])
            reports = computation._compute()
            by_report.append([report.value for report in reports])
        for name in _SIGNALS:
            setattr(computation, name, [])  # frees the window of samples until the next compute
        values: dict[str, Tensor] = {}
        for report, parts in zip(reports, zip(*by_report, strict=True), strict=True):
            of_tasks = torch.cat(parts).cpu()
            if self._layout.validate:
                of_tasks = torch.where(valid[list(slots.tasks), -1] != 0, of_tasks, 0.0)
            values.update(self._keyed(slots, report, of_tasks, scope))
        return values

    def _keyed(self, slots: Slots, report: Any, values: Tensor, scope: str) -> Iterator[tuple[str, Tensor]]:
        """Yields values [tasks of the metric] by key; of one element each, or zero-dimensional if TorchRec fuses
        tasks."""
        named = (slots.metric._namespace, report.name, scope + report.metric_prefix.value, report.description)
        keys = self._keys.get(named)
        if keys is None:
            namespace, name, prefix, description = named
            names = [self._layout.tasks[task].name for task in slots.tasks]
            keys = [compose_metric_key(namespace, task, name, prefix, description) for task in names]
            self._keys[named] = keys
        return zip(keys, values.unbind() if slots.fused else values.split(1), strict=True)


def _copied(slots: Slots) -> Any:
    """Returns a computation with separate states, sharing everything else with TorchRec's."""
    return copy.copy(slots.metric._metrics_computations[0])


def _chooser(slots: Slots, tasks: int) -> Any:
    """Returns an index of the tasks of a metric: a slice if it has all tasks, which copies nothing."""
    return slice(None) if slots.tasks == tuple(range(tasks)) else list(slots.tasks)


def _alike(seen: Sequence[Sequence[int]]) -> Iterator[slice]:
    """Yields ranges of rings that received equal numbers of samples on every rank: usually one range of all."""
    by_ring = list(zip(*seen, strict=True))
    first = 0
    for ring in range(1, len(by_ring) + 1):
        if ring == len(by_ring) or by_ring[ring] != by_ring[first]:
            yield slice(first, ring)
            first = ring


def _in_order(rings: Tensor, seen: int) -> Tensor:
    """Returns the samples of rings [A, 3, C], oldest first; if there are none, one sample without weight, as in
    TorchRec."""
    capacity = rings.shape[-1]
    if seen == 0:
        return rings.new_zeros(len(rings), 3, 1)
    if seen <= capacity:
        return rings[..., :seen]
    return rings.roll(-(seen % capacity), dims=-1)
