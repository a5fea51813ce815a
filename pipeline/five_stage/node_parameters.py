"""Numbers that the host passes to kernels of a captured graph, changed without a new capture.

FBGEMM passes the learning rate to its table updates, and also the step to Adam's, as arguments. A capture with a unique
mark instead of the number shows which arguments of which kernels receive it; CUDA changes these in the instantiated
graph, and launches in flight keep their values.
"""

import ctypes
import struct
from collections.abc import Sequence
from ctypes import POINTER, byref, c_void_p
from typing import Any

import torch

from .graph_nodes import KernelParams, call, driver, kernel_nodes, params_of, sizes_of_arguments

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
    return torch.cuda.is_available() and has_graph and driver() is not None


class MarkedArguments:
    """Arguments of one graph's kernels that were marked at its capture."""

    def __init__(self, graph: torch.cuda.CUDAGraph, of: Sequence[float | int]) -> None:
        """graph: captured with keep_graph, and instantiated. of: the marks, fp32 if they are floats, else int64."""
        self._graph: Any = graph
        self._values = [_TYPES[type(mark)](mark) for mark in of]
        self._nodes: list[tuple[int, KernelParams]] = []
        self.found: set[int] = set()
        """Indices of the marks that kernels received."""
        bits = {bytes(value): i for i, value in enumerate(self._values)}
        for node in kernel_nodes(graph.raw_cuda_graph()):
            if (params := params_of(node)) is not None and params.arguments:
                self._find(node, params, bits)

    def set(self, values: Sequence[float | int]) -> None:
        """Replaces the marks by these values, from the next launch on."""
        for place, value in zip(self._values, values, strict=True):
            place.value = value
        graph = c_void_p(self._graph.raw_cuda_graph_exec())
        for node, params in self._nodes:
            if (error := call("cuGraphExecKernelNodeSetParams_v2", graph, c_void_p(node), byref(params))) != 0:
                raise RuntimeError(f"CUDA error {error} while changing a captured kernel's argument")

    def _find(self, node: int, params: KernelParams, bits: dict[bytes, int]) -> None:
        sizes = sizes_of_arguments(params)
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
        changed = KernelParams.from_buffer_copy(params)
        changed.arguments = ctypes.cast(own, POINTER(c_void_p))
        changed.own = own  # keeps the memory alive
        self._nodes.append((node, changed))
        self.found |= set(indices.values())
