"""Marked arguments of a captured graph's kernels are found by their bits and size, and changed, a kernel at a time."""

import ctypes
import struct
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dlrm_bench.pipeline.five_stage import graph_nodes, node_parameters
from dlrm_bench.pipeline.five_stage.graph_nodes import KernelParams
from dlrm_bench.pipeline.five_stage.node_parameters import MarkedArguments, int_marks, marks

CAPTURED, INSTANTIATED = 11, 12


class Driver:
    """Stands for CUDA's, with kernels of these arguments."""

    error = 0
    """Of changes."""
    silent: frozenset[int] = frozenset()
    """Nodes whose parameters it does not say."""

    def __init__(self, kernels: list[list[Any]]) -> None:
        self.kernels, self.sizes = kernels, [[ctypes.sizeof(of) for of in kernel] for kernel in kernels]
        self.arguments = [(ctypes.c_void_p * len(of))(*map(ctypes.addressof, of)) for of in kernels]
        self.changes: list[tuple[int, list[Any]]] = []

    def call(self, name: str, *given: Any) -> int:
        if name == "cuGraphKernelNodeGetParams_v2":
            node, params = given[0].value, given[1]._obj
            if node in self.silent:
                return 1
            params.func = node
            params.arguments = ctypes.cast(self.arguments[node - 1], ctypes.POINTER(ctypes.c_void_p))
        else:
            assert name == "cuGraphExecKernelNodeSetParams_v2"
            assert given[0].value == INSTANTIATED
            of_node, params = given[1].value, given[2]._obj
            types = map(type, self.kernels[of_node - 1])
            values = [of.from_address(params.arguments[i]).value for i, of in enumerate(types)]
            self.changes.append((of_node, values))
            return self.error
        return 0


def arguments(driver: Driver, monkeypatch: pytest.MonkeyPatch, of: list[Any]) -> MarkedArguments:
    nodes = [i + 1 for i in range(len(driver.kernels))]
    for module in (graph_nodes, node_parameters):
        monkeypatch.setattr(module, "call", driver.call)
    monkeypatch.setattr(node_parameters, "kernel_nodes", lambda graph: nodes)
    monkeypatch.setattr(node_parameters, "sizes_of_arguments", lambda params: driver.sizes[params.func - 1])
    graph: Any = SimpleNamespace(raw_cuda_graph=lambda: CAPTURED, raw_cuda_graph_exec=lambda: INSTANTIATED)
    return MarkedArguments(graph, of)


def test_a_kernel_is_given_all_of_its_numbers_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    (rate, other), (step,) = marks(2), int_marks(1)
    driver = Driver([
        [ctypes.c_int64(3), ctypes.c_float(rate), ctypes.c_float(0.9), ctypes.c_int64(step), ctypes.c_int32(5)],
        [ctypes.c_float(1.5), ctypes.c_int64(7)],
        [ctypes.c_float(other), ctypes.c_float(rate)],
    ])  # fmt: skip
    found = arguments(driver, monkeypatch, [rate, other, step])
    assert found.found == {0, 1, 2}
    found.set([0.5, 0.25, 2**40])
    assert driver.changes == [(1, [3, 0.5, pytest.approx(0.9), 2**40, 5]), (3, [0.25, 0.5])]
    assert driver.kernels[0][3].value == step  # that of the capture
    assert driver.arguments[0][3] == ctypes.addressof(driver.kernels[0][3])


def test_a_change_that_the_driver_refuses_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    (rate,) = marks(1)
    driver = Driver([[ctypes.c_float(rate)]])
    found = arguments(driver, monkeypatch, [rate])
    driver.error = 1
    with pytest.raises(RuntimeError, match="CUDA error 1 while changing a captured kernel's argument"):
        found.set([0.5])


def test_a_kernel_of_which_the_driver_says_nothing_has_no_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    rate, other = marks(2)
    driver = Driver([[ctypes.c_float(rate)], [ctypes.c_float(other)]])
    driver.silent = frozenset([1])
    assert arguments(driver, monkeypatch, [rate, other]).found == {1}


@pytest.mark.parametrize("missing", [None, "GPU", "torch's function", "driver"])
def test_graphs_are_kept_where_torch_and_the_driver_can_change_them(
    monkeypatch: pytest.MonkeyPatch, missing: str | None
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: missing != "GPU")
    graph = SimpleNamespace() if missing == "torch's function" else SimpleNamespace(raw_cuda_graph_exec=None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", graph)
    monkeypatch.setattr(node_parameters, "driver", lambda: None if missing == "driver" else object())
    assert node_parameters.keeps_graphs() == (missing is None)


def test_bits_of_a_mark_of_another_size_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    (rate,), (step,) = marks(1), int_marks(1)
    (bits,) = struct.unpack("<I", struct.pack("<f", rate))
    driver = Driver([[ctypes.c_int64(bits), ctypes.c_int32(step & 0x7FFFFFFF), ctypes.c_double(rate)]])
    found = arguments(driver, monkeypatch, [rate, step])
    assert found.found == set()
    found.set([0.5, 1])
    assert driver.changes == []


def test_marks_are_exact_and_distinct() -> None:
    found = marks(300)
    assert len(set(found)) == 300
    assert [struct.unpack("<f", struct.pack("<f", mark))[0] for mark in found] == found
    assert torch.tensor(found, dtype=torch.float32).double().tolist() == found
    steps = int_marks(300)
    assert len(set(steps)) == 300
    assert torch.tensor(steps).tolist() == steps


def test_the_drivers_structure() -> None:
    """CUDA_KERNEL_NODE_PARAMS_v2 of cuda.h, on a machine of 64 bits."""
    assert ctypes.sizeof(KernelParams) == 72
    assert (KernelParams.arguments.offset, KernelParams.kern.offset) == (40, 56)
