"""Files of a checkpoint: bytes of tensors, one after the other, as a storage of torch.distributed.checkpoint.

That library's own storage makes an archive of each tensor, with a checksum that nobody reads, in one thread through a
Python stream, and unpacks them as slowly. Here some threads copy pieces to pinned memory and to files of their own, and
back: half of the CPU time for a GB that is written, less than half for one that is read (one CPU, from and to memory).
"""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from math import prod
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

THREADS = 4
"""Files that a rank writes or reads at a time: a file system serializes writes to one file."""

_Place = tuple[str, int, tuple[int, ...]]
"""File of a piece, its first byte there, and its shape. All pieces are fp32."""


class TensorFileWriter(FileSystemWriter):
    """Writes this rank's pieces to THREADS files, which are on disk when it returns."""

    def __init__(self, folder: Path, rank: int, device: torch.device) -> None:
        """device: that of the pieces."""
        super().__init__(folder, sync_files=True)
        self._folder, self._name, self._device = folder, f"rank-{rank}", device

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """See StorageWriter. OSError where the disk has no room."""
        shares = [plan.items[i::THREADS] for i in range(min(THREADS, len(plan.items)))]
        with ThreadPoolExecutor(THREADS) as pool:
            written = list(pool.map(partial(self._write, planner), range(len(shares)), shares))
        done: Future[list[WriteResult]] = Future()
        done.set_result([result for of_file in written for result in of_file])
        return done

    def _write(self, planner: SavePlanner, number: int, items: Sequence[WriteItem]) -> list[WriteResult]:
        name, offset, results = f"{self._name}-{number}.bin", 0, []
        sizes = [_bytes(item.tensor_data.chunk.sizes) for item in items if item.tensor_data is not None]
        with (self._folder / name).open("wb") as file, _staging(max(sizes), self._device) as staging:
            for item, size in zip(items, sizes, strict=True):
                tensor = planner.resolve_data(item)
                assert isinstance(tensor, Tensor)
                host = staging[:size]
                host.view(torch.float32).view(tensor.shape).copy_(tensor, non_blocking=True)
                _wait(self._device)
                file.write(host.numpy().data)
                place: _Place = (name, offset, tuple(tensor.shape))
                results.append(WriteResult(index=item.index, size_in_bytes=size, storage_data=place))
                offset += size
            file.flush()
            os.fsync(file.fileno())
        return results


class TensorFileReader(FileSystemReader):
    """Reads what TensorFileWriters wrote."""

    storage_data: dict[MetadataIndex, _Place]

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._folder = folder

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """See StorageReader. OSError or ValueError where a file is missing or cut short."""
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self.storage_data[item.storage_index][0], []).append(item)
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(partial(self._read, planner), by_file, by_file.values()))
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, planner: LoadPlanner, name: str, items: Sequence[ReadItem]) -> None:
        device = planner.resolve_tensor(items[0]).device
        size = max(_bytes(self.storage_data[item.storage_index][2]) for item in items)
        with (self._folder / name).open("rb") as file, _staging(size, device) as staging:
            for item in items:
                _, offset, shape = self.storage_data[item.storage_index]
                rows, row_bytes = item.lengths[0], _bytes(shape[1:])
                host = staging[: rows * row_bytes]
                file.seek(offset + item.storage_offsets[0] * row_bytes)
                if file.readinto(host.numpy().data) != host.numel():
                    raise ValueError(f"{name} is truncated")
                read = host.view(torch.float32).view(rows, *shape[1:])
                for dim in range(1, len(shape)):
                    read = read.narrow(dim, item.storage_offsets[dim], item.lengths[dim])
                target = planner.resolve_tensor(item)
                target.copy_(read, non_blocking=True)
                _wait(device)
                planner.commit_tensor(item, target)


@contextmanager
def _staging(size: int, device: torch.device) -> Iterator[Tensor]:
    """Gives host memory, uint8 [size], and for a GPU a stream of this thread's own: its copies do not queue behind the
    training, nor the other way round."""
    if device.type != "cuda":
        yield torch.empty(size, dtype=torch.uint8)
        return
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        yield torch.empty(size, dtype=torch.uint8, pin_memory=True)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _bytes(shape: Sequence[int]) -> int:
    return 4 * prod(shape)
