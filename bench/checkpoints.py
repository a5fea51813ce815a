"""When a run saves its state, where, and how a later run goes on from it.

A checkpoint is a folder `iteration-00001000` in the folder that --checkpoint.path names: the files of
pipeline/checkpoint.py, and state.json with all else that a run needs. It is written under another name, which ends in
`.partial`, and renamed once everything is on disk: a folder without that ending is complete, whenever a process was
killed. The one before is deleted after that.
"""

import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dlrm_bench.bench.config import RunConfig, as_json
from dlrm_bench.bench.instruments.schedule import Schedule
from dlrm_bench.bench.records.json_file import read_json
from dlrm_bench.bench.records.schema import Checkpointing, ResumedFrom, SavedCheckpoint
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.checkpoint import (
    CheckpointError,
    pin_memory,
    read_state,
    snapshot,
    snapshot_bytes,
    state_bytes,
    write_state,
)
from dlrm_bench.pipeline.interface import Pipeline
from dlrm_bench.pipeline.state import StateBlocks

STATE_JSON = "state.json"
_PARTIAL = ".partial"
_SPARE_BYTES = 2 * 2**30
"""GPU memory that a copy of the state must leave free."""
_SAME = ("model", "optimizer", "data", "seed")
"""Fields of the configuration in which a run and the checkpoint that it resumes must agree; of `data` those that name
samples."""
_SAMPLES = ("source", "train_days", "random_batches", "random_skew", "random_ids")


@dataclass(kw_only=True, slots=True, frozen=True)
class RunState:
    """Everything of a run but weights and optimizer state."""

    iteration: int
    """Iterations trained."""
    samples: int
    """Samples trained on: where the data go on."""
    losses: list[float]
    """One for each of these iterations, whose global batch is `samples` / `iteration`."""
    auc: float | None
    """That of the last evaluation."""
    mlperf_log: str
    """The lines of the MLPerf log so far."""
    run_id: str
    config: dict[str, Any]


@dataclass(kw_only=True, slots=True, frozen=True)
class Resumed:
    """A checkpoint to go on from."""

    folder: Path
    state: RunState
    first: int
    """Iterations of the new run's global batch size that were trained."""


def find_checkpoint(config: RunConfig, schedule: Schedule) -> Resumed | None:
    """Returns what --resume names, the newest complete checkpoint of a folder of them; None without the flag.

    ValueError where there is none, or it is damaged, or of another training.
    """
    if config.resume is None:
        return None
    folder = config.resume
    if not (folder / STATE_JSON).is_file():
        complete = _complete(folder)
        if not complete:
            raise ValueError(f"--resume {folder}: there is no complete checkpoint")
        folder = complete[-1]
    content = read_json(folder / STATE_JSON)
    try:
        state = RunState(**content)
    except TypeError as error:
        raise ValueError(f"--resume: {folder / STATE_JSON} is not of this version ({error})") from None
    _check_same(folder, state.config, as_json(config))
    first, rest = divmod(state.samples, schedule.global_batch_size)
    if rest:
        raise ValueError(
            f"--resume {folder}: it has trained on {state.samples} samples, which are no whole number of global "
            f"batches of {schedule.global_batch_size}: choose another --local-batch-size"
        )
    if first >= schedule.iterations:
        raise ValueError(f"--resume {folder}: it has trained all of the {schedule.iterations} iterations asked for")
    return Resumed(folder=folder, state=state, first=first)


def _check_same(folder: Path, saved: dict[str, Any], given: dict[str, Any]) -> None:
    for name in _SAME:
        old, new = saved.get(name), given.get(name)
        if name == "data" and isinstance(old, dict) and isinstance(new, dict):
            old, new = ({key: of.get(key) for key in _SAMPLES} for of in (old, new))
        if old == new:
            continue
        if isinstance(old, dict) and isinstance(new, dict):
            key = next(key for key in {**old, **new} if old.get(key) != new.get(key))
            name, old, new = f"{name}.{key}", old.get(key), new.get(key)
        flag = name.replace("_", "-")
        raise ValueError(f"--resume {folder}: it was trained with --{flag} {old}, and this run has {new}")


class Checkpoints:
    """Saves a run's state every so many iterations, and resumes it."""

    def __init__(self, config: RunConfig, ranks: Ranks, pipeline: Pipeline, resumed: Resumed | None) -> None:
        """Collective. ValueError, on every rank, where the folder cannot be used or has too little room."""
        self._every, self._path = config.checkpoint.every, config.checkpoint.path
        self._ranks, self._pipeline = ranks, pipeline
        self._saving: Future[float] | None = None
        self._iteration, self._paused_s, self._bytes = 0, 0.0, 0
        self._lock: Any = None
        self.pieces = 0
        """Pieces of the state that this rank has written."""
        self.waited_for = False
        """Whether the training waits for files to be written, which takes as long as the disk does."""
        self._saved: list[SavedCheckpoint] = []
        self._resumed: ResumedFrom | None = None
        if self._path is None and resumed is None:
            return
        self._group = dist.new_group(backend="gloo")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        blocks = pipeline.state_blocks()
        if resumed is not None:
            begun = time.monotonic()
            try:
                read_state(resumed.folder, blocks, self._group)
            except CheckpointError as error:
                raise ValueError(f"--resume: {error}") from error
            pipeline.take_blocks(blocks)
            seconds = round(time.monotonic() - begun, 3)
            self._resumed = ResumedFrom(run_id=resumed.state.run_id, iteration=resumed.first, read_s=seconds)
        self._bytes = state_bytes(blocks)
        if self._path is not None:
            _on_rank_0(ranks, partial(self._prepare, self._path, resumed))
            if ranks.device.type == "cuda":
                pin_memory()

    @property
    def saves(self) -> bool:
        """Whether there is a place to save to."""
        return self._path is not None

    def due_after(self, iteration: int) -> bool:
        """Whether the state is to be saved after so many iterations."""
        return self._every is not None and iteration % self._every == 0

    def save(self, state: RunState) -> None:
        """Saves the state as it is now; returns while a thread still writes, where the GPU has room for a copy.

        Waits for the checkpoint before. Collective. CheckpointError, on every rank, where that one could not be
        written.
        """
        self.wait()
        assert self._path is not None
        begun = time.monotonic()
        folder = self._path / f"iteration-{state.iteration:08d}"
        _on_rank_0(self._ranks, partial(_begin, folder, state))
        blocks = self._pipeline.state_blocks()
        copied = self._has_room(blocks)
        if copied:
            blocks = snapshot(blocks, self._ranks.rank)
            if self._ranks.device.type == "cuda":
                torch.cuda.synchronize()
        self._iteration = state.iteration
        self._saving = self._thread.submit(self._write, folder, blocks)
        if not copied:
            self._wait_for(self._saving)  # training would change what is being written
        self._paused_s = time.monotonic() - begun

    def wait(self) -> None:
        """Waits until nothing is being written. CheckpointError, on every rank, where something could not be."""
        if self._saving is None:
            return
        saving, self._saving = self._saving, None
        self._wait_for(saving)
        try:
            seconds = saving.result()
        except (OSError, ValueError) as error:
            assert self._path is not None
            complete = _complete(self._path)
            last = f"the last complete one is {complete[-1]}" if complete else "there is no earlier one"
            raise CheckpointError(
                f"the checkpoint of iteration {self._iteration} could not be written: {error}; {last}"
            ) from None
        paused, written, size = round(self._paused_s, 3), round(seconds, 3), self._bytes / 1e9
        self._saved.append(SavedCheckpoint(iteration=self._iteration, gb=size, paused_s=paused, write_s=written))

    def describe(self) -> Checkpointing | None:
        """Returns what the record says; None where nothing was saved or resumed."""
        if not self._saved and self._resumed is None:
            return None
        return Checkpointing(saved=self._saved, resumed=self._resumed)

    def _write(self, folder: Path, blocks: StateBlocks) -> float:
        """Returns the seconds that it took. Collective, on the thread of all ranks."""
        begun = time.monotonic()
        if self._ranks.device.type == "cuda":
            torch.cuda.set_device(self._ranks.device)
        unfinished = folder.with_name(folder.name + _PARTIAL)
        write_state(unfinished, blocks, self._ranks.rank, self._group, self._count)
        _on_rank_0(self._ranks, partial(_complete_folder, unfinished, folder), self._group)
        return time.monotonic() - begun

    def _wait_for(self, saving: Future[float]) -> None:
        self.waited_for = True
        saving.exception()
        self.waited_for = False

    def _count(self) -> None:
        self.pieces += 1

    def _has_room(self, blocks: StateBlocks) -> bool:
        """Whether every rank's device has room for a copy of what it writes. Collective."""
        room = True
        if self._ranks.device.type == "cuda":
            free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
            room = free - _SPARE_BYTES > snapshot_bytes(blocks, self._ranks.rank)
        rooms = [room] * self._ranks.world_size
        dist.all_gather_object(rooms, room)
        return all(rooms)

    def _prepare(self, path: Path, resumed: Resumed | None) -> None:
        """Takes the folder for this run alone, and clears away what earlier ones left unfinished."""
        path.mkdir(parents=True, exist_ok=True)
        self._lock = (path / ".lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"--checkpoint.path {path}: another run saves there: choose another folder") from None
        complete = _complete(path)
        going_on = resumed is not None and path.resolve() in (resumed.folder.resolve(), resumed.folder.resolve().parent)
        if complete and not going_on:
            raise ValueError(
                f"--checkpoint.path {path} has checkpoints of an earlier run: choose another folder, or add --resume "
                f"{path}"
            )
        for unfinished in path.glob(f"iteration-*{_PARTIAL}"):
            shutil.rmtree(unfinished)
        free = shutil.disk_usage(path).free
        if free < self._bytes:
            needed = self._bytes / 1e9
            raise ValueError(
                f"--checkpoint.path {path} has {free / 1e9:.1f} GB free, and a checkpoint takes {needed:.1f} GB "
                "beside the one before it: make room or choose another folder"
            )


def _complete(path: Path) -> list[Path]:
    """Returns the complete checkpoints in a folder, oldest first."""
    return sorted(
        folder for folder in path.glob("iteration-*") if (folder / STATE_JSON).is_file() and folder.suffix != _PARTIAL
    )


def _begin(folder: Path, state: RunState) -> None:
    unfinished = folder.with_name(folder.name + _PARTIAL)
    if unfinished.exists():
        shutil.rmtree(unfinished)
    unfinished.mkdir()
    with (unfinished / STATE_JSON).open("w", encoding="utf-8") as file:
        json.dump(asdict(state), file)
        file.flush()
        os.fsync(file.fileno())


def _complete_folder(unfinished: Path, folder: Path) -> None:
    """Gives a checkpoint its name, once all of it is on disk, and deletes the ones before."""
    _sync(unfinished)
    os.replace(unfinished, folder)
    _sync(folder.parent)
    for older in _complete(folder.parent):
        if older.name < folder.name:
            shutil.rmtree(older)


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
