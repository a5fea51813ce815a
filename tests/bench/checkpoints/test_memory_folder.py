"""The folder of snapshots: where it may be, what of an earlier run stays in it, and for how much there is room."""

import errno
import os
import shutil
from pathlib import Path

import pytest

from dlrm_bench.bench.checkpoints import memory_folder
from dlrm_bench.bench.checkpoints.memory_folder import (
    Layout,
    close_slot,
    make_memory_folder,
    open_slot,
    prepare_slots,
    remove_slots,
)
from dlrm_bench.bench.checkpoints.saved_state import STATE_JSON, complete_checkpoints
from dlrm_bench.pipeline.checkpoint_index import INDEX_JSON
from tests.bench.checkpoints.test_saved_state import GBS, of, save, state

LAYOUT = Layout("index", {"rank-0-0.bin": 5000})


def filled(folder: Path, index: str = "index", size: int = 5000) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / INDEX_JSON).write_text(index)
    (folder / "rank-0-0.bin").write_bytes(bytes(size))
    return folder


def names(path: Path) -> list[str]:
    return sorted(folder.name for folder in path.iterdir())


def test_a_folder_that_is_not_in_memory_is_refused(tmp_path, memory, monkeypatch):
    make_memory_folder(memory)
    assert memory.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(memory_folder, "_file_system", lambda path: "ext4")
    with pytest.raises(ValueError, match="is on ext4 and not in memory: choose a folder on a tmpfs"):
        make_memory_folder(tmp_path)
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    with pytest.raises(ValueError, match="belongs to another user: choose another folder"):
        make_memory_folder(memory)


def test_a_folder_that_cannot_be_made_is_named_with_its_flag(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(
        ValueError, match=r"--snapshot.path .*file cannot be created \(File exists\): choose another folder"
    ):
        make_memory_folder(tmp_path / "file")


def test_file_systems_are_told_apart():
    assert memory_folder._file_system(Path("/dev/shm")) == "tmpfs"
    assert memory_folder._file_system(Path("/proc/self")) == "proc"


def test_a_slot_is_a_snapshot_from_one_rename_to_the_next(tmp_path):
    slots = prepare_slots(tmp_path, LAYOUT, None, None)
    assert names(tmp_path) == ["slot-0", "slot-1"]
    assert (slots.other, slots.on_disk) == (None, False)
    first = open_slot(slots.folders[0], state())
    assert complete_checkpoints(tmp_path) == []
    first = close_slot(first, 7 * GBS, None)
    assert complete_checkpoints(tmp_path) == [first]
    assert open_slot(first, state()).name == "slot-0"
    assert complete_checkpoints(tmp_path) == []


def test_of_an_earlier_run_what_fits_stays_and_the_rest_goes(tmp_path):
    torn = filled(tmp_path / "slot-0")
    short = filled(tmp_path / "slot-1", size=4999)
    resumed = filled(save(tmp_path, **of(9)))
    slots = prepare_slots(tmp_path, LAYOUT, resumed, None)
    assert slots.folders == [resumed, torn]
    assert slots.other is None
    assert not short.exists()
    assert (resumed / STATE_JSON).exists()


def test_what_is_resumed_and_does_not_fit_stays_until_there_is_a_newer(tmp_path):
    resumed = filled(save(tmp_path, **of(9)), index="of another number of ranks")
    disk = tmp_path / "disk"
    disk.mkdir()
    save(disk, **of(9))
    slots = prepare_slots(tmp_path, LAYOUT, resumed, disk)
    assert (slots.other, slots.on_disk) == (resumed, True)
    assert [slot.name for slot in slots.folders] == ["slot-0", "slot-1"]
    newer = close_slot(open_slot(slots.folders[0], state()), 12 * GBS, slots.other)
    assert complete_checkpoints(tmp_path) == [newer]


def test_memory_that_the_node_needs_itself_is_not_taken(tmp_path, monkeypatch):
    monkeypatch.setattr(memory_folder, "node_memory_bytes", lambda: 16 * 2**30)
    monkeypatch.setattr(memory_folder, "free_memory_bytes", lambda: 2**30 + LAYOUT.nbytes)
    assert len(prepare_slots(tmp_path, LAYOUT, None, tmp_path).folders) == 1
    (tmp_path / "slot-0" / "rank-0-0.bin").write_bytes(bytes(5000))
    monkeypatch.setattr(memory_folder, "free_memory_bytes", lambda: 0)
    assert len(prepare_slots(tmp_path, LAYOUT, None, tmp_path).folders) == 1  # it has its memory already
    with pytest.raises(ValueError, match=r"a snapshot takes 67\.1 MB, and two of them .* free, and the node 0 b"):
        prepare_slots(tmp_path, LAYOUT, None, None)


def test_a_kill_while_snapshots_are_removed_leaves_none_that_only_looks_complete(tmp_path, monkeypatch):
    class Killed(BaseException):
        pass

    def half(folder: Path) -> None:
        (folder / "rank-0-0.bin").unlink()
        raise Killed

    older, newer = filled(save(tmp_path, **of(7))), filled(save(tmp_path, **of(9)))
    monkeypatch.setattr(shutil, "rmtree", half)
    for left in ([newer], []):
        with pytest.raises(Killed):
            remove_slots(tmp_path)
        assert complete_checkpoints(tmp_path) == left
    monkeypatch.undo()
    assert not older.exists()
    remove_slots(tmp_path)
    assert not tmp_path.exists()


def test_a_mount_point_stays_when_its_snapshots_are_removed(tmp_path, monkeypatch):
    def busy(path: Path) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy", str(path))

    filled(save(tmp_path, **of(7)))
    monkeypatch.setattr(Path, "rmdir", busy)
    remove_slots(tmp_path)
    assert names(tmp_path) == []
