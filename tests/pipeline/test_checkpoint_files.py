"""Pieces of tensors in files of their own."""

from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import CheckpointException, load, save

from dlrm_bench.pipeline.checkpoint_files import THREADS, TensorFileReader, TensorFileWriter


def test_tensors_come_back_and_a_file_cut_short_is_named(tmp_path: Path) -> None:
    state = {f"t{i}": torch.randn(3 + i, 4, 2)[:, 1:3] for i in range(2 * THREADS + 1)} | {"flat": torch.randn(7)}
    save(state, storage_writer=TensorFileWriter(tmp_path, 5, torch.device("cpu")), no_dist=True)
    files = sorted(tmp_path.glob("*.bin"))
    assert [file.name for file in files] == [f"rank-5-{i}.bin" for i in range(THREADS)]
    assert sum(file.stat().st_size for file in files) == sum(tensor.nbytes for tensor in state.values())
    # Strided, as tables are that lie beside their optimizer state.
    read = {name: torch.zeros(*tensor.shape, 2)[..., 0] for name, tensor in state.items()}
    load(read, storage_reader=TensorFileReader(tmp_path), no_dist=True)
    assert all(torch.equal(read[name], tensor) for name, tensor in state.items())
    with files[2].open("r+b") as file:
        file.truncate(files[2].stat().st_size - 1)
    with pytest.raises(CheckpointException, match=r"rank-5-2\.bin is truncated"):
        load(read, storage_reader=TensorFileReader(tmp_path), no_dist=True)
