"""CUDA C++ kernels: where they run, what their compiler says, and the matrices that their copies take."""

import re
from pathlib import Path

import pytest
import torch

from dlrm_bench.bench import ROOT
from dlrm_bench.kernels._cuda import Kernel, available, tensor_map


def test_is_for_hopper_only() -> None:
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    assert hopper or not available()


@pytest.mark.parametrize(
    "matrix",
    [
        torch.zeros(4, 64),
        torch.zeros(64, dtype=torch.bfloat16),
        torch.zeros(64, 4, dtype=torch.bfloat16).t(),
        torch.zeros(4, 63, dtype=torch.bfloat16),
    ],
)
def test_tensor_map_refuses_what_the_copy_engine_cannot_read(matrix: torch.Tensor) -> None:
    with pytest.raises(AssertionError):
        tensor_map(matrix, 64, 64)


BULK_COPIES = [
    source
    for source in ROOT.glob("kernels/**/*.cu")
    if "cp.async.bulk" in source.read_text() or "init_barrier(" in source.read_text()  # of hopper.cuh
]
READS_ARE_DONE = ("fence.proxy.async", "wgmma.wait_group", "wait_products<")  # the last is silu_attention.cuh's


def with_headers(source: Path) -> list[tuple[Path, list[str]]]:
    """Returns the lines of a source and of its includes."""
    lines = source.read_text().splitlines()
    headers = [source.with_name(line.split('"')[1]) for line in lines if line.startswith("#include")]
    return [(source, lines), *(of for header in headers for of in with_headers(header))]


@pytest.mark.parametrize("source", BULK_COPIES, ids=lambda source: source.name)
def test_memory_is_given_back_to_the_copy_engine_after_its_reads(source: Path) -> None:
    """An arrival at a barrier named `empty`, which lets the next copy in, overtakes reads unless one of these waits for
    them in the three lines before; on a GPU that shows in one launch of a hundred."""
    arrivals = 0
    for path, lines in with_headers(source):
        for i, line in enumerate(lines):
            if re.search(r"\barrive\(\w*\.?\w*empty\b", line):
                arrivals += 1
                assert any(wait in near for wait in READS_ARE_DONE for near in lines[i - 3 : i]), f"{path}:{i + 1}"
    assert arrivals


@pytest.mark.gpu
@pytest.mark.skipif(not available(), reason="needs a Hopper GPU (sm_90a) and cuda-bindings")
def test_what_does_not_compile_comes_with_the_compilers_message(tmp_path: Path) -> None:
    source = tmp_path / "broken.cu"
    source.write_text("__global__ void broken() { no_such_name; }")
    with pytest.raises(RuntimeError, match=r'broken\.cu(.|\n)*"no_such_name" is undefined'):
        Kernel(source, "broken", {}, 32, 0)
