"""Snapshots in memory: ranks killed at any moment, no room, a full disk behind them; something whole is left."""

import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dlrm_bench.bench.checkpoints import checkpoints, memory_folder, snapshots
from dlrm_bench.bench.checkpoints.checkpoints import Checkpoints
from dlrm_bench.bench.checkpoints.saved_state import find_checkpoint
from dlrm_bench.bench.config import CheckpointConfig, RunConfig, SnapshotConfig
from dlrm_bench.bench.instruments.schedule import plan_schedule
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.checkpoint_memory import PiecesInMemory
from tests.bench.checkpoints.test_checkpoints import Held, config, kill, name, run, save_at, save_second, state
from tests.launched import fork, wait, wait_until

AUTO = Path("auto")


def in_memory(memory: Path, disk: Path | None, world_size: int = 2, resume: Path | None = AUTO) -> RunConfig:
    saves = CheckpointConfig(path=disk)
    return replace(
        config(Path("unused"), resume, world_size), checkpoint=saves, snapshot=SnapshotConfig(every=1, path=memory)
    )


def begun(memory: Path, disk: Path | None, slots: int) -> tuple[Ranks, Held, Checkpoints, RunConfig]:
    memory_folder._MOST = slots
    ranks = Ranks.from_environment()
    ranks.init_process_group()
    held, given = Held(ranks, 1), in_memory(memory, disk)
    return ranks, held, Checkpoints(given, ranks, held, None), given  # type: ignore[arg-type]


def half_filled(memory: PiecesInMemory, pieces: Any, on_piece: Any) -> None:
    """Copies a part, and then this process is killed."""
    memory.pieces[0][1].copy_(pieces[0][1])
    kill()


def error_of_a_thread() -> None:
    raise RuntimeError("no copy")


def save_twice(memory: Path, disk: Path | None, slots: int, trouble: str) -> int:
    """Iteration 1 is saved well, and `trouble` strikes the second time."""
    ranks, held, saving, given = begun(memory, disk, slots)
    saving.save(1, state(given, 1))
    held.train()
    saving.wait()
    if trouble == "killed in the copy":
        PiecesInMemory.fill = half_filled  # type: ignore[method-assign]
    elif trouble == "killed before the new name":
        snapshots.close_slot = kill  # on rank 0
    elif trouble == "killed while writing":
        checkpoints.write_state = kill
    elif trouble == "error in the copy":
        saving._count = error_of_a_thread  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match="no copy"):
            saving.save(2, state(given, 2))
        return 2
    return save_second(saving, ranks, held, given, trouble)


def load(memory: Path, disk: Path | None, from_memory: bool, resume: Path = AUTO) -> int:
    """Ends with the iteration that was found; 100 if the state is not of it, or not from there."""
    ranks = Ranks.from_environment()
    ranks.init_process_group()
    wanted = in_memory(memory, disk, ranks.world_size, resume)
    resumed = find_checkpoint(wanted, plan_schedule(wanted, None, ranks.world_size))
    assert resumed is not None
    held = Held(ranks, -1)
    saving = Checkpoints(wanted, ranks, held, resumed)  # type: ignore[arg-type]
    found = held.is_of([1, 1001][resumed.first - 1]) and (resumed.folder.parent == memory) == from_memory
    saving.save(3, state(wanted, 3))  # and the run goes on
    saving.wait()
    expected = [name(3)] if disk is not None else []
    assert disk is None or [folder.name for folder in disk.glob("samples-*")] == expected
    saving.remove_snapshots()
    assert not memory.exists()
    return resumed.first if found else 100


@pytest.mark.parametrize(
    ("slots", "trouble", "kept", "from_memory"),
    [
        (2, "none", 2, True),
        (2, "killed in the copy", 1, True),
        (1, "killed in the copy", 1, False),
        (2, "error in the copy", 1, True),
        (2, "killed before the new name", 1, True),
        (1, "killed while writing", 2, True),
        (1, "disk full", 2, True),
    ],
)
def test_something_whole_survives(tmp_path, memory, slots, trouble, kept, from_memory):
    disk = tmp_path / "saved"
    ended = run(2, tmp_path / "save", save_twice, memory, disk, slots, trouble)
    assert ended.statuses[0] == {"none": 0, "disk full": 2, "error in the copy": 2}.get(trouble, -9), ended
    if trouble == "disk full":
        for output in ended.outputs:
            assert "the checkpoint of iteration 2 could not be written: rank 1: [Errno 27] File too large" in output
            assert f"the last complete one is {disk / name(1)}, and {memory / name(2)} in memory is complete" in output
    # Another number of ranks reads it too, and makes files of its own.
    world_size = 1 if trouble in ("none", "disk full") else 2
    ended = run(world_size, tmp_path / "load", load, memory, disk, from_memory)
    assert ended.statuses == [kept] * world_size, ended


def test_without_a_disk_two_snapshots_take_turns(tmp_path, memory):
    ended = run(2, tmp_path / "save", save_twice, memory, None, 2, "killed in the copy")
    assert ended.statuses == [-9, -9], ended
    assert run(2, tmp_path / "load", load, memory, None, True).statuses == [1, 1]


class SlowDisk:
    """Lets no checkpoint be written before `released`."""

    def __init__(self) -> None:
        self.released, self._write = threading.Event(), checkpoints.write_state

    def __call__(self, *given: Any) -> None:
        self.released.wait()
        self._write(*given)


def save_behind_a_slow_disk(memory: Path, disk: Path, slots: int) -> int:
    """Iteration 1 is being written while 2 and 3 are due; ends with the snapshots that were left out."""
    _, held, saving, given = begun(memory, disk, slots)
    checkpoints.write_state = slow = SlowDisk()
    for iteration in (1, 2, 3):
        saving.save(iteration, state(given, iteration))
        assert (memory / name(1)).is_dir()
        assert [folder.name for folder in memory.glob("samples-*")][slots:] == []
        held.train()
    slow.released.set()
    saving.wait()
    block = saving.describe()
    assert block is not None
    assert [saved["iteration"] for saved in block["saved"]] == ([1, 3] if slots == 2 else [1])
    assert [taken["iteration"] for taken in block["snapshots"]] == ([1, 2, 3] if slots == 2 else [1])
    return block["left_out"]


@pytest.mark.parametrize(("slots", "left_out"), [(2, 0), (1, 2)])
def test_what_is_being_written_stays_and_training_does_not_wait(tmp_path, memory, slots, left_out):
    ended = run(2, tmp_path / "run", save_behind_a_slow_disk, memory, tmp_path / "saved", slots)
    assert ended.statuses == [left_out, left_out], ended


def refused(memory: Path, disk: Path | None, changes: dict[str, Any], free: int | None) -> int:
    """Ends with 2, and prints why, if the run is refused. free: bytes of memory to spare."""
    if free is not None:
        memory_folder.free_memory_bytes = lambda: free + memory_folder.node_memory_bytes() // memory_folder._KEPT
    return save_at(replace(in_memory(memory, disk), **changes))


def test_what_is_left_over_is_named_and_another_training_is_refused(tmp_path, memory):
    assert (
        run(2, tmp_path / "save", save_twice, memory, tmp_path / "saved", 2, "killed while writing").statuses[0] == -9
    )
    ended = run(2, tmp_path / "1", refused, memory, None, {"resume": None}, None)
    assert ended.statuses == [2, 2], ended
    for output in ended.outputs:
        assert f"--snapshot.path {memory} has a snapshot of an earlier run, first, {name(2)}, which takes " in output
        assert f" of memory: go on from it with --resume auto, or remove it: rm -r {memory / name(1)} " in output
    ended = run(2, tmp_path / "2", refused, memory, None, {"seed": 7}, None)
    assert ended.statuses == [2, 2], ended
    assert f"--resume {memory / name(2)}: it was trained with --seed 0, and this run has 7" in ended.outputs[1]


@pytest.mark.parametrize(
    ("disk", "rooms", "status"), [(True, 0.9, 2), (True, 1.1, 0), (False, 1.9, 2), (False, 2.1, 0)]
)
def test_too_little_memory_is_known_before_the_training(tmp_path, memory, disk, rooms, status):
    of_a_snapshot = memory_folder._TEXT_BYTES + 2 * 8 * memory_folder._PAGE
    free = int(rooms * of_a_snapshot)
    saved = tmp_path / "saved" if disk else None
    ended = run(2, tmp_path / "run", refused, memory, saved, {}, free)
    assert ended.statuses == [status, status], ended
    if status:
        for output in ended.outputs:
            assert f"--snapshot.path {memory}: a snapshot takes 67." in output
            assert "of memory to spare: enlarge the tmpfs" in output
            assert ("two of them are needed where none is written to --checkpoint.path" in output) != disk


def test_a_run_has_its_folder_for_itself(tmp_path, memory):
    memory.mkdir()
    lock = snapshots.locked(memory, "--snapshot.path")
    ended = run(2, tmp_path / "run", refused, memory, None, {}, None)
    lock.close()
    assert ended.statuses == [2, 2]
    assert f"--snapshot.path {memory}: another run saves there" in ended.outputs[0]


def die_on_rank_0(memory: Path, end: Path) -> int:
    """Rank 0 is killed after a snapshot, and rank 1 stays until there is a file `end`."""
    ranks, _, saving, given = begun(memory, None, 2)
    saving.save(1, state(given, 1))
    if ranks.rank == 0:
        kill()
    wait_until(end.exists, "the end of rank 1")
    return 0


def test_a_folder_is_that_of_a_run_until_its_last_rank_has_ended(tmp_path, memory):
    first, end = tmp_path / "first", tmp_path / "end"
    first.mkdir()
    ranks = fork(2, first, die_on_rank_0, memory, end)
    wait_until(lambda: ranks[0].exitcode is not None, "the end of rank 0")
    ended = run(2, tmp_path / "1", refused, memory, None, {}, None)
    end.touch()
    assert wait(ranks, first).statuses == [-9, 0]
    assert ended.statuses == [2, 2], ended
    for output in ended.outputs:
        assert f"--snapshot.path {memory}: another run saves there, or a rank of it has not ended: " in output
    assert run(2, tmp_path / "2", refused, memory, None, {}, None).statuses == [0, 0]


def test_training_on_from_an_older_snapshot_does_not_take_the_place_of_a_newer(tmp_path, memory):
    older = in_memory(memory, None, resume=memory / name(2))
    assert run(2, tmp_path / "1", save_at, in_memory(memory, None), 2, 4).statuses == [0, 0]
    ended = run(2, tmp_path / "2", save_at, older, 3, 4)
    assert ended.statuses == [2, 2], ended
    for output in ended.outputs:
        assert f"--snapshot.path {memory} has a newer snapshot than --resume names, first, {name(4)}, which" in output
        assert f"or remove it: rm -r {memory / name(4)}\n" in output
    assert sorted(folder.name for folder in memory.glob("s*")) == [name(2), name(4)]
    shutil.rmtree(memory / name(4))
    ended = run(2, tmp_path / "3", save_at, older, 3, 4)
    assert ended.statuses == [0, 0], ended
    assert sorted(folder.name for folder in memory.glob("s*")) == [name(3), name(4)]


def ends_well(memory: Path) -> int:
    _, _, saving, given = begun(memory, None, 2)
    saving.save(1, state(given, 1))
    saving.remove_snapshots()
    return 0


def test_files_of_others_in_the_folder_stay_after_a_good_end(tmp_path, memory):
    memory.mkdir()
    (memory / "data").mkdir()
    (memory / "data" / "day_0").touch()
    ended = run(2, tmp_path / "run", ends_well, memory)
    assert ended.statuses == [0, 0], ended
    assert sorted(memory.rglob("*")) == [memory / "data", memory / "data" / "day_0"]
