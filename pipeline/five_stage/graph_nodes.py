"""Nodes of a captured graph and the edges between them, by the driver's API of CUDA 12.4 and later, through ctypes.

Nodes and graphs are their handles, as integers. See "Graph Management" and "Stream Management" of CUDA's driver API.
"""

import ctypes
from collections.abc import Iterable
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_void_p
from functools import cache
from typing import Any

_KERNEL, _MEMSET = 0, 2  # CU_GRAPH_NODE_TYPE_KERNEL, CU_GRAPH_NODE_TYPE_MEMSET
_CAPTURING = 1  # CU_STREAM_CAPTURE_STATUS_ACTIVE
_NEEDED = (
    "cuFuncGetName",
    "cuFuncGetParamInfo",
    "cuGraphAddDependencies_v2",
    "cuGraphExecKernelNodeSetParams_v2",
    "cuGraphNodeGetDependencies_v2",
    "cuGraphRemoveDependencies_v2",
    "cuKernelGetName",
    "cuKernelGetParamInfo",
    "cuStreamGetCaptureInfo_v3",
)


class KernelParams(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = (
        ("func", c_void_p),
        *((name, c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared_bytes")),
        ("arguments", POINTER(c_void_p)),
        ("extra", POINTER(c_void_p)),
        ("kern", c_void_p),
        ("ctx", c_void_p),
    )


@cache
def driver() -> Any:
    """Returns the driver's library; None if it is missing or lacks a needed function."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return library if all(hasattr(library, name) for name in _NEEDED) else None


def call(name: str, *arguments: Any) -> int:
    """Returns the error of a driver's function, 0 if there is none."""
    result: int = getattr(driver(), name)(*arguments)
    return result


def kernel_nodes(graph: int) -> list[int]:
    """Returns the nodes that launch kernels."""
    count = c_size_t()
    if call("cuGraphGetNodes", c_void_p(graph), None, byref(count)) != 0:
        return []
    nodes = (c_void_p * count.value)()
    call("cuGraphGetNodes", c_void_p(graph), nodes, byref(count))
    return [node for node in nodes if node is not None and _kind(node) == _KERNEL]


def params_of(node: int) -> KernelParams | None:
    """Returns the parameters of a node that launches a kernel; None if the driver does not say them."""
    params = KernelParams()
    return params if call("cuGraphKernelNodeGetParams_v2", c_void_p(node), byref(params)) == 0 else None


def sizes_of_arguments(params: KernelParams) -> list[int]:
    """Returns the size in bytes of each argument of a node's kernel."""
    name, kernel = _of_kernel(params, "cuFuncGetParamInfo", "cuKernelGetParamInfo")
    offset, size, sizes = c_size_t(), c_size_t(), list[int]()
    while call(name, kernel, c_size_t(len(sizes)), byref(offset), byref(size)) == 0:
        sizes.append(size.value)
    return sizes


def work_of(node: int) -> str:
    """Returns the mangled name of a node's kernel, "memset", or "" for anything else."""
    if (kind := _kind(node)) != _KERNEL:
        return "memset" if kind == _MEMSET else ""
    if (params := params_of(node)) is None:
        return ""
    name, kernel = _of_kernel(params, "cuFuncGetName", "cuKernelGetName")
    found = c_char_p()
    return (found.value or b"").decode() if call(name, byref(found), kernel) == 0 else ""


def before(node: int) -> list[int]:
    """Returns the nodes on which a node depends."""
    count = c_size_t()
    if call("cuGraphNodeGetDependencies_v2", c_void_p(node), None, None, byref(count)) != 0:
        return []
    nodes, edges = (c_void_p * count.value)(), ctypes.create_string_buffer(8 * count.value)  # CUgraphEdgeData
    call("cuGraphNodeGetDependencies_v2", c_void_p(node), nodes, edges, byref(count))
    return [of for of in nodes if of is not None]


def ends(stream: int) -> list[int]:
    """Returns the nodes on which the next launch on a stream will depend; none if the stream is not being captured, or
    there is no driver."""
    if driver() is None:
        return []
    status, count = c_int(), c_size_t()
    nodes, edges = POINTER(c_void_p)(), c_void_p()
    asked = (None, None, byref(nodes), byref(edges), byref(count))
    if call("cuStreamGetCaptureInfo_v3", c_void_p(stream), byref(status), *asked) != 0 or status.value != _CAPTURING:
        return []
    return [of for of in nodes[: count.value] if of is not None]


def depend(graph: int, node: int, on: Iterable[int]) -> None:
    """Makes a node depend on others. RuntimeError if the driver refuses it."""
    _change("cuGraphAddDependencies_v2", graph, node, list(on))


def depend_no_longer(graph: int, node: int, on: Iterable[int]) -> None:
    """Takes back that a node depends on others. RuntimeError if the driver refuses it."""
    _change("cuGraphRemoveDependencies_v2", graph, node, list(on))


def _change(name: str, graph: int, node: int, on: list[int]) -> None:
    pointers = c_void_p * len(on)
    pairs = pointers(*on), pointers(*[node] * len(on))
    if on and (error := call(name, c_void_p(graph), *pairs, None, c_size_t(len(on)))) != 0:
        raise RuntimeError(f"CUDA error {error} of {name} for a captured graph")


def _kind(node: int) -> int:
    kind = c_int(-1)
    call("cuGraphNodeGetType", c_void_p(node), byref(kind))
    return kind.value


def _of_kernel(params: KernelParams, of_function: str, of_kernel: str) -> tuple[str, c_void_p]:
    """Returns which of the driver's functions to call for a node's kernel, and its handle."""
    return (of_function, c_void_p(params.func)) if params.func else (of_kernel, c_void_p(params.kern))
