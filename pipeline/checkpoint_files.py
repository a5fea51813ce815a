"""Files of a checkpoint: the tensors' bytes, piece by piece, with checksums.

Several threads copy pieces via pinned memory to their own files, and back. A piece is on disk before the next one is
written, so that a counter of pieces shows a disk that stops responding within one piece.
"""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dlrm_bench.dlrm.tables.tiers.tiered_rows import StoredRows
from dlrm_bench.pipeline.checkpoint_index import THREADS, Piece, Place, Slices, checksum, read_piece


@dataclass(frozen=True, slots=True)
class Wanted:
    """A piece to read, and the destination of its elements."""

    piece: Piece
    targets: Sequence[tuple[Slices | tuple[Tensor], Tensor | StoredRows]]
    """Slices of the piece, or the numbers of some of its rows, int64 on the host, each with its destination memory."""


def write_pieces(
    folder: Path,
    rank: int,
    pieces: Sequence[tuple[Place, Tensor | StoredRows]],
    on_piece: Callable[[], None],
    nice: int = 0,
) -> list[Piece]:
    """Writes pieces, fp32 of one device, to THREADS files, which are on disk on return; returns the place of each.

    on_piece: called by any thread after a piece is on disk. nice: of these threads, as for nice(1). OSError, with the
    file's name, if the disk is full.
    """
    shares = [pieces[i::THREADS] for i in range(min(THREADS, len(pieces)))]

    def write(number: int) -> list[Piece]:
        path = folder / f"rank-{rank}-{number}.bin"
        try:
            return _write(path, shares[number], on_piece)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from error

    def give_way() -> None:  # on Linux each thread has a nice value
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)

    with ThreadPoolExecutor(THREADS, initializer=give_way if nice else None) as pool:
        return [piece for of_file in pool.map(write, range(len(shares))) for piece in of_file]


def _write(
    path: Path, pieces: Sequence[tuple[Place, Tensor | StoredRows]], on_piece: Callable[[], None]
) -> list[Piece]:
    device, offset, written = pieces[0][1].device, 0, []
    ready = all(
        isinstance(tensor, Tensor) and tensor.device.type == "cpu" and tensor.is_contiguous() for _, tensor in pieces
    )
    size = 0 if ready else max(place.nbytes for place, _ in pieces)
    with path.open("wb") as file, _staging(size, device) as staging:
        for place, tensor in pieces:
            assert tensor.dtype == torch.float32
            values = tensor if isinstance(tensor, Tensor) else tensor.clone()
            host = values
            if not ready:
                host = staging[: place.nbytes].view(torch.float32).view(place.shape)
                host.copy_(values, non_blocking=True)
                _wait(device)
            data = host.detach().view(-1).numpy().data.cast("B")
            written.append(Piece(place, path.name, offset, checksum(data)))
            offset += file.write(data)
            file.flush()
            os.fdatasync(file.fileno())
            on_piece()
    return written


def read_pieces(folder: Path, wanted: Sequence[Wanted]) -> None:
    """Reads and checks pieces, into memory of one device.

    CheckpointError, naming file and bytes, if a piece is damaged; OSError if one cannot be read.
    """
    shares = [wanted[i::THREADS] for i in range(min(THREADS, len(wanted)))]
    with ThreadPoolExecutor(THREADS) as pool:
        for _ in pool.map(lambda share: _read(folder, share), shares):
            pass


@torch.no_grad()
def _read(folder: Path, wanted: Sequence[Wanted]) -> None:
    device = wanted[0].targets[0][1].device
    with _staging(max(of.piece.place.nbytes for of in wanted), device) as staging:
        for of in wanted:
            host = staging[: of.piece.place.nbytes]
            read_piece(folder, of.piece, host.numpy().data)
            read = host.view(torch.float32).view(of.piece.place.shape)
            for elements, target in of.targets:
                target.copy_(read[elements], non_blocking=True)
            _wait(device)


@contextmanager
def _staging(size: int, device: torch.device) -> Iterator[Tensor]:
    """Yields host memory, uint8 [size], and for a GPU makes a separate stream current in this thread, so that its
    copies and the training do not queue behind each other."""
    if device.type != "cuda":
        yield torch.empty(size, dtype=torch.uint8)
        return
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        yield torch.empty(size, dtype=torch.uint8, pin_memory=True)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
