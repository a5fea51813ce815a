"""Host memory that CUDA registers, or refuses: its error is told once, and not by the next kernel."""

import mmap
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from dlrm_bench.dlrm.runtime import host_registration
from dlrm_bench.dlrm.runtime.host_registration import register, unregister

GPU = torch.device("cuda", 0)


@pytest.mark.parametrize("status", [0, 2])
def test_an_error_is_taken_where_there_is_one(monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    taken: list[torch.device] = []
    runtime = SimpleNamespace(cudaHostRegister=lambda *_: status, cudaGetErrorString=lambda of: f"error {of}")
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(host_registration, "_take_error", taken.append)
    assert register(1 << 20, 4096, GPU) == (None if status == 0 else "error 2")
    assert taken == ([] if status == 0 else [GPU])


@pytest.mark.gpu
def test_a_refusal_leaves_the_gpu_as_it_was() -> None:
    """Memory that is registered already is refused."""
    memory = torch.frombuffer(mmap.mmap(-1, 1 << 20), dtype=torch.uint8)
    assert register(memory.data_ptr(), memory.nbytes, GPU) is None
    assert memory.is_pinned()
    assert "already" in str(register(memory.data_ptr(), memory.nbytes, GPU))
    assert torch.ones(3, device=GPU).add_(1).tolist() == [2, 2, 2]
    unregister(memory.data_ptr())
    assert not memory.is_pinned()
