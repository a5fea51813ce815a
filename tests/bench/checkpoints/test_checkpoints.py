"""Checkpoints that are written while training goes on, killed, out of room, and read by other layouts."""

import errno
import fcntl
import os
import resource
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dlrm_bench.bench.checkpoints import checkpoints, folders, saved_state
from dlrm_bench.bench.checkpoints.checkpoints import Checkpoints, agree_on_checkpoint
from dlrm_bench.bench.checkpoints.saved_state import STATE_SCHEMA, RunState, complete_checkpoints, find_checkpoint
from dlrm_bench.bench.config import CheckpointConfig, RunConfig, as_json
from dlrm_bench.bench.instruments.schedule import plan_schedule
from dlrm_bench.bench.presets import preset
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.state import StateBlocks, TensorBlock
from tests.launched import Ended, fork, wait, wait_until

ROWS, COLUMNS = 50, 8
GBS = 16
TABLE = torch.arange(float(ROWS * COLUMNS)).view(ROWS, COLUMNS)


class Held:
    """The state of a pipeline: a table in columns, one share a rank, and a dense tensor that every rank holds."""

    def __init__(self, ranks: Ranks, value: float) -> None:
        width = COLUMNS // ranks.world_size
        self.columns = slice(ranks.rank * width, (ranks.rank + 1) * width)
        self.shares = [TABLE[:, self.columns].clone() + value for _ in range(2)]
        self.dense = torch.full((3,), float(value))
        self._ranks, self._width = ranks, width

    def state_blocks(self) -> StateBlocks:
        def blocks(mine: Tensor) -> list[TensorBlock]:
            shape, rank = (ROWS, self._width), self._ranks.rank
            return [
                TensorBlock(r, (0, r * self._width), shape, mine if r == rank else None)
                for r in range(self._ranks.world_size)
            ]

        weights = {"table": blocks(self.shares[0]), "dense": [TensorBlock.whole(self.dense)]}
        return StateBlocks(weights, {"table": blocks(self.shares[1])})

    def take_blocks(self, blocks: StateBlocks) -> None:
        self.dense = self.dense.clone()

    def train(self) -> None:
        for share in (*self.shares, self.dense):
            share.add_(1000)

    def is_of(self, value: float) -> bool:
        return all(torch.equal(share, TABLE[:, self.columns] + value) for share in self.shares) and bool(
            (self.dense == value).all()
        )


def config(folder: Path, resume: Path | None = None, world_size: int = 2, **changes: Any) -> RunConfig:
    small = replace(preset("launch-bound"), iterations=100, precision="fp32", local_batch_size=GBS // world_size)
    return replace(small, checkpoint=CheckpointConfig(every=1, path=folder), resume=resume, **changes)


def state(of: RunConfig, iteration: int) -> RunState:
    losses = [1 / (i + 3) for i in range(iteration)]
    return RunState(
        schema=STATE_SCHEMA,
        samples=iteration * GBS,
        losses=[{"global_batch_size": GBS, "losses": losses}],
        auc=0.5,
        mlperf_log="",
        run_id="first",
        config=as_json(of),
        data_files={},
    )


def name(iteration: int) -> str:
    return f"samples-{iteration * GBS:013d}"


def kill(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def save_second(saving: Checkpoints, ranks: Ranks, held: Held, of: RunConfig, trouble: str | None) -> int:
    """Iteration 2 is saved while the training goes on, on rank 1 with a full disk if that is the trouble. Returns an
    exit status."""
    if trouble == "disk full":
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        if ranks.rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (700, 700))
    saving.save(2, state(of, 2))
    held.train()
    try:
        saving.wait()
    except ValueError as error:
        print(error)
        return 2
    return 0


def save_twice(folder: Path, trouble: str | None) -> int:
    """Iteration 1 is saved well, `trouble` strikes the second time."""
    ranks = Ranks.from_environment()
    ranks.init_process_group()
    held = Held(ranks, 1)
    saving = Checkpoints(config(folder), ranks, held, None)  # type: ignore[arg-type]
    saving.save(1, state(config(folder), 1))
    held.train()  # in the meantime
    saving.wait()
    if trouble == "killed while writing":
        checkpoints.write_state = kill  # type: ignore[assignment]
    elif trouble == "killed before the new name":
        folders._sync = kill  # type: ignore[assignment]
    elif trouble == "killed before the old one is deleted":
        shutil.rmtree = kill  # type: ignore[assignment]
    return save_second(saving, ranks, held, config(folder), trouble)


def save_at(given: RunConfig, *iterations: int) -> int:
    """Saves at these iterations; ends with 2, and prints why, if the folder is refused."""
    ranks = Ranks.from_environment()
    ranks.init_process_group()
    try:
        found = find_checkpoint(given, plan_schedule(given, None, ranks.world_size))
        saving = Checkpoints(given, ranks, Held(ranks, 1), found)  # type: ignore[arg-type]
    except ValueError as error:
        print(error)
        return 2
    for iteration in iterations:
        saving.save(iteration, state(given, iteration))
        saving.wait()
    return 0


def load(folder: Path) -> int:
    """Ends with the iteration that was found; 100 if the state is not of it."""
    ranks = Ranks.from_environment()
    ranks.init_process_group()
    wanted = config(folder, folder, ranks.world_size)
    resumed = find_checkpoint(wanted, plan_schedule(wanted, None, ranks.world_size))
    assert resumed is not None
    held = Held(ranks, -1)
    Checkpoints(wanted, ranks, held, resumed)  # type: ignore[arg-type]
    assert resumed.state["losses"] == state(wanted, resumed.first)["losses"]
    assert not list(folder.glob("*.partial"))
    return resumed.first if held.is_of([1, 1001][resumed.first - 1]) else 100


def run(world_size: int, folder: Path, function: Any, *args: Any) -> Ended:
    folder.mkdir(exist_ok=True)
    return wait(fork(world_size, folder, function, *args), folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trouble", "kept"),
    [
        (None, 2),
        ("killed while writing", 1),
        ("killed before the new name", 1),
        ("killed before the old one is deleted", 2),
        ("disk full", 1),
    ],
)
def test_the_last_complete_checkpoint_survives(tmp_path, trouble, kept):
    saved = tmp_path / "saved"
    ended = run(2, tmp_path / "save", save_twice, saved, trouble)
    if trouble is None:
        assert ended.statuses == [0, 0], ended
        assert [folder.name for folder in saved.glob("samples-*")] == [name(2)]
    elif trouble == "disk full":
        assert ended.statuses == [2, 2], ended
        for output in ended.outputs:
            assert "the checkpoint of iteration 2 could not be written: rank 1: [Errno 27] File too large" in output
            assert f": '{saved / name(2)}.partial/rank-1-0.bin'; the last" in output
            assert f"the last complete one is {saved / name(1)}" in output
        assert [folder.name for folder in saved.glob("samples-*")] == [name(1)]  # nor half of another
    else:
        assert ended.statuses[0] == -9
    world_size = 1 if trouble == "disk full" else 2  # another number of ranks can read it too
    assert run(world_size, tmp_path / "load", load, saved).statuses == [kept] * world_size


def out_of_memory(*_: Any) -> StateBlocks:
    raise torch.OutOfMemoryError("CUDA out of memory")


def save_without_room(folder: Path) -> int:
    """Rank 1 finds out that there is no room for a copy when it makes it."""
    ranks = Ranks.from_environment()
    ranks.init_process_group()
    held = Held(ranks, 1)
    saving = Checkpoints(config(folder), ranks, held, None)  # type: ignore[arg-type]
    if ranks.rank == 1:
        checkpoints.snapshot = out_of_memory
    saving.save(1, state(config(folder), 1))
    held.train()
    saving.wait()
    return 0


def test_no_memory_for_the_copy_of_one_rank_makes_all_wait_for_the_disk(tmp_path):
    saved = tmp_path / "saved"
    assert run(2, tmp_path / "save", save_without_room, saved).statuses == [0, 0]
    assert run(2, tmp_path / "load", load, saved).statuses == [1, 1]


def load_of_another(folder: Path) -> int:
    me = os.geteuid()
    os.geteuid = lambda: me + 1
    return load(folder)


def test_a_checkpoint_of_another_user_is_warned_of(tmp_path):
    saved = tmp_path / "saved"
    assert run(1, tmp_path / "save", save_and_say, saved, None, 1).statuses == [0]
    ended = run(2, tmp_path / "load", load_of_another, saved)
    assert ended.statuses == [1, 1]  # the iteration
    said = f"--resume {saved / name(1)} belongs to another user: its checksums show damage, not who wrote it"
    assert [said in output for output in ended.outputs] == [True, False]


@pytest.mark.gpu
def test_what_a_graph_leaves_idle_is_not_free():
    size, before = 2**28, checkpoints._free_bytes()
    del_later = torch.empty(size, dtype=torch.uint8, device="cuda")
    del del_later
    assert checkpoints._free_bytes() > before - size // 4  # idle in PyTorch's own pool
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.zeros(size, dtype=torch.uint8, device="cuda")
    assert checkpoints._free_bytes() <= before - size


def segment(total: int, active: int, **other: Any) -> dict[str, Any]:
    return {"device": 0, "segment_pool_id": (0, 0), "stream": 7, "total_size": total, "active_size": active} | other


def test_free_memory_leaves_out_what_lies_idle_in_pools_of_graphs(monkeypatch):
    class Stream:
        cuda_stream = 7

    segments = [
        segment(100, 40),
        segment(1000, 0, segment_pool_id=(0, 3)),
        segment(3000, 10, segment_pool_id=(0, 3)),
        segment(500, 0, stream=8),
        segment(5000, 1, stream=8),
        segment(7000, 0, device=1),
    ]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (20000, 80000))
    assert checkpoints._free_bytes() == 20000 + 60 + 500


@pytest.mark.parametrize(
    ("size", "said"), [(0, "0 bytes"), (999, "999 bytes"), (41_600, "41.6 KB"), (2.09e11, "209.0 GB")]
)
def test_sizes_have_a_digit_before_the_point(size, said):
    assert folders.in_units(size) == said


def save_and_say(folder: Path, resume: Path | None, *iterations: int) -> int:
    return save_at(config(folder, resume, world_size=1), *iterations)


def test_a_folder_that_exists_is_replaced_and_the_newest_is_by_samples(tmp_path):
    saved = tmp_path / "saved"
    assert run(1, tmp_path / "1", save_and_say, saved, None, 3, 3).statuses == [0]
    assert [folder.name for folder in saved.glob("samples-*")] == [name(3)]
    assert run(1, tmp_path / "2", save_and_say, saved, saved, 4).statuses == [0]
    assert [folder.name for folder in saved.glob("samples-*")] == [name(4)]
    (saved / name(4)).rename(saved / f"{name(3)}.replaced")  # as a kill between two renames leaves it
    assert run(1, tmp_path / "3", save_and_say, saved, saved, 5).statuses == [0]
    assert [folder.name for folder in saved.glob("samples-*")] == [name(5)]


def test_training_on_from_an_older_checkpoint_does_not_take_the_place_of_a_newer(tmp_path):
    saved, kept = tmp_path / "saved", tmp_path / "kept"
    assert run(1, tmp_path / "1", save_and_say, saved, None, 3).statuses == [0]
    shutil.copytree(saved, kept)
    assert run(1, tmp_path / "2", save_and_say, saved, saved, 7).statuses == [0]
    shutil.copytree(kept / name(3), saved / name(3))
    for resume in (saved / name(3), None):
        ended = run(1, tmp_path / "3", save_and_say, saved, resume)
        assert ended.statuses == [2]
        assert f"has checkpoints of an earlier run, the newest {name(7)}: choose another folder" in ended.outputs[0]
        assert f"--resume {saved}" in ended.outputs[0]
    assert sorted(folder.name for folder in saved.glob("samples-*")) == [name(3), name(7)]


def look_late(folder: Path, newer: Path) -> int:
    """Rank 1 looks after another run has completed a newer checkpoint; ends with the iteration of the one found."""
    ranks = Ranks.from_environment()
    ranks.init_process_group()
    look, looked = saved_state.checkpoint_in, folder / "looked"

    def in_turn(path: Path) -> Path:
        if ranks.rank == 0:
            found = look(path)
            looked.touch()
            return found
        wait_until(looked.exists, "rank 0 has looked")
        newer.rename(folder / newer.name)
        return look(path)

    saved_state.checkpoint_in = in_turn
    given = config(folder, folder)
    found = agree_on_checkpoint(given, plan_schedule(given, None, 2), ranks)
    assert found is not None
    return found.first


def test_ranks_resume_the_same_checkpoint_while_another_run_saves(tmp_path):
    saved, other = tmp_path / "saved", tmp_path / "other"
    assert run(1, tmp_path / "1", save_and_say, saved, None, 3).statuses == [0]
    assert run(1, tmp_path / "2", save_and_say, other, None, 4).statuses == [0]
    ended = run(2, tmp_path / "3", look_late, saved, other / name(4))
    assert ended.statuses == [3, 3], ended
    assert (saved / name(4)).exists()


def test_a_checkpoint_that_was_moved_behind_a_link_is_resumed_and_its_link_deleted(tmp_path):
    saved, other_disk = tmp_path / "saved", tmp_path / "other-disk"
    assert run(1, tmp_path / "1", save_and_say, saved, None, 3).statuses == [0]
    (saved / name(3)).rename(other_disk)
    (saved / name(3)).symlink_to(other_disk)
    (saved / f"{name(2)}.partial").symlink_to(other_disk)
    ended = run(1, tmp_path / "2", save_and_say, saved, saved, 4)
    assert ended.statuses == [0], ended
    assert [folder.name for folder in saved.glob("samples-*")] == [name(4)]
    assert (other_disk / "index.json").exists()


def test_a_previous_checkpoint_that_cannot_be_deleted_does_not_end_the_training(tmp_path, monkeypatch, caplog):
    def not_empty(folder: Path) -> None:  # as NFS, of files that another process reads
        raise OSError(errno.ENOTEMPTY, "Directory not empty", str(folder))

    for iteration in (3, 4):
        folders.begin_folder(tmp_path / name(iteration), state(config(tmp_path), iteration))
    folders.complete_folder(tmp_path / name(3))
    monkeypatch.setattr(shutil, "rmtree", not_empty)
    folders.complete_folder(tmp_path / name(4))
    assert complete_checkpoints(tmp_path) == [tmp_path / name(4)]
    assert f"could not be deleted, and takes its space: [Errno 39] Directory not empty: '{tmp_path}" in caplog.text


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK])
def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch, number):
    def refuse(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(
        ValueError, match=rf"--checkpoint.path {tmp_path}: its file system cannot lock a file \({os.strerror(number)}"
    ):
        folders.locked(tmp_path, "--checkpoint.path")


@pytest.mark.parametrize(("path", "why"), [("file", "File exists"), ("file/below", "Not a directory")])
def test_a_folder_that_cannot_be_made_is_named_with_its_flag(tmp_path, path, why):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=rf"--checkpoint.path {tmp_path / path} cannot be created \({why}\): choose"):
        folders.make_folder(tmp_path / path, "--checkpoint.path")


def test_a_folder_that_cannot_be_written_is_named_with_its_flag(tmp_path):
    (tmp_path / folders.LOCK).mkdir()  # as on a file system that is read-only, root cannot open it for writing
    with pytest.raises(ValueError, match=rf"--checkpoint.path {tmp_path} cannot be written \(Is a directory\): choose"):
        folders.locked(tmp_path, "--checkpoint.path")
