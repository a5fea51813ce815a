"""Host memory registered with CUDA: a GPU accesses it at its own addresses, and copies to it are asynchronous."""

from contextlib import suppress

import torch


def register(address: int, size: int, device: torch.device) -> str | None:
    """Registers `size` bytes of host memory with CUDA; returns CUDA's error, or None."""
    runtime = torch.cuda.cudart()
    with torch.cuda.device(device):
        status = runtime.cudaHostRegister(address, size, 0)
        if int(status) == 0:
            return None
        _take_error(device)
    return str(runtime.cudaGetErrorString(status))  # str(status) only knows success


def unregister(address: int) -> None:
    """Unregisters memory that `register` has registered."""
    torch.cuda.cudart().cudaHostUnregister(address)


def _take_error(device: torch.device) -> None:
    """Runs a kernel to raise the error that CUDA keeps after a failed call. Otherwise the next kernel would raise it,
    and that may be the one that must tell the other ranks, which wait for it."""
    with suppress(RuntimeError):
        torch.ones(1, device=device).add_(1)
