"""Host memory that CUDA knows: a GPU reads and writes it under its own address, and copies to it run by themselves."""

from contextlib import suppress

import torch


def register(address: int, size: int, device: torch.device) -> str | None:
    """Registers host memory, of `size` bytes, with CUDA; returns CUDA's error, None without one."""
    runtime = torch.cuda.cudart()
    with torch.cuda.device(device):
        status = runtime.cudaHostRegister(address, size, 0)
        if int(status) == 0:
            return None
        _take_error(device)
    return str(runtime.cudaGetErrorString(status))  # the status' own str knows success alone


def unregister(address: int) -> None:
    """Takes memory back that `register` was given."""
    torch.cuda.cudart().cudaHostUnregister(address)


def _take_error(device: torch.device) -> None:
    """Has a kernel raise the error that CUDA keeps of a failed call: the next one would else, in whatever is to tell
    the other ranks, which would wait for it."""
    with suppress(RuntimeError):
        torch.ones(1, device=device).add_(1)
