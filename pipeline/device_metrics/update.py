"""Updates from a model's outputs: looks up the tensors, checks them once per form of batch, and launches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor

from . import triton_update
from .layout import Layout
from .plain_update import Signals, plain_update
from .state import Scratch, State

_MOST_FORMS = 4096
_Launches = list[tuple[triton_update.Launch, Callable[[tuple[int, ...]], Any]]]
_dtype, _device = attrgetter("dtype"), attrgetter("device")


class Updater:
    """Adds batches to a state.

    Sizes, strides, dtypes and the device of a batch's tensors are its form. A form is checked on first use; later
    batches of the same form cost the look-up of their tensors and one launch.
    """

    def __init__(self, layout: Layout, state: State, scratch: Scratch) -> None:
        self._layout, self._state, self._scratch = layout, state, scratch
        names = [name for task in layout.tasks for name in (task.label_name, task.prediction_name, task.weight_name)]
        self._names = list(dict.fromkeys(names))
        self._places = [self._names.index(name) for name in names]
        """Indices into `_names` of labels, predictions and weights of each task in turn."""
        self._get: Callable[[Mapping[str, Any]], Any] = itemgetter(*self._names)
        self._last: tuple[Any, ...] | None = None
        self._run: Callable[[list[Tensor]], None] = _nothing
        self._forms: dict[tuple[Any, ...], Callable[[list[Tensor]], None]] = {}

    def __call__(self, model_out: Mapping[str, Any]) -> None:
        """Adds a batch. Raises ValueError, naming the output, before anything is changed."""
        try:
            tensors = list(self._get(model_out)) if len(self._names) > 1 else [self._get(model_out)]
            form = _form(tensors)
        except (KeyError, TypeError, AttributeError):
            self._refuse(model_out)
            raise
        if form != self._last:
            self._run = self._forms.get(form) or self._new_form(form, tensors)
            self._last = form
        self._run(tensors)

    def _refuse(self, model_out: Mapping[str, Any]) -> None:
        for name in self._names:
            if name not in model_out:
                raise ValueError(f"the model's output has no {name!r}, only {sorted(model_out)}")
            if not isinstance(model_out[name], Tensor):
                raise ValueError(f"{name!r} of the model's output is a {type(model_out[name]).__name__}, not a tensor")

    def _new_form(self, form: tuple[Any, ...], tensors: list[Tensor]) -> Callable[[list[Tensor]], None]:
        device = self._state.lifetime.device
        for name, tensor in zip(self._names, tensors, strict=True):
            _check(name, tensor, device)
        signals = [tensors[place] for place in self._places]
        sizes = [self._size_of(task, signals) for task in range(len(self._layout.tasks))]
        strides = [_stride(signal) for signal in signals]
        if device.type == "cpu":
            run = self._plain_run(strides)
        elif device.type == "cuda":
            run = self._kernel_run(sizes, strides, [signal.dtype for signal in signals])
        else:
            raise ValueError(f"DeviceRecMetrics runs on cuda and cpu, not on {device}")
        if len(self._forms) >= _MOST_FORMS:
            self._forms.clear()
        self._forms[form] = run
        return run

    def _size_of(self, task: int, signals: list[Tensor]) -> int:
        """Returns the number of samples of a task, which must be the same in all its signals."""
        sizes = [signal.numel() for signal in signals[3 * task : 3 * task + 3]]
        if len(set(sizes)) > 1 or sizes[0] >= 2**31:
            info = self._layout.tasks[task]
            raise ValueError(
                f"task {info.name!r} has {sizes[0]} labels ({info.label_name!r}), {sizes[1]} predictions "
                f"({info.prediction_name!r}) and {sizes[2]} weights ({info.weight_name!r}): "
                "give the same number of each, below 2^31"
            )
        return sizes[0]

    def _plain_run(self, strides: list[int]) -> Callable[[list[Tensor]], None]:
        places = self._places

        def run(tensors: list[Tensor]) -> None:
            flat = [tensors[place].detach() for place in places]
            flat = [
                signal.as_strided((signal.numel(),), (stride,)) for signal, stride in zip(flat, strides, strict=True)
            ]
            batch = [Signals(*flat[at : at + 3]) for at in range(0, len(flat), 3)]
            plain_update(self._layout, self._state, self._scratch, batch)

        return run

    def _kernel_run(
        self, sizes: list[int], strides: list[int], dtypes: list[torch.dtype]
    ) -> Callable[[list[Tensor]], None]:
        if triton_update.triton is None or triton_update.INTERPRETED:
            raise ValueError(
                "DeviceRecMetrics on a GPU needs Triton, compiled: pip install triton, and unset TRITON_INTERPRET"
            )
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "the first batch of this form (sizes, strides, dtypes) came during a capture: before the capture, "
                "update once so that the kernel exists, then call reset()"
            )
        device = self._state.lifetime.device
        with torch.cuda.device(device):
            launches = self._launches(sizes, strides, dtypes)

        def run(tensors: list[Tensor]) -> None:
            if torch.cuda.current_device() != device.index:  # Triton launches on the current device
                with torch.cuda.device(device):
                    return launch_all(launches, tensors)
            return launch_all(launches, tensors)

        return run

    def _launches(self, sizes: list[int], strides: list[int], dtypes: list[torch.dtype]) -> _Launches:
        """Returns launches with up to MAX_TASKS tasks each; none for tasks without samples."""
        launches: _Launches = []
        for first in range(0, len(sizes), triton_update.MAX_TASKS):
            tasks = range(first, min(first + triton_update.MAX_TASKS, len(sizes)))
            signals = slice(3 * tasks.start, 3 * tasks.stop)
            if any(sizes[tasks.start : tasks.stop]):
                of_tasks = (sizes[tasks.start : tasks.stop], strides[signals], dtypes[signals])
                launch = triton_update.Launch(self._layout, self._state, self._scratch, tasks, *of_tasks)
                launches.append((launch, itemgetter(*self._places[signals])))
        return launches


def launch_all(launches: _Launches, tensors: list[Tensor]) -> None:
    """Launches kernels on the current stream, for outputs in the order of the updater's names."""
    addresses = triton_update.addresses_of(tensors)
    for launch, of_launch in launches:
        launch(of_launch(addresses))


def _form(tensors: list[Tensor]) -> tuple[Any, ...]:
    """Returns the properties that must not change for a launch to be reused; must be cheap, as it runs per batch."""
    contiguous = all(map(Tensor.is_contiguous, tensors))
    strides = () if contiguous else tuple((tensor.shape, tensor.stride()) for tensor in tensors)
    sizes, dtypes = tuple(map(Tensor.numel, tensors)), tuple(map(_dtype, tensors))
    return sizes, dtypes, tuple(map(_device, tensors)), strides


def _check(name: str, tensor: Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise ValueError(f"{name!r} is on {tensor.device}, but the metrics are on {device}: move one of them")
    if tensor.dtype not in triton_update.DTYPES or tensor.layout != torch.strided:
        raise ValueError(f"{name!r} is {tensor.dtype} ({tensor.layout}): give a strided tensor of a real dtype")
    if not tensor.is_contiguous() and tensor.squeeze().dim() > 1:
        raise ValueError(f"{name!r} has shape {tuple(tensor.shape)} and is not contiguous: call .contiguous()")


def _stride(tensor: Tensor) -> int:
    """Returns the distance between neighbouring elements of a tensor that has passed `_check`."""
    squeezed = tensor.squeeze()
    return 1 if tensor.is_contiguous() or squeezed.dim() == 0 else squeezed.stride(0)


def _nothing(tensors: list[Tensor]) -> None:
    """Does nothing: the run before the first form."""
