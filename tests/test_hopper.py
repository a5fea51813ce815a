"""Kernels compile for Hopper GPUs, as the kernels' benchmark launches them there."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dlrm_bench.bench import ROOT
from dlrm_bench.kernels._triton import triton

SHARED_BYTES = 227 * 1024  # of a thread block, at most


def has_assembler() -> bool:
    """Whether this Triton knows NVIDIA's GPUs: it asks its assembler's version before it compiles."""
    return triton is not None and (Path(triton.__file__).parent / "backends/nvidia/bin/ptxas").is_file()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What tests/hopper.py says."""
    if not has_assembler():
        pytest.skip("needs Triton with NVIDIA's assembler (pip install triton)")
    cache = str(tmp_path_factory.mktemp("triton"))
    environment = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": cache, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-W", "ignore", "-m", "tests.hopper"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_every_triton_kernel_compiles(found: Any) -> None:
    assert not found["errors"], "\n\n".join(f"{kernel}: {error}" for kernel, error in found["errors"].items())
    assert found["shared_bytes"].keys() == set(found["kernels"]), "kernels that no case of the benchmark launches"
    assert {kernel: size for kernel, size in found["shared_bytes"].items() if size > SHARED_BYTES} == {}


@pytest.mark.slow
def test_every_cuda_source_compiles(found: Any) -> None:
    if found["sources"] is None:
        pytest.skip("needs NVRTC (pip install nvidia-cuda-nvrtc cuda-bindings)")
    messages = [f"{source}: {message}" for source, message in found["sources"].items() if message]
    assert not messages, "\n\n".join(messages)
    assert found["sources"].keys() == {source.name for source in ROOT.glob("kernels/**/*.cu")}
