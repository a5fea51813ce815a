"""Saves a run's state to checkpoints, and resumes from them.

A checkpoint is a folder `samples-0000000512000`, named by the number of samples trained, in the folder of
--checkpoint.path: the files of pipeline/checkpoint.py, and state.json with the rest of a run's state (saved_state.py).
It is written under a name that ends in `.partial`, and renamed once everything is on disk: a folder without that ending
is complete, whenever a process was killed. The previous checkpoint is deleted afterwards.
"""

import fcntl
import json
import logging
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dlrm_bench.bench.config import RunConfig
from dlrm_bench.bench.instruments.stall import SAVER
from dlrm_bench.bench.records.schema import Checkpointing, ResumedFrom, SavedCheckpoint
from dlrm_bench.bench.saved_state import (
    PARTIAL,
    STATE_JSON,
    Resumed,
    RunState,
    checkpoint_name,
    complete_checkpoints,
    of_another_user,
)
from dlrm_bench.dlrm.benchmarks import named
from dlrm_bench.dlrm.data.dataset import FileContent
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.checkpoint import pin_memory, read_state, snapshot, snapshot_bytes, state_bytes, write_state
from dlrm_bench.pipeline.checkpoint_index import CheckpointError
from dlrm_bench.pipeline.interface import Pipeline
from dlrm_bench.pipeline.state import StateBlocks

LOGGER = logging.getLogger(__name__)
_SPARE_BYTES = 2 * 2**30
"""GPU memory that a copy of the state must leave free."""


class Checkpoints:
    """Saves a run's state at the interval of --checkpoint.every, and resumes it."""

    def __init__(self, config: RunConfig, ranks: Ranks, pipeline: Pipeline, resumed: Resumed | None) -> None:
        """Prepares the folder and resumes. Collective. ValueError, on every rank, where the folder cannot be used or
        has too little room."""
        self._config, self._every, self._path = config, config.checkpoint.every, config.checkpoint.path
        self._ranks, self._pipeline = ranks, pipeline
        self._saving: Future[float] | None = None
        self.iteration = 0
        """The last iteration whose state was saved or is being saved; 0 before the first."""
        self.pieces = 0
        """Number of pieces of the state that this rank has written."""
        self.data_files: dict[str, FileContent] = {}
        """Fingerprints of the data files, by name, on rank 0 of a run that saves."""
        self._paused_s, self._bytes = 0.0, 0
        self._lock: Any = None
        self._saved: list[SavedCheckpoint] = []
        self._resumed: ResumedFrom | None = None
        if self._path is None and resumed is None:
            return
        self._group = dist.new_group(backend="gloo")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=SAVER)
        blocks = pipeline.state_blocks()
        if resumed is not None:
            self._resumed = self._resume(resumed, blocks)
        self._bytes = state_bytes(blocks)
        if self._path is not None:
            _on_rank_0(ranks, partial(self._prepare, self._path, resumed))
            if ranks.device.type == "cuda":
                pin_memory()

    @property
    def saves(self) -> bool:
        """Whether --checkpoint.path names a folder."""
        return self._path is not None

    def due_after(self, iteration: int) -> bool:
        """Whether a checkpoint is due after this iteration."""
        return self._every is not None and iteration % self._every == 0

    def save(self, iteration: int, state: RunState) -> None:
        """Saves the present state; where the GPU has room for a copy, returns while a thread still writes.

        Waits for the previous checkpoint. Collective. CheckpointError, on every rank, where the previous checkpoint
        could not be written.
        """
        self.wait()
        assert self._path is not None
        begun = time.monotonic()
        folder = self._path / checkpoint_name(state["samples"])
        _on_rank_0(self._ranks, partial(_begin, folder, state))
        blocks = self._pipeline.state_blocks()
        copy = self._copy(blocks)
        if copy is not None and self._ranks.device.type == "cuda":
            torch.cuda.synchronize()
        self.iteration = iteration
        self._saving = self._thread.submit(self._write, folder, copy or blocks)
        if copy is None:
            self._saving.exception()  # waits: training would change what is being written
        self._paused_s = time.monotonic() - begun

    def wait(self) -> None:
        """Waits until the last checkpoint is on disk. CheckpointError, on every rank, where it could not be written."""
        if self._saving is None:
            return
        saving, self._saving = self._saving, None
        try:
            seconds = saving.result()
        except (OSError, ValueError) as error:
            assert self._path is not None
            complete = complete_checkpoints(self._path)
            last = f"the last complete one is {complete[-1]}" if complete else "there is no earlier one"
            raise CheckpointError(
                f"the checkpoint of iteration {self.iteration} could not be written: {error}; {last}"
            ) from None
        paused, written, size = round(self._paused_s, 3), round(seconds, 3), self._bytes / 1e9
        self._saved.append(SavedCheckpoint(iteration=self.iteration, gb=size, paused_s=paused, write_s=written))

    def describe(self) -> Checkpointing | None:
        """Returns the record's block on checkpoints; None where none was saved or resumed."""
        if not self._saved and self._resumed is None:
            return None
        return Checkpointing(saved=self._saved, resumed=self._resumed)

    def _resume(self, resumed: Resumed, blocks: StateBlocks) -> ResumedFrom:
        """Fills the pipeline from a checkpoint; returns the record's block on it. Collective."""
        if self._ranks.rank == 0 and of_another_user(resumed.folder):
            LOGGER.warning(
                "--resume %s belongs to another user: its checksums show damage, not who wrote it", resumed.folder
            )
        begun = time.monotonic()
        try:
            read_state(resumed.folder, blocks, self._group)
        except CheckpointError as error:
            raise ValueError(f"--resume: {error}") from error
        self._pipeline.take_blocks(blocks)
        return ResumedFrom(
            run_id=resumed.state["run_id"],
            iteration=resumed.first,
            samples=resumed.state["samples"],
            read_s=round(time.monotonic() - begun, 3),
        )

    def _write(self, folder: Path, blocks: StateBlocks) -> float:
        """Writes the state; returns the seconds of the write. Collective, on a thread of every rank."""
        begun = time.monotonic()
        if self._ranks.device.type == "cuda":
            torch.cuda.set_device(self._ranks.device)
        unfinished = folder.with_name(folder.name + PARTIAL)
        try:
            write_state(unfinished, blocks, self._ranks.rank, self._group, self._count)
            _on_rank_0(self._ranks, partial(_complete_folder, unfinished, folder), self._group)
        except (OSError, ValueError):  # on every rank, which have all stopped writing
            if self._ranks.rank == 0:
                shutil.rmtree(unfinished, ignore_errors=True)
            raise
        return time.monotonic() - begun

    def _count(self) -> None:
        self.pieces += 1

    def _copy(self, blocks: StateBlocks) -> StateBlocks | None:
        """Returns a copy of the tensors that this rank writes; None, on every rank, where any rank has no room for it.
        Collective."""
        on_gpu = self._ranks.device.type == "cuda"
        needed = snapshot_bytes(blocks, self._ranks.rank)
        if not self._all(not on_gpu or _free_bytes() - _SPARE_BYTES > needed):
            return None
        copy: StateBlocks | None = None
        with suppress(torch.OutOfMemoryError):  # pieces of free memory may hold less than their sum
            copy = snapshot(blocks, self._ranks.rank)
        return copy if self._all(copy is not None) else None

    def _all(self, here: bool) -> bool:
        """Whether `here` is true on every rank. Collective."""
        everywhere = [here] * self._ranks.world_size
        dist.all_gather_object(everywhere, here)
        return all(everywhere)

    def _prepare(self, path: Path, resumed: Resumed | None) -> None:
        """Locks the folder for this run, and deletes unfinished checkpoints of earlier runs."""
        path.mkdir(parents=True, exist_ok=True)
        self._lock = (path / ".lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"--checkpoint.path {path}: another run saves there: choose another folder") from None
        complete = complete_checkpoints(path)
        if complete and (resumed is None or complete[-1].resolve() != resumed.folder.resolve()):
            raise ValueError(
                f"--checkpoint.path {path} has checkpoints of an earlier run, the newest {complete[-1].name}: choose "
                f"another folder, or go on from that one with --resume {path}"
            )
        for unfinished in path.glob(f"samples-*{PARTIAL}"):
            shutil.rmtree(unfinished)
        free = shutil.disk_usage(path).free
        if free < self._bytes:
            raise ValueError(
                f"--checkpoint.path {path} has {_in_units(free)} free, and a checkpoint takes "
                f"{_in_units(self._bytes)} beside the one before it: make room or choose another folder"
            )
        self.data_files = named(self._config.benchmark).parts().data_content(self._config)


def _free_bytes() -> int:
    """Returns the GPU memory that a tensor of this stream can have: the device's free memory, and idle memory of the
    allocator. Idle memory in the pool of a CUDA graph is left out."""
    idle, stream = 0, torch.cuda.current_stream().cuda_stream
    for segment in torch.cuda.memory_snapshot():
        here = segment["device"] == torch.cuda.current_device() and segment["segment_pool_id"] == (0, 0)
        # The allocator frees segments of other streams that hold no tensor.
        if here and (segment["stream"] == stream or not segment["active_size"]):
            idle += segment["total_size"] - segment["active_size"]
    return torch.cuda.mem_get_info()[0] + idle


def _in_units(size: float) -> str:
    """Returns a number of bytes in the largest unit in which it is at least 1."""
    for unit, of in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if size >= of:
            return f"{size / of:.1f} {unit}"
    return f"{size:.0f} bytes"


def _begin(folder: Path, state: RunState) -> None:
    unfinished = folder.with_name(folder.name + PARTIAL)
    if unfinished.exists():
        shutil.rmtree(unfinished)
    unfinished.mkdir()
    with (unfinished / STATE_JSON).open("w", encoding="utf-8") as file:
        json.dump(state, file)
        file.flush()
        os.fsync(file.fileno())


def _complete_folder(unfinished: Path, folder: Path) -> None:
    """Renames a checkpoint once all of it is on disk, and deletes the previous ones.

    An older one of the same number of samples is renamed first, to a name that is complete as well: there is one at any
    time.
    """
    _sync(unfinished)
    if folder.exists():
        os.replace(folder, folder.with_name(f"{folder.name}.replaced"))
    os.replace(unfinished, folder)
    _sync(folder.parent)
    complete = complete_checkpoints(folder.parent)
    for older in complete[: complete.index(folder)]:
        leaving = older.with_name(older.name + PARTIAL)  # half deleted it would look complete
        os.replace(older, leaving)
        shutil.rmtree(leaving)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _on_rank_0(ranks: Ranks, work: Callable[[], None], group: dist.ProcessGroup | None = None) -> None:
    """Runs `work` on global rank 0; its OSError or ValueError is raised on every rank. Collective over `group`."""
    answer: list[Any] = [None]
    if ranks.rank == 0:
        try:
            work()
        except (OSError, ValueError) as error:
            answer = [str(error)]
    dist.broadcast_object_list(answer, src=0, group=group)
    if answer[0] is not None:
        raise ValueError(answer[0])
