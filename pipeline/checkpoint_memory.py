"""Pieces of a state in files of an in-memory file system (tmpfs), mapped for the duration of a run.

The files outlive the process that fills them: a process that starts later reads them like those of any checkpoint. All
their memory is allocated before the training. It is not pinned, because the kernel needs seconds to pin it, and again
seconds to free it when a process is killed: a GPU copies to a few pinned buffers, and threads copy on from there, while
the copy engine fills other buffers.
"""

import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dlrm_bench.dlrm.tables.tiers.tiered_rows import StoredRows
from dlrm_bench.pipeline.checkpoint_index import THREADS, Piece, Place

COPIERS = 24
"""Threads that copy a GPU's pieces. On two H200s at once, with 32 cores, 24 copied 24 to 37 GB/s of each, in
pieces of 32 MiB, 16 copied 19 to 31, 12 16 to 30 and 8 13 to 21; in parts of 4 MiB 8 and 16 copied 8 to 11."""


def placed(rank: int, places: Sequence[Place]) -> list[Piece]:
    """Returns the file and the bytes of each place of a rank, without checksums, in THREADS files, as in a
    checkpoint."""
    ends = [0] * THREADS
    pieces = []
    for number, place in enumerate(places):
        file = number % THREADS
        pieces.append(Piece(place, f"rank-{rank}-{file}.bin", ends[file], None))
        ends[file] += place.nbytes
    return pieces


def file_sizes(pieces: Sequence[Piece]) -> dict[str, int]:
    """Returns the size in bytes of each file that contains pieces, by name."""
    sizes: dict[str, int] = {}
    for piece in pieces:
        sizes[piece.file] = max(sizes.get(piece.file, 0), piece.offset + piece.place.nbytes)
    return sizes


def is_allocated(file: os.stat_result, size: int) -> bool:
    """Whether a file has `size` bytes and memory for all of them."""
    return file.st_size == size and 512 * file.st_blocks >= size


class Buffer:
    """Host memory for a piece, pinned for copies from a GPU."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        # Threads that wait sleep: if all of them asked the driver again and again, it would launch copies later.
        self._copied = torch.cuda.Event(blocking=True) if device.type == "cuda" else None
        self._values = self._memory

    def start(self, values: Tensor) -> None:
        """Starts to copy values to the buffer, on the current stream."""
        self._values = self._memory[: values.nbytes].view(values.dtype).view(values.shape)
        self._values.copy_(values, non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def copy_to(self, into: Tensor) -> None:
        """Waits for the values, and copies them."""
        if self._copied is not None:
            self._copied.synchronize()
        _copy_on_host(self._values, into)


class Staging:
    """Pinned buffers and streams of the threads that copy a GPU's pieces; none for the CPU, whose pieces are copied at
    once. Slots that are filled one after another share them."""

    def __init__(self, pieces: Sequence[Piece], device: torch.device) -> None:
        """pieces: those that will be copied. device: where they are."""
        self._device = device
        self._buffers: list[tuple[Buffer, Buffer]] = []
        self._streams: list[torch.cuda.Stream] = []  # kept: a stream keeps memory for copies of strided pieces
        if device.type == "cuda":
            self._buffers = buffers_for(pieces, device)
            self._streams = [torch.cuda.Stream(device) for _ in self._buffers]

    def each(self, work: Callable[[int], None]) -> None:
        """Calls `work` with 0, 1, ... COPIERS - 1, each in a thread, on the stream of its buffers, which waits for the
        caller's. Returns when all have ended; raises the first error, after which no further call begins."""
        for stream in self._streams:
            stream.wait_stream(torch.cuda.current_stream(self._device))

        def on_stream(number: int) -> None:
            with torch.no_grad(), self._on_stream(number):  # both are per-thread settings
                work(number)

        with ThreadPoolExecutor(COPIERS) as pool:
            for _ in pool.map(on_stream, range(COPIERS)):
                pass

    @contextmanager
    def _on_stream(self, number: int) -> Iterator[None]:
        if not self._streams:
            yield
            return
        with torch.cuda.device(self._device), torch.cuda.stream(self._streams[number]):
            yield

    def copy(self, number: int, pieces: Iterable[tuple[Tensor | StoredRows, Tensor]]) -> Iterator[None]:
        """Copies pieces' values to host memory, each to that given with it, of equal shape; yields after each. For
        `work` of `each`, with its number."""
        values = ((of.detach() if isinstance(of, Tensor) else of.clone(), into) for of, into in pieces)
        if not self._buffers:
            for of, into in values:
                _copy_on_host(of, into)
                yield
            return
        before: tuple[Buffer, Tensor] | None = None
        for (of, into), buffer in zip(values, cycle(self._buffers[number])):
            buffer.start(of)  # beside the copy of the piece before it
            if before is not None:
                before[0].copy_to(before[1])
                yield
            before = buffer, into
        if before is not None:
            before[0].copy_to(before[1])
            yield


def _copy_on_host(values: Tensor, into: Tensor) -> None:
    # Not by PyTorch, which starts threads for each of these threads unless OMP_NUM_THREADS is set.
    np.copyto(into.numpy(), values.numpy())


def buffers_for(pieces: Sequence[Piece], device: torch.device) -> list[tuple[Buffer, Buffer]]:
    """Returns two buffers for each thread, which any of the pieces fits into."""
    nbytes = max((piece.place.nbytes for piece in pieces), default=0)
    return [(Buffer(nbytes, device), Buffer(nbytes, device)) for _ in range(COPIERS)]


class PiecesInMemory:
    """The memory of one rank's pieces, reused by every copy."""

    def __init__(self, folder: Path, pieces: Sequence[Piece], staging: Staging) -> None:
        """Creates and maps the files in `folder`, or maps existing ones; the folder may be renamed later.

        staging: made for these pieces. OSError if the memory cannot be allocated.
        """
        sizes = file_sizes(pieces)
        with ThreadPoolExecutor(THREADS) as pool:
            maps = pool.map(lambda name: _mapped(folder / name, sizes[name]), sizes)
            self._files = dict(zip(sizes, maps, strict=True))
        self._staging = staging
        self.pieces: list[tuple[Place, Tensor]] = [(piece.place, self._memory_of(piece)) for piece in pieces]
        """The places and their memory, fp32."""

    def _memory_of(self, piece: Piece) -> Tensor:
        data = self._files[piece.file][piece.offset : piece.offset + piece.place.nbytes]
        return data.view(torch.float32).view(piece.place.shape)

    def fill(self, pieces: Sequence[tuple[Place, Tensor | StoredRows]], on_piece: Callable[[], None]) -> None:
        """Copies pieces, in the order of their places, and returns when all are copied.

        on_piece: called for each piece, by any thread. After an error, which is raised, some pieces are new and some
        are old.
        """
        assert [place for place, _ in pieces] == [place for place, _ in self.pieces], "the layout of a state is fixed"
        pairs = [(there, here) for (_, here), (_, there) in zip(self.pieces, pieces, strict=True)]

        def copy(number: int) -> None:
            for _ in self._staging.copy(number, pairs[number::COPIERS]):
                on_piece()

        self._staging.each(copy)


def _mapped(path: Path, size: int) -> Tensor:
    """Returns the memory of a file, uint8 [size], fully allocated: a later write to it cannot fail."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        status, flags = os.fstat(descriptor), mmap.MAP_SHARED
        if not is_allocated(status, size):
            if status.st_size != size:
                os.ftruncate(descriptor, 0)
            os.posix_fallocate(descriptor, 0, size)
            flags |= mmap.MAP_POPULATE  # zeroes new memory now, and not in the first copy
        memory = mmap.mmap(descriptor, size, flags=flags)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(descriptor)
    return torch.frombuffer(memory, dtype=torch.uint8)
