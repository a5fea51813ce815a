"""Saves a run's state to checkpoints, and resumes from them.

A checkpoint is a folder `samples-0000000512000`, named by the number of samples trained, in the folder of
--checkpoint.path: the files of pipeline/checkpoint.py, and state.json with the rest of a run's state (saved_state.py).
It is written under a name that ends in `.partial`, and renamed once everything is on disk: a folder without that ending
is complete, whenever a process was killed. The previous checkpoint is deleted afterwards. With --snapshot.every a
checkpoint is written from a snapshot in memory (snapshots.py).
"""

import logging
import shutil
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TextIO

import torch
import torch.distributed as dist

from dlrm_bench.bench.checkpoints.folders import (
    begin_folder,
    complete_folder,
    delete_folder,
    in_units,
    locked,
    make_folder,
    on_rank_0,
    unfinished_of,
)
from dlrm_bench.bench.checkpoints.saved_state import (
    PARTIAL,
    Resumed,
    RunState,
    checkpoint_name,
    complete_checkpoints,
    find_checkpoint,
    of_another_user,
)
from dlrm_bench.bench.checkpoints.snapshots import Snapshot, Snapshots
from dlrm_bench.bench.config import RunConfig
from dlrm_bench.bench.instruments.schedule import Schedule
from dlrm_bench.bench.instruments.stall import SAVER
from dlrm_bench.bench.records.schema import Checkpointing, ResumedFrom, SavedCheckpoint, TakenSnapshot
from dlrm_bench.dlrm.benchmarks import named
from dlrm_bench.dlrm.data.dataset import FileContent
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.checkpoint import (
    OwnPieces,
    on_all_ranks,
    own_pieces,
    pin_memory,
    read_state,
    snapshot,
    snapshot_bytes,
    state_bytes,
    write_state,
)
from dlrm_bench.pipeline.checkpoint_index import CheckpointError
from dlrm_bench.pipeline.dynamic_state import of_all_places
from dlrm_bench.pipeline.interface import Pipeline
from dlrm_bench.pipeline.state import StateBlocks

LOGGER = logging.getLogger(__name__)
_SPARE_BYTES = 2 * 2**30
"""GPU memory that a copy of the state must leave free."""
_BEHIND = 10
"""Nice value of the threads that write a snapshot to disk: the training's come first."""


def agree_on_checkpoint(config: RunConfig, schedule: Schedule, ranks: Ranks) -> Resumed | None:
    """Returns what find_checkpoint does, for the folder that rank 0 chooses: while ranks look, another run may complete
    a newer checkpoint. Collective. ValueError like find_checkpoint."""
    found = on_rank_0(ranks, partial(find_checkpoint, config, schedule))
    if found is None or ranks.rank == 0:
        return found
    return find_checkpoint(replace(config, resume=found.folder), schedule)


class Checkpoints:
    """Saves a run's state at the interval of --checkpoint.every, and resumes it."""

    def __init__(self, config: RunConfig, ranks: Ranks, pipeline: Pipeline, resumed: Resumed | None) -> None:
        """Prepares the folder and resumes. Collective. ValueError, on every rank, if the folder cannot be used or has
        too little space."""
        self._config, self._path = config, config.checkpoint.path
        self._every = config.checkpoint.every or config.snapshot.every
        self._ranks, self._pipeline = ranks, pipeline
        self._saving: Future[float] | None = None
        self.iteration = 0
        """The last iteration whose state was saved or is being saved; 0 before the first."""
        self.pieces = 0
        """Number of pieces of the state that this rank has written."""
        self.data_files: dict[str, FileContent] = {}
        """Fingerprints of the data files, by name, of a run that saves."""
        self._paused_s, self._bytes = 0.0, 0
        self._lock: TextIO | None = None
        """Held by every rank: as long as one of them may write, no other run saves in the folder."""
        self._saved: list[SavedCheckpoint] = []
        self._taken: list[TakenSnapshot] = []
        self._snapshots: Snapshots | None = None
        self._writing: Snapshot | None = None
        self._resumed: ResumedFrom | None = None
        if not (self.saves or resumed is not None or config.snapshot.every is not None):
            return
        self._group = dist.new_group(backend="gloo")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=SAVER)
        blocks = pipeline.state_blocks()
        if resumed is not None:
            self._resumed = self._resume(resumed, blocks)
        if config.snapshot.every is not None:
            blocks = of_all_places(blocks, ranks)
        self._bytes = state_bytes(blocks)
        if self._path is not None:
            on_rank_0(ranks, partial(self._prepare, self._path, resumed))
            on_all_ranks(partial(self._share, self._path), None)
            if ranks.device.type == "cuda" and config.snapshot.every is None:
                pin_memory()
        if config.snapshot.every is not None:
            self._snapshots = Snapshots(config, ranks, blocks, resumed)
        if self._every is not None or self._path is not None:
            self.data_files = on_rank_0(ranks, self._data_files)
        self._write_newest()

    @property
    def saves(self) -> bool:
        """Whether --checkpoint.path names a folder."""
        return self._path is not None

    def due_after(self, iteration: int) -> bool:
        """Whether a checkpoint is due after this iteration."""
        return self._every is not None and iteration % self._every == 0

    def save(self, iteration: int, state: RunState) -> None:
        """Saves the current state; if the GPU has memory for a copy, or the node for snapshots, returns while a thread
        still writes.

        Waits for the previous checkpoint, unless there are snapshots. Collective. CheckpointError, on every rank, if
        the previous checkpoint could not be written.
        """
        if self._snapshots is not None:
            self._save_in_memory(iteration, state, self._snapshots)
            return
        self._collect()
        assert self._path is not None
        begun = time.monotonic()
        folder = self._path / checkpoint_name(state["samples"])
        on_rank_0(self._ranks, partial(begin_folder, folder, state))
        blocks = self._pipeline.state_blocks()
        copy = self._copy(blocks)
        if copy is not None and self._ranks.device.type == "cuda":
            torch.cuda.synchronize()
        self.iteration = iteration
        self._saving = self._thread.submit(self._write, folder, own_pieces(copy or blocks, self._ranks.rank))
        if copy is None:
            self._saving.exception()  # waits: training would change what is being written
        self._paused_s = time.monotonic() - begun

    def wait(self) -> None:
        """Waits until the last state saved is on disk, given a --checkpoint.path. CheckpointError, on every rank, where
        it could not be written."""
        self._collect()
        self._write_newest()
        self._collect()

    def remove_snapshots(self) -> None:
        """Frees the memory of snapshots, of a run that has ended well. Collective."""
        if self._snapshots is not None:
            self._snapshots.remove()

    def _save_in_memory(self, iteration: int, state: RunState, snapshots: Snapshots) -> None:
        """Takes a snapshot, and has it written to disk unless an earlier one still is."""
        begun = time.monotonic()
        if self._all(self._saving is None or self._saving.done()):
            self._collect()
        blocks = of_all_places(self._pipeline.state_blocks(), self._ranks)
        taken = snapshots.take(state, blocks, self._writing, self._count)
        if taken is not None:
            self.iteration = taken.iteration = iteration
            taken.paused_s = self._paused_s = time.monotonic() - begun
            paused = round(taken.paused_s, 3)
            self._taken.append(TakenSnapshot(iteration=iteration, gb=self._bytes / 1e9, paused_s=paused))
            if self._writing is None:
                self._write_newest()

    def _write_newest(self) -> None:
        """Begins to write the newest snapshot to disk, if there is one that is not."""
        newest = self._snapshots.newest if self._snapshots is not None else None
        if self._path is None or self._snapshots is None or newest is None or newest.on_disk:
            return
        assert newest.state is not None
        folder = self._path / checkpoint_name(newest.samples)
        self._writing = newest
        self._saving = self._thread.submit(self._write, folder, self._snapshots.pieces(newest), newest.state)

    def _collect(self) -> None:
        """Waits for the checkpoint that is being written, if any. CheckpointError, on every rank, where it could not
        be."""
        if self._saving is None:
            return
        saving, self._saving = self._saving, None
        iteration, paused_s = self.iteration, self._paused_s
        if self._writing is not None:
            iteration, paused_s = self._writing.iteration, self._writing.paused_s
        try:
            seconds = saving.result()
        except (OSError, ValueError) as error:
            assert self._path is not None
            complete = complete_checkpoints(self._path)
            last = f"the last complete one is {complete[-1]}" if complete else "there is no earlier one"
            if self._snapshots is not None and self._snapshots.newest is not None:
                last += f", and {self._snapshots.newest.folder} in memory is complete: continue with --resume auto"
            raise CheckpointError(
                f"the checkpoint of iteration {iteration} could not be written: {error}; {last}"
            ) from None
        if self._writing is not None:
            self._writing.on_disk, self._writing = True, None
        written, size = round(seconds, 3), self._bytes / 1e9
        self._saved.append(SavedCheckpoint(iteration=iteration, gb=size, paused_s=round(paused_s, 3), write_s=written))

    def describe(self) -> Checkpointing | None:
        """Returns the record's block on checkpoints; None where none was saved or resumed."""
        if not self._saved and not self._taken and self._resumed is None:
            return None
        block = Checkpointing(saved=self._saved, resumed=self._resumed)
        if self._snapshots is not None:
            block["snapshots"], block["left_out"] = self._taken, self._snapshots.left_out
            block["prepared_s"] = self._snapshots.prepared_s
        return block

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
            folder=str(resumed.folder),
        )

    def _write(self, folder: Path, pieces: OwnPieces, state: RunState | None = None) -> float:
        """Writes the state; returns the seconds of the write. Collective, on a thread of every rank.

        state: that of a snapshot, whose folder is begun here."""
        begun = time.monotonic()
        if self._ranks.device.type == "cuda":
            torch.cuda.set_device(self._ranks.device)
        unfinished = unfinished_of(folder)
        try:
            if state is not None:
                on_rank_0(self._ranks, partial(begin_folder, folder, state), self._group)
            nice = 0 if state is None else _BEHIND
            write_state(unfinished, pieces, self._ranks.rank, self._group, self._count, nice)
            on_rank_0(self._ranks, partial(complete_folder, folder), self._group)
        except (OSError, ValueError):  # raised on every rank, after all ranks have stopped writing
            if self._ranks.rank == 0:
                shutil.rmtree(unfinished, ignore_errors=True)
            raise
        return time.monotonic() - begun

    def _count(self) -> None:
        self.pieces += 1

    def _copy(self, blocks: StateBlocks) -> StateBlocks | None:
        """Returns a copy of the tensors that this rank writes; None, on every rank, if any rank lacks memory for it.
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
        """Locks the folder for this run, and deletes unfinished checkpoints of earlier runs. On rank 0."""
        make_folder(path, "--checkpoint.path")
        self._lock = locked(path, "--checkpoint.path")
        complete = complete_checkpoints(path)
        goes_on = self._config.resumes_newest or (
            resumed is not None and complete[-1:] and complete[-1].resolve() == resumed.folder.resolve()
        )
        if complete and not goes_on:
            raise ValueError(
                f"--checkpoint.path {path} has checkpoints of an earlier run, the newest {complete[-1].name}: choose "
                f"another folder, or go on from that one with --resume {path}"
            )
        for unfinished in path.glob(f"samples-*{PARTIAL}"):
            delete_folder(unfinished)
        free = shutil.disk_usage(path).free
        if free < self._bytes:
            raise ValueError(
                f"--checkpoint.path {path} has {in_units(free)} free, and a checkpoint takes "
                f"{in_units(self._bytes)} beside the previous checkpoint: make room or choose another folder"
            )
        self._share(path)  # before other ranks do

    def _share(self, path: Path) -> None:
        self._lock = locked(path, "--checkpoint.path", self._lock, shared=True)

    def _data_files(self) -> dict[str, FileContent]:
        return named(self._config.benchmark).parts().data_content(self._config)


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
