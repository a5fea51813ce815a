"""Host memory for table rows: pinned if a GPU accesses it, in huge pages if the kernel provides them."""

import mmap
from contextlib import suppress

import torch
from torch import Tensor

from dlrm_bench.dlrm.runtime.host_registration import register, unregister

_GB = 10**9
_THREADS = 8  # of a rank that touch pages: 40 GB of 2 MB pages took 32 threads 0.8 s


def host_zeros(rows: int, columns: int, device: torch.device) -> Tensor:
    """Returns zeros in host memory, fp32 [rows, 2, columns]; a GPU can access them at the same addresses.

    OSError says how many bytes could not be allocated or pinned. PyTorch's pinned memory is not used: its allocator
    rounds up to powers of two, and uses 4 KB pages.
    """
    shape, size = (rows, 2, columns), rows * 2 * columns * 4
    if device.type != "cuda" or size == 0:
        return torch.zeros(shape)
    try:
        memory = _Registered(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise OSError(f"{size / _GB:.1f} GB of host memory cannot be allocated: {error.strerror}") from error
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    zeros = torch.frombuffer(memory, dtype=torch.float32).view(shape)  # keeps `memory` alive
    threads = torch.get_num_threads()  # often one, set by torchrun
    torch.set_num_threads(_THREADS)
    zeros.zero_()  # allocates the pages, with all of these threads; pinning would allocate them with one
    torch.set_num_threads(threads)
    memory.register(zeros.data_ptr(), size, device)
    return zeros


class _Registered(mmap.mmap):
    """A mapping that a GPU can access until it is unmapped."""

    _address: int | None = None

    def register(self, address: int, size: int, device: torch.device) -> None:
        """Pins the mapping's memory; OSError if that fails."""
        error = register(address, size, device)
        if error is not None:
            raise OSError(f"{size / _GB:.1f} GB of host memory cannot be pinned ({error}); see `ulimit -l`")
        self._address = address

    def __del__(self) -> None:
        if self._address is not None:
            unregister(self._address)
