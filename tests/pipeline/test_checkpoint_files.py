"""Pieces of tensors in files of their own."""

import os
from pathlib import Path

import pytest
import torch

from dlrm_bench.pipeline.checkpoint_files import THREADS, Wanted, read_pieces, write_pieces
from dlrm_bench.pipeline.checkpoint_index import CheckpointError, Place

COUNT = 2 * THREADS + 1


def places(tensors: list[torch.Tensor]) -> list[tuple[Place, torch.Tensor]]:
    return [(Place(f"t{i}", (0,) * t.dim(), tuple(t.shape), 1), t) for i, t in enumerate(tensors)]


def test_tensors_come_back_and_damage_is_named(tmp_path: Path) -> None:
    state = [torch.randn(3 + i, 4, 2)[:, 1:3] for i in range(COUNT - 1)] + [torch.randn(7)]
    counted: list[None] = []
    pieces = write_pieces(tmp_path, 5, places(state), lambda: counted.append(None))
    assert len(counted) == len(pieces) == COUNT
    files = sorted(tmp_path.glob("*.bin"))
    assert [file.name for file in files] == [f"rank-5-{i}.bin" for i in range(THREADS)]
    assert sum(file.stat().st_size for file in files) == sum(tensor.nbytes for tensor in state)
    # Strided, as tables are that lie beside their optimizer state.
    read = [torch.zeros(*tensor.shape, 2)[..., 0] for tensor in state]
    wanted = [Wanted(p, [((slice(None),), read[int(p.place.tensor[1:])])]) for p in pieces]
    read_pieces(tmp_path, wanted)
    assert all(torch.equal(back, tensor) for back, tensor in zip(read, state, strict=True))
    content = bytearray(files[3].read_bytes())
    content[-1] ^= 64
    files[3].write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"rank-5-3\.bin, bytes \d+ to {len(content) - 1}, of t\d+, are damaged"):
        read_pieces(tmp_path, wanted)
    with files[3].open("r+b") as file:
        file.truncate(len(content) - 1)
    with pytest.raises(CheckpointError, match=r"rank-5-3\.bin.*: the file is truncated"):
        read_pieces(tmp_path, wanted)
    files[3].unlink()
    with pytest.raises(OSError, match=r"No such file or directory: .*rank-5-3\.bin"):
        read_pieces(tmp_path, wanted)


def test_a_piece_is_on_disk_before_the_next_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who counts pieces would not see a disk that answers no more, if only the whole file waited for it."""
    synced: list[int] = []
    fdatasync = os.fdatasync

    def sync(descriptor: int) -> None:
        fdatasync(descriptor)
        synced.append(descriptor)

    monkeypatch.setattr(os, "fdatasync", sync)
    seen: list[int] = []
    write_pieces(tmp_path, 0, places([torch.randn(5, 2)] * COUNT), lambda: seen.append(len(synced)))
    assert len(synced) == COUNT
    assert all(count >= number for number, count in enumerate(seen, 1))


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"No such file or directory: .*gone/rank-0-0\.bin"):
        write_pieces(tmp_path / "gone", 0, places([torch.zeros(3)]), lambda: None)
