"""Host memory that a GPU would reach: pinned once, let go of with the last tensor, refused with the bytes."""

import gc
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from dlrm_bench.dlrm.runtime import host_registration
from dlrm_bench.dlrm.tables.tiers import host_memory
from dlrm_bench.dlrm.tables.tiers.host_memory import host_zeros

GPU = torch.device("cuda", 0)


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """Returns bytes by address of what a made runtime has pinned."""
    of_address: dict[int, int] = {}

    def register(address: int, size: int, flags: int) -> int:
        of_address[address] = size
        return 0

    runtime = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=of_address.pop)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    return of_address


def test_memory_is_pinned_as_long_as_any_tensor_has_it(pinned: dict[int, int]) -> None:
    rows = host_zeros(1000, 16, GPU)
    assert rows.shape == (1000, 2, 16)
    assert not rows.any()
    assert pinned == {rows.data_ptr(): rows.nbytes}
    rows[3, 1] = 7
    state = rows[:, 1]
    del rows
    gc.collect()
    assert len(pinned) == 1
    assert state[3].tolist() == [7] * 16
    del state
    gc.collect()
    assert pinned == {}


def test_a_kernel_without_huge_pages_gives_others(monkeypatch: pytest.MonkeyPatch, pinned: dict[int, int]) -> None:
    monkeypatch.setattr(host_memory.mmap, "MADV_HUGEPAGE", 1 << 20)  # no advice that any kernel knows
    rows = host_zeros(1000, 16, GPU)
    assert pinned == {rows.data_ptr(): rows.nbytes}


def test_without_a_gpu_or_rows_nothing_is_pinned(pinned: dict[int, int]) -> None:
    assert host_zeros(10, 16, torch.device("cpu")).shape == (10, 2, 16)
    assert host_zeros(0, 16, GPU).shape == (0, 2, 16)
    assert pinned == {}


def test_what_cannot_be_pinned_is_refused(monkeypatch: pytest.MonkeyPatch, pinned: dict[int, int]) -> None:
    runtime = SimpleNamespace(cudaHostRegister=lambda *_: 2, cudaGetErrorString=str)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(host_registration, "_take_error", lambda _: None)
    with pytest.raises(OSError, match=r"0\.1 GB of host memory cannot be pinned \(2\)"):
        host_zeros(1_000_000, 16, GPU)
