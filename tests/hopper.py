"""Compiles the kernels for Hopper GPUs where there is none: TRITON_INTERPRET=0 python -m tests.hopper.

The interpreter that runs Triton kernels on CPUs takes much that the compiler refuses, and nothing there runs CUDA C++.
Here the kernels' benchmark goes through all of its cases, at its own sizes, DeviceRecMetrics prepares a launch, and the
drop-in exchanges and updates dense weights; each launch compiles its kernel, Triton's to PTX, and runs nothing. The
last line printed is JSON: the names of all Triton kernels, the compiler's first message about each that does not
compile, the bytes of shared memory that each needs at most, and the first message about each CUDA source. Run it in a
process of its own, with a TRITON_CACHE_DIR of its own: what it leaves there cannot be launched.
"""

import contextlib
import json
import mmap
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from dlrm_bench.kernels import _cuda
from dlrm_bench.kernels.benchmark.__main__ import CASES
from dlrm_bench.pipeline.device_metrics import DeviceRecMetrics
from dlrm_bench.pipeline.device_metrics.state import empty_state, scratch_of
from dlrm_bench.pipeline.device_metrics.triton_update import Launch
from dlrm_bench.pipeline.five_stage.adagrad_of_tensors import adagrad_of_tensors, blocks_of
from dlrm_bench.pipeline.five_stage.peers.push import (
    Block,
    PushTable,
    RankBuffers,
    triton_push,
    triton_sum_of_ranks,
)
from tests.pipeline.device_metrics.made_metrics import WINDOWS, config, made, tasks

_LARGE = 1 << 18
_NO_RESERVE = 0x4000  # mmap.MAP_NORESERVE, which Python has from 3.13 on
_SM_90 = GPUTarget("cuda", 90, 32)


class TensorsOfGpu(TorchFunctionMode):
    """Tensors of the CPU pass for a GPU's, and for pinned ones; devices that are asked for are the CPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (Tensor.is_cuda.__get__, Tensor.is_pinned):
            return True
        if function == Tensor.device.__get__:
            return torch.device("cuda", 0)
        if function in (Tensor.cuda, Tensor.pin_memory):
            return args[0]
        named = {name: value for name, value in (kwargs or {}).items() if name != "pin_memory"}
        if "device" in named:
            named["device"] = "cpu"
        return function(*("cpu" if isinstance(value, torch.device) else value for value in args), **named)


class ZerosOfLarge(TorchDispatchMode):
    """Large tensors are zeros, and take no memory until they are written: nothing is computed with them, except what
    gives a shape that depends on values."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named, originals = kwargs or {}, {}

        def meta_of(tensor: Tensor) -> Tensor:
            meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
            originals[meta] = tensor
            return meta

        if function.is_view or not (_any_large(args, named) or "device" in named):
            return function(*args, **named)
        to = {"device": "meta"} if "device" in named else {}
        try:
            shapes = function(*tree_map_only(Tensor, meta_of, args), **tree_map_only(Tensor, meta_of, named) | to)
        except RuntimeError:
            return function(*args, **named)
        if not _any_large(args, named, shapes):
            return function(*args, **named)
        return tree_map_only(Tensor, lambda shape: originals[shape] if shape in originals else _zeros(shape), shapes)


def _any_large(*values: Any) -> bool:
    return any(isinstance(value, Tensor) and value.numel() > _LARGE for value in tree_leaves(values))


def _zeros(shape: Tensor) -> Tensor:
    size = max(1, shape.untyped_storage().nbytes())
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
    flat = torch.frombuffer(memory, dtype=shape.dtype)
    return flat.as_strided(shape.shape, shape.stride(), shape.storage_offset())


class Launches:
    """Compiles in place of launching."""

    def __init__(self) -> None:
        self.errors: dict[str, str] = {}
        """The first message about a kernel."""
        self.shared_bytes: dict[str, int] = defaultdict(int)
        """The most of a kernel's forms."""
        driver = mock.Mock(get_current_device=lambda: 0, get_current_target=lambda: _SM_90)
        triton.runtime.driver.set_active(driver)
        triton.knobs.runtime.add_stages_inspection_hook = _stop_at_ptx
        compile_or_run = JITFunction.run

        def run(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> Any:
            name = f"{kernel.fn.__module__}.{kernel.fn.__name__}"
            try:
                compiled = compile_or_run(kernel, *arguments, grid=grid, warmup=True, **named)
            except Exception as error:  # whatever the compiler raises
                self.errors.setdefault(name, f"{type(error).__name__}: {error}")
                return None
            self.shared_bytes[name] = max(self.shared_bytes[name], compiled.metadata.shared)
            return compiled

        JITFunction.run = run


def _stop_at_ptx(backend: Any, stages: dict[str, Any], *_: Any) -> None:
    stages["cubin"] = lambda ptx, metadata: b""


def launch_benchmark() -> None:
    """Runs every case of the kernels' benchmark once."""
    streams = dict.fromkeys(("Stream", "current_stream", "stream"), mock.MagicMock())
    with mock.patch.multiple(torch.cuda, **streams), TensorsOfGpu(), ZerosOfLarge():
        for cases in CASES.values():
            for case in cases():
                case.run()


def compile_sources() -> dict[str, str] | None:
    """Runs the benchmark once more, where kernels in CUDA C++ are available. Returns the first message about each
    source, "" of one that compiles; None without NVRTC."""
    found: dict[str, str] = {}

    def compile_source(_: Any, source: Path, name: str, defines: dict[str, int], threads: int, shared: int) -> None:
        try:
            message = "" if name.encode() in _cuda._compile(source, defines) else f"there is no {name}"
        except RuntimeError as error:
            message = str(error)
        if not found.get(source.name):
            found[source.name] = f"{defines}: {message}" if message else ""

    properties = mock.Mock(multi_processor_count=132)
    of_torch = {
        "is_available": lambda: True,
        "get_device_capability": lambda: (9, 0),
        "get_device_properties": lambda device: properties,
        "device": lambda device: contextlib.nullcontext(),
    }
    encoder = mock.Mock(**{"return_value.cuTensorMapEncodeTiled.return_value": 0})
    with (
        mock.patch.multiple(torch.cuda, **of_torch),
        mock.patch.multiple(_cuda.Kernel, __init__=compile_source, launch=lambda *_: None),
        mock.patch.object(_cuda, "_driver", encoder),
    ):
        _cuda.available.cache_clear()
        if not _cuda.available():
            return None
        launch_benchmark()
    return found


def launch_update() -> None:
    """Prepares an update of metrics of two tasks."""
    layout = made(DeviceRecMetrics, config(tasks(2), WINDOWS)).layout
    Launch(layout, empty_state(layout), scratch_of(layout), range(2), [256] * 2, [1] * 6, [torch.float32] * 6)


def launch_exchange() -> None:
    """Pushes rows of every alignment to two ranks, and adds up what came."""
    outs = RankBuffers([torch.zeros(1 << 16, dtype=torch.uint8) for _ in range(2)], 0)
    for columns, dtype in ((64, torch.float32), (2, torch.int32), (1, torch.int32), (1, torch.int16), (1, torch.int8)):
        source = torch.zeros(8192, dtype=dtype)
        blocks = list(enumerate([Block(0, columns, 0, columns, 32, columns)] * 2))
        table = PushTable(blocks, source.itemsize, 16, torch.device("cpu"))
        triton_push(source, table, outs)
        if source.is_floating_point():
            triton_push(source, table, outs, divisor=2)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        triton_sum_of_ranks(torch.zeros(2, 4096, dtype=dtype), torch.zeros(4096, dtype=dtype), 0.5)


def launch_dense_update() -> None:
    """Updates weights of the drop-in's dense part."""
    parameters, grads, sums = ([torch.zeros(count) for count in (8192, 1)] for _ in range(3))
    adagrad_of_tensors(blocks_of(parameters, grads, sums), torch.tensor(0.1), 1e-8)


def kernels() -> list[str]:
    """Returns the names of all kernels of the modules that are imported."""
    modules = {name: vars(module) for name, module in sys.modules.items() if name.startswith("dlrm_bench.")}
    return [
        f"{module}.{name}"
        for module, members in modules.items()
        for name, value in members.items()
        if isinstance(value, JITFunction) and re.fullmatch("_.*_kernel", name) and value.fn.__module__ == module
    ]


if __name__ == "__main__":
    launches = Launches()
    launch_update()
    launch_exchange()
    launch_dense_update()
    launch_benchmark()
    of_triton = {"kernels": kernels(), "errors": launches.errors, "shared_bytes": launches.shared_bytes}
    print(json.dumps(of_triton | {"sources": compile_sources()}))
