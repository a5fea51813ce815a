"""Pieces in files that stay mapped: filled again and again, read like a checkpoint's, and had before the training."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from dlrm_bench.pipeline.checkpoint_files import Wanted, read_pieces
from dlrm_bench.pipeline.checkpoint_index import THREADS, CheckpointError, Piece, Place
from dlrm_bench.pipeline.checkpoint_memory import PiecesInMemory, file_sizes, placed

COUNT = THREADS + 3
CPU = torch.device("cpu")


def places() -> list[Place]:
    return [Place(f"t{i}", (0, 0), (3 + i, 2), 1) for i in range(COUNT)]


def tensors(value: float, device: torch.device = CPU) -> list[tuple[Place, torch.Tensor]]:
    """Strided, as tables are that lie beside their optimizer state; of parameters too."""
    filled = [(place, torch.full((*place.shape, 2), value, device=device)[..., 1]) for place in places()]
    return [(place, torch.nn.Parameter(tensor) if i == 0 else tensor) for i, (place, tensor) in enumerate(filled)]


def read(folder: Path, pieces: list[Piece]) -> list[torch.Tensor]:
    found = [torch.zeros(piece.place.shape) for piece in pieces]
    everything = (slice(None), slice(None))
    read_pieces(folder, [Wanted(p, [(everything, into)]) for p, into in zip(pieces, found, strict=True)])
    return found


def test_files_are_filled_again_under_another_name_and_by_another_process(tmp_path: Path) -> None:
    pieces = placed(5, places())
    assert sum(file_sizes(pieces).values()) == sum(place.nbytes for place in places())
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    memory = PiecesInMemory(first, pieces, CPU)
    counted: list[None] = []
    memory.fill(tensors(1.0), lambda: counted.append(None))
    assert len(counted) == COUNT
    assert all((tensor == 1).all() for tensor in read(first, pieces))
    first.rename(second)
    memory.fill(tensors(2.0), lambda: None)
    assert all((tensor == 2).all() for tensor in read(second, pieces))
    again = PiecesInMemory(second, pieces, CPU)
    assert all((tensor == 2).all() for _, tensor in again.pieces)
    again.fill(tensors(3.0), lambda: None)
    assert all((tensor == 3).all() for tensor in read(second, pieces))
    assert not any(tensor.requires_grad for _, tensor in again.pieces)
    memory.close()


def test_another_layout_is_a_fault_of_the_program(tmp_path: Path) -> None:
    memory = PiecesInMemory(tmp_path, placed(0, places()), CPU)
    with pytest.raises(AssertionError, match="layout"):
        memory.fill(tensors(1.0)[:-1], lambda: None)


def test_a_file_that_is_cut_short_is_truncated_also_without_checksums(tmp_path: Path) -> None:
    pieces = placed(0, places())
    PiecesInMemory(tmp_path, pieces, CPU)
    with (tmp_path / "rank-0-0.bin").open("r+b") as file:
        file.truncate(8)
    with pytest.raises(CheckpointError, match=r"rank-0-0\.bin, .* the file is truncated"):
        read(tmp_path, pieces)


def test_memory_that_cannot_be_had_is_an_error_with_the_files_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not a SIGBUS at the first copy."""

    def full(descriptor: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match=r"No space left on device: .*rank-0-0\.bin"):
        PiecesInMemory(tmp_path, placed(0, places()), CPU)


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """A folder on a tmpfs: CUDA need not register pages of another file system."""
    with TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.mark.gpu
def test_copies_from_a_gpu_arrive_in_registered_memory(in_memory: Path) -> None:
    device = torch.device("cuda", 0)
    pieces = placed(0, places())
    memory = PiecesInMemory(in_memory, pieces, device)
    assert all(tensor.is_pinned() for _, tensor in memory.pieces)
    for value in (1.0, 2.0):
        memory.fill(tensors(value, device), lambda: None)
        assert all((tensor == value).all() for tensor in read(in_memory, pieces))
    memory.close()
