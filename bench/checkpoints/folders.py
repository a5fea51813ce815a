"""Folders of checkpoints, which a rename makes complete, and work that one rank does for all ranks."""

import fcntl
import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO, TypeVar

import torch.distributed as dist

from dlrm_bench.bench.checkpoints.saved_state import PARTIAL, STATE_JSON, RunState, complete_checkpoints
from dlrm_bench.dlrm.runtime.ranks import Ranks

LOGGER = logging.getLogger(__name__)
LOCK = ".lock"
_Result = TypeVar("_Result")


def on_rank_0(ranks: Ranks, work: Callable[[], _Result], group: dist.ProcessGroup | None = None) -> _Result:
    """Runs `work` on global rank 0; its result is returned on every rank, its OSError or ValueError raised on every
    rank, as ValueError. Collective over `group`."""
    answer: list[Any] = [None, None]
    if ranks.rank == 0:
        try:
            answer[0] = work()
        except (OSError, ValueError) as error:
            answer[1] = str(error)
    dist.broadcast_object_list(answer, src=0, group=group)
    if answer[1] is not None:
        raise ValueError(answer[1])
    result: _Result = answer[0]
    return result


def make_folder(path: Path, flag: str, mode: int = 0o777) -> None:
    """Makes the folder named by `flag` if it does not exist. ValueError, with the flag, if that is not possible."""
    try:
        path.mkdir(mode=mode, parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{flag} {path} cannot be created ({error.strerror}): choose another folder") from None


def locked(path: Path, flag: str, lock: TextIO | None = None, shared: bool = False) -> TextIO:
    """Returns a file that locks a folder for as long as it is open. ValueError where another process has it, where
    nothing can be written, or where the file system has no locks.

    lock: the file, if this process has locked the folder before. shared: with processes that share it too.
    """
    try:
        lock = lock or (path / LOCK).open("w+")  # NFS shares a lock only of a file that is open for reading too
    except OSError as error:
        raise ValueError(f"{flag} {path} cannot be written ({error.strerror}): choose another folder") from None
    try:
        fcntl.flock(lock, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(
            f"{flag} {path}: another run saves there, or a rank of it has not ended: wait for its end, or choose "
            "another folder"
        ) from None
    except OSError as error:  # such as Lustre, mounted without its option flock
        raise ValueError(
            f"{flag} {path}: its file system cannot lock a file ({error.strerror}), and two runs could save there: "
            "choose a folder on another one, or mount it with locks"
        ) from None
    return lock


def begin_folder(folder: Path, state: RunState) -> None:
    """Makes an empty folder for a future checkpoint, with the state of its run; deletes an old folder."""
    unfinished = unfinished_of(folder)
    if unfinished.exists():
        delete_folder(unfinished)
    unfinished.mkdir()
    with (unfinished / STATE_JSON).open("w", encoding="utf-8") as file:
        json.dump(state, file)
        file.flush()
        os.fsync(file.fileno())


def unfinished_of(folder: Path) -> Path:
    """Returns the name of a checkpoint until all of it is on disk."""
    return folder.with_name(folder.name + PARTIAL)


def complete_folder(folder: Path) -> None:
    """Gives a checkpoint its name once all of it is on disk, and deletes the previous ones; warns of one that cannot be
    deleted.

    An older one of the same number of samples is renamed first, to a name that is complete as well: there is one at any
    time.
    """
    unfinished = unfinished_of(folder)
    _sync(unfinished)
    if folder.exists():
        os.replace(folder, folder.with_name(f"{folder.name}.replaced"))
    os.replace(unfinished, folder)
    _sync(folder.parent)
    complete = complete_checkpoints(folder.parent)
    for older in complete[: complete.index(folder)]:
        leaving = unfinished_of(older)  # half deleted it would look complete
        try:
            os.replace(older, leaving)
            delete_folder(leaving)
        except OSError as error:  # the new one is on disk, and the training goes on
            LOGGER.warning("the previous checkpoint could not be deleted, and takes its space: %s", error)


def delete_folder(folder: Path) -> None:
    """Deletes a folder, or a link to one, whose content stays where it is."""
    if folder.is_symlink():
        folder.unlink()
    else:
        shutil.rmtree(folder)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def in_units(size: float) -> str:
    """Returns a number of bytes in the largest unit in which it is at least 1."""
    for unit, of in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if size >= of:
            return f"{size / of:.1f} {unit}"
    return f"{size:.0f} bytes"
