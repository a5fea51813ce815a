"""Pieces in files that stay mapped: filled again and again, read like a checkpoint's, and had before the training."""

import errno
import os
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
import torch.distributed as dist

from dlrm_bench.dlrm.tables.tiers.placement import Pool
from dlrm_bench.dlrm.tables.tiers.tiered_rows import TieredRows
from dlrm_bench.pipeline import checkpoint_memory
from dlrm_bench.pipeline.checkpoint_files import Wanted, read_pieces
from dlrm_bench.pipeline.checkpoint_index import THREADS, CheckpointError, Piece, Place
from dlrm_bench.pipeline.checkpoint_memory import (
    PiecesInMemory,
    Staging,
    buffers_for,
    file_sizes,
    is_allocated,
    placed,
)

COUNT = 2 * THREADS + 3
CPU = torch.device("cpu")


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """A folder on a tmpfs."""
    with TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def places() -> list[Place]:
    """Of different sizes, larger than a page, so that most begin within one."""
    return [Place(f"t{i}", (0, 0), (700 + 31 * i, 2), 1) for i in range(COUNT)]


def tensors(value: float, device: torch.device = CPU) -> list[tuple[Place, torch.Tensor]]:
    """Strided, as tables are that lie beside their optimizer state; of parameters too."""
    filled = [(place, torch.full((*place.shape, 2), value, device=device)[..., 1]) for place in places()]
    return [(place, torch.nn.Parameter(tensor) if i == 0 else tensor) for i, (place, tensor) in enumerate(filled)]


def in_files(folder: Path, pieces: list[Piece], device: torch.device = CPU) -> PiecesInMemory:
    return PiecesInMemory(folder, pieces, Staging(pieces, device))


def read(folder: Path, pieces: list[Piece]) -> list[torch.Tensor]:
    found = [torch.zeros(piece.place.shape) for piece in pieces]
    read_pieces(folder, [Wanted(p, [((slice(None),), into)]) for p, into in zip(pieces, found, strict=True)])
    return found


def test_files_are_filled_again_under_another_name_and_by_another_process(tmp_path: Path) -> None:
    pieces = placed(5, places())
    assert sum(file_sizes(pieces).values()) == sum(place.nbytes for place in places())
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    memory = in_files(first, pieces)
    counted: list[None] = []
    memory.fill(tensors(1.0), lambda: counted.append(None))
    assert len(counted) == COUNT
    assert all((tensor == 1).all() for tensor in read(first, pieces))
    first.rename(second)
    memory.fill(tensors(2.0), lambda: None)
    assert all((tensor == 2).all() for tensor in read(second, pieces))
    again = in_files(second, pieces)
    assert all((tensor == 2).all() for _, tensor in again.pieces)
    again.fill(tensors(3.0), lambda: None)
    assert all((tensor == 3).all() for tensor in read(second, pieces))
    assert not any(tensor.requires_grad for _, tensor in again.pieces)


def test_another_layout_is_a_fault_of_the_program(tmp_path: Path) -> None:
    memory = in_files(tmp_path, placed(0, places()))
    with pytest.raises(AssertionError, match="layout"):
        memory.fill(tensors(1.0)[:-1], lambda: None)


def test_a_file_that_is_cut_short_is_truncated_also_without_checksums(tmp_path: Path) -> None:
    pieces = placed(0, places())
    in_files(tmp_path, pieces)
    with (tmp_path / "rank-0-0.bin").open("r+b") as file:
        file.truncate(8)
    with pytest.raises(CheckpointError, match=r"rank-0-0\.bin, .* the file is truncated"):
        read(tmp_path, pieces)


def refuse(descriptor: int, offset: int, size: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_memory_that_cannot_be_had_is_an_error_with_the_files_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not a SIGBUS at the first copy."""
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(OSError, match=r"No space left on device: .*rank-0-0\.bin"):
        in_files(tmp_path, placed(0, places()))


def test_memory_of_an_earlier_process_is_mapped_and_no_more(
    tmp_path: Path, in_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files without all of their memory get it first."""
    pieces = placed(0, places())
    in_files(in_memory, pieces).fill(tensors(1.0), lambda: None)
    sparse, size = in_memory / "rank-0-2.bin", file_sizes(pieces)["rank-0-2.bin"]
    os.truncate(sparse, 0)
    os.truncate(sparse, size)
    assert not is_allocated(sparse.stat(), size)
    allocated: list[int] = []
    allocate = os.posix_fallocate

    def note(descriptor: int, offset: int, size: int) -> None:
        allocated.append(size)
        allocate(descriptor, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", note)
    in_files(in_memory, pieces)
    assert allocated == [size]
    assert is_allocated(sparse.stat(), size)
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    again = in_files(in_memory, pieces)
    assert [bool((values == 1).all()) for _, values in again.pieces] == [i % THREADS != 2 for i in range(COUNT)]


def two_tiers() -> TieredRows:
    """Rows of which a part is on the device."""
    pool = Pool(rows=(range(900),), ids=(range(5),), device_rows=200, guests=80, window=4)
    rows = TieredRows([pool], 3, CPU, np.zeros(900, np.float32))
    for values in rows.of_table(0, 900):
        values.copy_(torch.rand(900, 3))
    return rows


@pytest.mark.parametrize("with_buffers", [False, True])
def test_bytes_are_equal_by_way_of_few_buffers(
    tmp_path: Path, one_rank: None, monkeypatch: pytest.MonkeyPatch, with_buffers: bool
) -> None:
    """Several pieces of different sizes, and rows in two tiers, go through each buffer; on a GPU always."""
    weights, state = two_tiers().of_table(0, 900)
    values = [torch.rand(700 + 31 * i, 2, 2)[:, :, i % 2] for i in range(COUNT)]
    values = [
        *values,
        weights[5:800:3],
        torch.rand(3),
        state,
        torch.rand(40, 30).t(),
        torch.rand(2, 600),
        torch.zeros(0, 4),
    ]
    state_pieces = [(Place(f"t{i}", (0,) * len(of.shape), tuple(of.shape), 1), of) for i, of in enumerate(values)]
    pieces = placed(0, [place for place, _ in state_pieces])
    staging = Staging(pieces, CPU)
    if with_buffers:
        monkeypatch.setattr(checkpoint_memory, "COPIERS", 3)
        staging._buffers = buffers_for(pieces, CPU)
        assert len(staging._buffers) < len(pieces)
    memory = PiecesInMemory(tmp_path, pieces, staging)
    for _ in range(2):
        memory.fill(state_pieces, lambda: None)
        for found, expected in zip(read(tmp_path, pieces), values, strict=True):
            assert torch.equal(found, expected if isinstance(expected, torch.Tensor) else expected.clone())
        values[0].add_(1)


def test_an_error_of_a_thread_is_raised_after_all_have_ended(tmp_path: Path) -> None:
    memory = in_files(tmp_path, placed(0, places()))
    numbers, ended = count(1), False

    def fails_once() -> None:
        assert not ended
        if next(numbers) == 3:
            raise MemoryError("no memory for a copy")
        time.sleep(0.01)

    with pytest.raises(MemoryError, match="no memory for a copy"):
        memory.fill(tensors(1.0), fails_once)
    ended = True
    copied = next(numbers)
    time.sleep(0.05)
    assert next(numbers) == copied + 1
    memory.fill(tensors(2.0), lambda: None)
    assert all((tensor == 2).all() for _, tensor in memory.pieces)


@pytest.mark.gpu
def test_copies_from_a_gpu_go_through_pinned_buffers(in_memory: Path) -> None:
    """The files themselves are not pinned. Slots share the buffers, and a copy follows the work that was queued."""
    device = torch.device("cuda", 0)
    pieces = placed(0, places())
    staging, slots = Staging(pieces, device), [in_memory / "0", in_memory / "1"]
    memories = []
    for slot in slots:
        slot.mkdir()
        memories.append(PiecesInMemory(slot, pieces, staging))
    assert all(buffer._memory.is_pinned() for buffers in staging._buffers for buffer in buffers)
    assert not any(tensor.is_pinned() for memory in memories for _, tensor in memory.pieces)
    for turn in range(4):
        values = [(place, torch.rand(*place.shape, 2, device=device)[..., turn % 2]) for place in places()]
        torch.cuda._sleep(100_000_000)
        for _, value in values:
            value.add_(1)
        memories[turn % 2].fill(values, lambda: None)
        found = [torch.zeros(*place.shape, 2, device=device)[..., 0] for place in places()]
        everything = (slice(None), slice(None))
        read_pieces(slots[turn % 2], [Wanted(p, [(everything, into)]) for p, into in zip(pieces, found, strict=True)])
        assert all(torch.equal(into, value) for into, (_, value) in zip(found, values, strict=True))
