"""TorchRec's RecMetricModule with its sums on the device: an update is one kernel, and nothing waits for it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.metrics.metric_module import RecMetricModule, StateMetric
from torchrec.metrics.metrics_config import RecTaskInfo
from torchrec.metrics.metrics_namespace import compose_customized_metric_key
from torchrec.metrics.rec_metric import RecMetricException, RecMetricList
from torchrec.metrics.throughput import ThroughputMetric

from .layout import Layout, Slots, layout_of
from .pending import PendingMetrics
from .reports import Reports
from .state import Scratch, State, empty_state, resized_rings, scratch_of
from .update import Updater

try:
    from torchrec.metrics.deferrable_metrics import DeferrableMetrics
except ImportError:  # before TorchRec 1.8, whose compute returns a dict
    DeferrableMetrics = dict

logger = logging.getLogger(__name__)

_NOT_SAVED = ("lifetime", "valid")
"""Tensors that checkpoints store under RecMetricModule's keys, in the states of its metrics."""
_BOUND = ("_state", "_scratch", "_updater")
"""Attributes that `_bind` makes."""


class DeviceRecMetrics(RecMetricModule):
    """Replaces RecMetricModule: pass metric_class=DeviceRecMetrics to generate_metric_module, or call the constructor.

    It computes NE, calibration, CTR, MSE, accuracy and AUC, lifetime and windowed, under the same keys. Sums are
    float64 of float64 terms whatever the dtypes of the batch: the values equal RecMetricModule's for the same numbers
    given as float64. Values are CPU tensors. rec_metrics remains as the description of the metrics; its states hold
    only what state_dict() writes there.

    Within a CUDA graph, update() is one kernel that every replay repeats; the graph holds the addresses of the captured
    model_out. Before the capture call update() once, and before the first replay reset().
    """

    def __init__(
        self,
        batch_size: int,
        world_size: int,
        rec_tasks: list[RecTaskInfo] | None = None,
        rec_metrics: RecMetricList | None = None,
        throughput_metric: ThroughputMetric | None = None,
        state_metrics: dict[str, StateMetric] | None = None,
        compute_interval_steps: int = 100,
        min_compute_interval: float = 0.0,
        max_compute_interval: float = float("inf"),
    ) -> None:
        """Raises ValueError, naming the metric or the task, for a metric that it cannot compute as TorchRec does."""
        intervals = (compute_interval_steps, min_compute_interval, max_compute_interval)
        super().__init__(batch_size, world_size, rec_tasks, rec_metrics, throughput_metric, state_metrics, *intervals)
        self.layout = layout_of(self.rec_tasks, self.rec_metrics)
        self._reports = Reports(self.layout)
        self.device_state = _Buffers(empty_state(self.layout)._asdict(), _NOT_SAVED)
        scratch = scratch_of(self.layout)._asdict()
        self.device_scratch = _Buffers(scratch, tuple(scratch))
        self._synced = False
        self._bind()
        self.register_state_dict_pre_hook(_before_saving)
        self._register_load_state_dict_pre_hook(_before_loading, with_module=True)
        self.register_load_state_dict_post_hook(_after_loading)

    def update(self, model_out: dict[str, Tensor], **kwargs: Any) -> None:
        """Adds a batch: one launch on the current stream for every 64 tasks.

        kwargs: as for RecMetricModule; these metrics need none. Raises ValueError, naming the output, before anything
        is changed.
        """
        if self._synced:
            raise RecMetricException("update between sync() and unsync(): call unsync() first")
        if self.throughput_metric and self._on_gpu and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "throughput is measured on the host, which replays do not run: set MetricsConfig.throughput_metric to "
                "None, and update a ThroughputMetric of your own beside each replay"
            )
        self._updater(model_out)
        if self.throughput_metric:
            self.throughput_metric.update()
        self.trained_batches += 1

    def compute_async(self) -> PendingMetrics:
        """Starts a compute, on every rank, of the sums after the current stream's work; returns at once.

        The current stream copies the sums, another stream gathers those of all ranks. The returned object's result()
        gives the values; it may be called on any rank or on none.
        """
        self.compute_count += 1
        self._adjust_compute_interval()
        also: dict[str, Any] = dict(self.throughput_metric.compute()) if self.throughput_metric else {}
        for namespace, component in self.state_metrics.items():
            for name, value in component.get_metrics().items():
                also[compose_customized_metric_key(namespace, name)] = value
        return self._start(local=False, also=also)

    def compute(self) -> Any:
        """Returns the values over all ranks, by TorchRec's keys: the result() of compute_async()."""
        return DeferrableMetrics(self.compute_async().result())

    def local_compute(self) -> Any:
        """Returns the values of this rank only; their names begin with "local_"."""
        return DeferrableMetrics(self._start(local=True, also={}).result())

    def sync(self) -> None:
        """Makes state_dict() return the sums of all ranks, until unsync()."""
        _before_saving(self)
        super().sync()
        self._synced = True

    def unsync(self) -> None:
        """Makes state_dict() return this rank's sums again."""
        super().unsync()
        self._synced = False

    def reset(self) -> None:
        """Clears all sums, in the same memory: captured graphs stay valid."""
        super().reset()
        for tensor in self._state:
            tensor.zero_()

    def get_pre_compute_states(self, pg: Any = None) -> Any:
        """Raises RecMetricException: windows are rings here."""
        raise RecMetricException("DeviceRecMetrics has no pre-compute states: save state_dict() of every rank")

    def load_pre_compute_states(self, source: Any) -> None:
        """Raises RecMetricException: windows are rings here."""
        raise RecMetricException("DeviceRecMetrics has no pre-compute states: load state_dict() on every rank")

    def _start(self, local: bool, also: dict[str, Any]) -> PendingMetrics:
        if self._on_gpu and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("compute cannot be captured: call it outside the graph")
        return PendingMetrics(self.layout, self._reports, self._state, local, also)

    @property
    def _on_gpu(self) -> bool:
        return self._state.lifetime.is_cuda

    def __getstate__(self) -> dict[str, Any]:
        """Returns what a copy keeps: all but references to this object's memory."""
        return {name: value for name, value in self.__dict__.items() if name not in _BOUND}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Fills a copy, whose updates add to its own sums."""
        super().__setstate__(state)
        self._bind()

    def _bind(self) -> None:
        """Refers to the buffers at their current device."""
        self._state = State(**dict(self.device_state.named_buffers()))
        self._scratch = Scratch(**dict(self.device_scratch.named_buffers()))
        self._updater = Updater(self.layout, self._state, self._scratch)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> DeviceRecMetrics:
        dtypes = [tensor.dtype for tensor in self._state]
        super()._apply(fn, recurse)
        if self.throughput_metric:
            self.throughput_metric.cpu()  # counts on the host, where its tensors cost no launches
        self._bind()
        if [tensor.dtype for tensor in self._state] != dtypes:
            raise ValueError("DeviceRecMetrics holds float64 sums: move it with .to(device), without a dtype")
        return self


class _Buffers(nn.Module):
    """Tensors that move with a module. not_saved: names of tensors that checkpoints omit."""

    def __init__(self, tensors: dict[str, Tensor], not_saved: tuple[str, ...]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor, persistent=name not in not_saved)


def _before_saving(module: DeviceRecMetrics, prefix: str = "", keep_vars: bool = False) -> None:
    """Copies lifetime sums into the states of TorchRec's metrics, whose keys checkpoints use."""
    if module._synced:
        return
    for slots, place, computation in _computations(module.layout):
        tasks = [slots.tasks[place]] if place is not None else list(slots.tasks)
        for slot, state in enumerate(slots.states, slots.first):
            setattr(computation, state, module._state.lifetime[tasks, slot])
        if module.layout.validate:
            computation.has_valid_update = module._state.valid[tasks, _valid_slot(slots)].to(torch.uint8)


def _before_loading(
    module: DeviceRecMetrics, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *_: Any
) -> None:
    if module._synced:
        raise RecMetricException("load_state_dict between sync() and unsync(): call unsync() first")
    if local_metadata.get("assign_to_params_buffers"):
        raise ValueError("load_state_dict(assign=True) would leave captured graphs with old memory: omit assign")
    _before_saving(module)  # so that values missing in the checkpoint stay unchanged
    saved = {name: tensor for name, tensor in module.device_state.named_buffers() if name not in _NOT_SAVED}
    own = f"{prefix}device_state."
    if not any(key.startswith(own) for key in state_dict):
        logger.warning("the checkpoint has no windows, because RecMetricModule saves none: windows and AUC start empty")
        for name, tensor in saved.items():
            state_dict[own + name] = torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)
    rings = state_dict.get(f"{own}samples")
    if rings is not None and rings.shape[:2] == saved["samples"].shape[:2] and rings.shape != saved["samples"].shape:
        # The window is another one, or that of another number of ranks.
        resized = resized_rings(rings, state_dict[f"{own}seen"], saved["samples"].shape[2])
        state_dict |= dict(zip((f"{own}samples", f"{own}seen"), resized, strict=True))


def _after_loading(module: DeviceRecMetrics, incompatible_keys: Any) -> None:
    """Copies lifetime sums from the states of TorchRec's metrics."""
    for slots, place, computation in _computations(module.layout):
        tasks = [slots.tasks[place]] if place is not None else list(slots.tasks)
        states = [(state, module._state.lifetime, slot) for slot, state in enumerate(slots.states, slots.first)]
        if module.layout.validate:
            states.append(("has_valid_update", module._state.valid, _valid_slot(slots)))
        for state, tensor, column in states:
            loaded: Tensor = getattr(computation, state)
            if loaded.shape != (len(tasks),):
                raise ValueError(
                    f"{slots.metric._namespace}'s {state} has shape {tuple(loaded.shape)} in the checkpoint, but "
                    f"({len(tasks)},) here: load it with the rec_compute_mode and tasks that it was saved with"
                )
            tensor[tasks, column] = loaded.to(tensor)


def _valid_slot(slots: Slots) -> int:
    """Returns the column of State.valid that records whether a metric has accepted a batch."""
    return slots.first if slots.states else -1


def _computations(layout: Layout) -> list[tuple[Slots, int | None, Any]]:
    """Returns TorchRec's computations: each with its metric's slots and its task's index there, None for all tasks."""
    of_metrics = [*layout.metrics, *([layout.auc] if layout.auc else [])]
    return [
        (slots, None if slots.fused else place, computation)
        for slots in of_metrics
        for place, computation in enumerate(slots.metric._metrics_computations)
    ]
