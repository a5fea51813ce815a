"""Numbers that the host passes to kernels of a captured graph, changed without a new capture.

FBGEMM passes the learning rate to its table updates, and also the step to Adam's, as arguments. A capture with a unique
mark instead of the number shows which arguments of which kernels receive it; CUDA changes these in the instantiated
graph, and launches in flight keep their values. This uses the driver's API, of CUDA 12.4 and later, through ctypes.
"""

import ctypes
import struct
from collections.abc import Sequence
from ctypes import POINTER, byref, c_int, c_size_t, c_uint, c_void_p
from functools import cache
from typing import Any

import torch

_KERNEL = 0  # CU_GRAPH_NODE_TYPE_KERNEL
_FIRST_MARK = 0x2F1D3C5B  # 1.4e-10, and as an integer 790,445,147: neither a rate nor a size of anything
_FIRST_INT_MARK = 0x2F1D3C5B_4A6E7D01  # as an integer 3.4e18: neither a step, a size nor an address
_TYPES: dict[type, Any] = {float: ctypes.c_float, int: ctypes.c_int64}
_SIZES = {ctypes.sizeof(of) for of in _TYPES.values()}


def marks(count: int) -> list[float]:
    """Returns `count` numbers, each exact in fp32, that kernels do not receive otherwise, even as other bits."""
    return [struct.unpack("<f", struct.pack("<I", _FIRST_MARK + i))[0] for i in range(count)]


def int_marks(count: int) -> list[int]:
    """Returns `count` numbers, each an int64, that kernels do not receive otherwise, even as other bits."""
    return [_FIRST_INT_MARK + i for i in range(count)]


def keeps_graphs() -> bool:
    """Whether there is a GPU, and this torch and this driver allow changing a captured graph's nodes."""
    has_graph = hasattr(torch.cuda.CUDAGraph, "raw_cuda_graph_exec")
    return torch.cuda.is_available() and has_graph and _driver() is not None


class _Params(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = (
        ("func", c_void_p),
        *((name, c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared_bytes")),
        ("arguments", POINTER(c_void_p)),
        ("extra", POINTER(c_void_p)),
        ("kern", c_void_p),
        ("ctx", c_void_p),
    )


class MarkedArguments:
    """Arguments of one graph's kernels that were marked at its capture."""

    def __init__(self, graph: torch.cuda.CUDAGraph, of: Sequence[float | int]) -> None:
        """graph: captured with keep_graph, and instantiated. of: the marks, fp32 if they are floats, else int64."""
        self._graph: Any = graph
        self._values = [_TYPES[type(mark)](mark) for mark in of]
        self._nodes: list[tuple[c_void_p, _Params]] = []
        self.found: set[int] = set()
        """Indices of the marks that kernels received."""
        bits = {bytes(value): i for i, value in enumerate(self._values)}
        for node in _kernel_nodes(graph.raw_cuda_graph()):
            params = _Params()
            if _call("cuGraphKernelNodeGetParams_v2", node, byref(params)) == 0 and params.arguments:
                self._find(node, params, bits)

    def set(self, values: Sequence[float | int]) -> None:
        """Replaces the marks by these values, from the next launch on."""
        for place, value in zip(self._values, values, strict=True):
            place.value = value
        graph = c_void_p(self._graph.raw_cuda_graph_exec())
        for node, params in self._nodes:
            if (error := _call("cuGraphExecKernelNodeSetParams_v2", graph, node, byref(params))) != 0:
                raise RuntimeError(f"CUDA error {error} while changing a captured kernel's argument")

    def _find(self, node: c_void_p, params: _Params, bits: dict[bytes, int]) -> None:
        sizes = _argument_sizes(params)
        indices = {
            i: bits[word]
            for i, size in enumerate(sizes)
            if size in _SIZES and (word := ctypes.string_at(params.arguments[i], size)) in bits
        }
        if not indices:
            return
        own = (c_void_p * len(sizes))(*(params.arguments[i] for i in range(len(sizes))))
        for i, index in indices.items():
            own[i] = ctypes.addressof(self._values[index])
        changed = _Params.from_buffer_copy(params)
        changed.arguments = ctypes.cast(own, POINTER(c_void_p))
        changed.own = own  # keeps the memory alive
        self._nodes.append((node, changed))
        self.found |= set(indices.values())


def _argument_sizes(params: _Params) -> list[int]:
    """Returns the size in bytes of each argument of a node's kernel."""
    name, kernel = ("cuFuncGetParamInfo", params.func) if params.func else ("cuKernelGetParamInfo", params.kern)
    offset, size, sizes = c_size_t(), c_size_t(), list[int]()
    while _call(name, c_void_p(kernel), c_size_t(len(sizes)), byref(offset), byref(size)) == 0:
        sizes.append(size.value)
    return sizes


def _kernel_nodes(raw: int) -> list[c_void_p]:
    graph, count, kind = c_void_p(raw), c_size_t(), c_int()
    if _call("cuGraphGetNodes", graph, None, byref(count)) != 0:
        return []
    nodes = (c_void_p * count.value)()
    _call("cuGraphGetNodes", graph, nodes, byref(count))
    kernels = []
    for node in map(c_void_p, nodes):
        if _call("cuGraphNodeGetType", node, byref(kind)) == 0 and kind.value == _KERNEL:
            kernels.append(node)
    return kernels


def _call(name: str, *arguments: Any) -> int:
    result: int = getattr(_driver(), name)(*arguments)
    return result


@cache
def _driver() -> Any:
    """Returns the driver's library; None if it is missing or lacks a needed function."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    needed = ("cuFuncGetParamInfo", "cuKernelGetParamInfo", "cuGraphExecKernelNodeSetParams_v2")
    return library if all(hasattr(library, name) for name in needed) else None
