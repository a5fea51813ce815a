"""Pieces of a state in files of an in-memory file system (tmpfs), mapped for the duration of a run.

The files outlive the process that fills them: a process that starts later reads them like those of any checkpoint. All
their memory is allocated, and registered with CUDA, before the training; a copy then takes only as long as the link to
the host needs.
"""

import mmap
import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from dlrm_bench.dlrm.runtime.host_registration import register, unregister
from dlrm_bench.dlrm.tables.tiers.tiered_rows import StoredRows
from dlrm_bench.pipeline.checkpoint_index import THREADS, CheckpointError, Piece, Place

_IN_FLIGHT = 8
"""Pieces queued to the copy engine at a time: it does not idle, and a counter of pieces advances steadily."""


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


class PiecesInMemory:
    """The memory of one rank's pieces, reused by every copy."""

    def __init__(self, folder: Path, pieces: Sequence[Piece], device: torch.device) -> None:
        """Creates and maps the files in `folder`, or maps existing ones; the folder may be renamed later.

        device: the GPU that will copy to them, or the CPU. OSError if the memory cannot be allocated, CheckpointError
        if CUDA cannot register it.
        """
        sizes = file_sizes(pieces)
        with ThreadPoolExecutor(THREADS) as pool:
            maps = pool.map(lambda name: _mapped(folder / name, sizes[name]), sizes)
            self._files = dict(zip(sizes, maps, strict=True))
            self._registered: list[Tensor] = []
            if device.type == "cuda":
                for file in pool.map(lambda file: _register(file, device), self._files.values()):
                    self._registered.append(file)
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self.pieces: list[tuple[Place, Tensor]] = [(piece.place, self._memory_of(piece)) for piece in pieces]
        """The places and their memory, fp32."""

    def _memory_of(self, piece: Piece) -> Tensor:
        data = self._files[piece.file][piece.offset : piece.offset + piece.place.nbytes]
        return data.view(torch.float32).view(piece.place.shape)

    @torch.no_grad()
    def fill(self, pieces: Sequence[tuple[Place, Tensor | StoredRows]], on_piece: Callable[[], None]) -> None:
        """Copies pieces, in the order of their places, and returns when all are copied.

        on_piece: called for each piece, by any thread.
        """
        assert [place for place, _ in pieces] == [place for place, _ in self.pieces], "the layout of a state is fixed"
        pairs = [(here, there) for (_, here), (_, there) in zip(self.pieces, pieces, strict=True)]
        if self._device.type == "cuda":
            self._fill_from_gpu(pairs, on_piece)
            return

        def copy(pair: tuple[Tensor, Tensor | StoredRows]) -> None:
            with torch.no_grad():  # a per-thread setting
                pair[0].copy_(_values(pair[1]))
            on_piece()

        with ThreadPoolExecutor(THREADS) as pool:
            for _ in pool.map(copy, pairs):
                pass

    def _fill_from_gpu(self, pairs: Sequence[tuple[Tensor, Tensor | StoredRows]], on_piece: Callable[[], None]) -> None:
        """Copies each second tensor to the first one's registered memory, by the copy engine, on a separate
        stream."""
        if self._stream is None:  # kept for later copies: a stream keeps memory for copies of strided pieces
            self._stream = torch.cuda.Stream(self._device)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        in_flight: deque[torch.cuda.Event] = deque()

        def wait_for_one() -> None:
            in_flight.popleft().synchronize()
            on_piece()

        with torch.cuda.stream(self._stream):
            for here, there in pairs:
                here.copy_(_values(there), non_blocking=True)
                copied = torch.cuda.Event()
                copied.record()
                in_flight.append(copied)
                if len(in_flight) > _IN_FLIGHT:
                    wait_for_one()
        while in_flight:
            wait_for_one()

    def close(self) -> None:
        """Unregisters the memory from CUDA."""
        for file in self._registered:
            unregister(file.data_ptr())
        self._registered.clear()


def _mapped(path: Path, size: int) -> Tensor:
    """Returns the memory of a file, uint8 [size], fully allocated: a later write to it cannot fail."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if os.fstat(descriptor).st_size != size:
            os.ftruncate(descriptor, 0)
        os.posix_fallocate(descriptor, 0, size)
        memory = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(descriptor)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _register(file: Tensor, device: torch.device) -> Tensor:
    """Registers memory with CUDA, so that copies to it are asynchronous; returns it."""
    error = register(file.data_ptr(), file.nbytes, device)
    if error is not None:
        raise CheckpointError(
            f"CUDA cannot register {file.nbytes / 1e9:.1f} GB of memory ({error}): raise `ulimit -l`, or leave "
            "--snapshot.every out"
        )
    return file


def _values(piece: Tensor | StoredRows) -> Tensor:
    return piece if isinstance(piece, Tensor) else piece.clone()
