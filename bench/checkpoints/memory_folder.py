"""The folder of snapshots in a node's memory: what it holds, and for how many snapshots it has room.

A snapshot is in a slot, a folder whose files are reused. A slot without a complete snapshot is called slot-0 or slot-1;
with one, it has the name of a checkpoint, `samples-0000000512000`. A rename, which is atomic even under a kill, changes
between the two. So a snapshot is read, checked and resumed like any checkpoint.
"""

import json
import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dlrm_bench.bench.checkpoints.folders import LOCK, in_units, make_folder
from dlrm_bench.bench.checkpoints.saved_state import (
    SLOTS,
    STATE_JSON,
    RunState,
    checkpoint_name,
    complete_checkpoints,
    read_run_state,
)
from dlrm_bench.dlrm.runtime.host_memory import free_memory_bytes, node_memory_bytes
from dlrm_bench.pipeline.checkpoint_index import INDEX_JSON
from dlrm_bench.pipeline.checkpoint_memory import is_allocated

_MOST = 2
"""Slots: while one is filled, or written to disk, the other one is whole."""
_TEXT_BYTES = 64 * 2**20
"""Room for the index and the state of a run, beside the pieces."""
_KEPT = 16
"""Divisor: this fraction of the node's memory (one over it) is reserved for training and the page cache."""
_PAGE = 4096


@dataclass(frozen=True, slots=True)
class Layout:
    """The files of a snapshot of all ranks."""

    index: str
    """Content of index.json."""
    sizes: dict[str, int]
    """Bytes of each file, by name."""

    @property
    def nbytes(self) -> int:
        """Memory that a slot takes."""
        return sum(-(-size // _PAGE) * _PAGE for size in self.sizes.values()) + _TEXT_BYTES

    def is_that_of(self, slot: Path) -> bool:
        """Whether a slot has these files, with all of their memory."""
        try:
            whole = all(is_allocated((slot / name).stat(), size) for name, size in self.sizes.items())
            return whole and (slot / INDEX_JSON).read_text(encoding="utf-8") == self.index
        except OSError:
            return False


@dataclass(frozen=True, slots=True)
class Slots:
    """The slots of a run."""

    folders: list[Path]
    other: Path | None
    """The snapshot that the run resumes, if its files differ from this run's: it is not a slot, and is deleted after
    the first new snapshot."""
    on_disk: bool
    """Whether the snapshot that the run resumes is a checkpoint too."""


def make_memory_folder(path: Path) -> None:
    """Makes the folder if it does not exist. ValueError if that fails, or it is another user's, or not in memory."""
    make_folder(path, "--snapshot.path", mode=0o700)
    if path.stat().st_uid != os.geteuid():
        raise ValueError(f"--snapshot.path {path} belongs to another user: choose another folder")
    kind = _file_system(path)
    if kind != "tmpfs":
        raise ValueError(f"--snapshot.path {path} is on {kind} and not in memory: choose a folder on a tmpfs")


def check_left_over(path: Path, resumed: Path | None) -> None:
    """Raises ValueError where the folder has a snapshot of an earlier run, newer than the one in it that the run
    resumes, if any; it says how much memory that takes."""
    complete = complete_checkpoints(path)
    if not complete or complete[-1] == resumed:
        return
    what, left_over = "a snapshot of an earlier run", [*complete, *sorted(path.glob(SLOTS))]
    if resumed in complete:
        what, left_over = "a newer snapshot than --resume names", complete[complete.index(resumed) + 1 :]
    held = in_units(sum(map(_held_bytes, left_over)))
    raise ValueError(
        f"--snapshot.path {path} has {what}, {read_run_state(complete[-1])['run_id']}, {complete[-1].name}, which "
        f"takes {held} of memory: go on from it with --resume auto, or remove it: rm -r "
        f"{' '.join(map(str, left_over))}"
    )


def prepare_slots(path: Path, layout: Layout, resumed: Path | None, disk: Path | None) -> Slots:
    """Returns the slots of a run: those of an earlier one that fit, and new ones; the rest of the folder is removed.

    resumed: the snapshot in this folder that the run resumes. disk: folder that snapshots are written to, so that one
    slot suffices. ValueError if there is too little memory; it says how much is needed and how much is free.
    """
    found = [*reversed(complete_checkpoints(path)), *sorted(path.glob(SLOTS))]
    folders = [folder for folder in found if layout.is_that_of(folder)][:_MOST]
    other = resumed if resumed not in folders else None
    for left_over in (folder for folder in found if folder not in folders and folder != other):
        shutil.rmtree(left_over)
    free, spare = shutil.disk_usage(path).free, max(0, free_memory_bytes() - node_memory_bytes() // _KEPT)
    for _ in range(min(_MOST - len(folders), min(free, spare) // layout.nbytes)):
        folders.append(_free_name(path))
        folders[-1].mkdir()
        (folders[-1] / INDEX_JSON).write_text(layout.index, encoding="utf-8")
    least = _MOST if disk is None else 1
    if len(folders) < least:
        two = ", and two of them are needed where none is written to --checkpoint.path" if folders else ""
        raise ValueError(
            f"--snapshot.path {path}: a snapshot takes {in_units(layout.nbytes)}{two}: the tmpfs has {in_units(free)} "
            f"free, and the node {in_units(spare)} of memory to spare: enlarge the tmpfs (mount -o remount,size=...), "
            "free memory, or leave --snapshot.every out"
        )
    saved = [] if disk is None else [folder.name for folder in complete_checkpoints(disk)]
    return Slots(folders, other, on_disk=resumed is not None and resumed.name in saved)


def open_slot(folder: Path, state: RunState) -> Path:
    """Marks a slot as incomplete and writes the state of a run to it; returns the slot's new path. OSError, with the
    file's name, if others have filled the memory."""
    if folder.name.startswith("samples-"):
        folder = folder.rename(_free_name(folder.parent))
    file = folder / STATE_JSON
    try:
        file.write_text(json.dumps(state), encoding="utf-8")
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(file)) from error
    return folder


def close_slot(folder: Path, samples: int, other: Path | None) -> Path:
    """Marks a filled slot as a complete snapshot; returns the slot's new path. other: an older snapshot to delete."""
    folder = folder.rename(folder.with_name(checkpoint_name(samples)))
    if other is not None:
        shutil.rmtree(other)
    return folder


def remove_slots(path: Path) -> None:
    """Removes all snapshots and the lock; the folder too, unless it is a mount point or has other files."""
    for folder in [*complete_checkpoints(path), *path.glob(SLOTS)]:
        leaving = folder
        if folder.name.startswith("samples-"):  # half deleted it would look complete
            leaving = folder.rename(_free_name(path))
        shutil.rmtree(leaving)
    (path / LOCK).unlink(missing_ok=True)
    with suppress(OSError):
        path.rmdir()


def _free_name(path: Path) -> Path:
    return next(name for name in (path / f"slot-{i}" for i in range(_MOST + 1)) if not name.exists())


def _held_bytes(path: Path) -> int:
    return sum(512 * file.stat().st_blocks for file in path.rglob("*"))


def _file_system(path: Path) -> str:
    """Returns the type of the file system that a folder is on."""
    mounts = (line.split()[1:3] for line in Path("/proc/self/mounts").read_text().splitlines())
    folder = path.resolve()
    _, kind = max((len(point), kind) for point, kind in mounts if folder.is_relative_to(point))
    return kind
