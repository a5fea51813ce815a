"""Expands one id per feature to several, with the seeded tables of the MLPerf reference.

The reference (mlcommons/training, recommendation_v2/torchrec_dlrm/multi_hot.py) draws, after np.random.seed(0), one
table for each feature in turn: row r of a feature is r itself followed by randint(0, rows, size=(rows, hot - 1))[r].
Here the same numbers are drawn piece by piece and kept on disk in int32: 23.9 GB for the MLPerf model. All processes of
a host map these files, and so share their pages.
"""

import fcntl
import hashlib
import json
import logging
import os
import platform
import shutil
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dlrm_bench.dlrm.data.npy import map_array, write_header
from dlrm_bench.dlrm.data.steps import Advance, step

LOGGER = logging.getLogger(__name__)

REFERENCE_SEED = 0
CHUNK_IDS = 1 << 22
SKIPPED_WORDS = 1 << 18
FOLDER = "expansion_tables"
SHOWN_IDS = 100_000_000
"""Minimum number of ids for which drawing shows its progress: it takes two seconds or more."""


@dataclass(frozen=True, slots=True)
class ExpansionTables:
    """The tables of one model: `rows[f]` is int32 [rows kept of table f, multi_hot_sizes[f]], or None if that size is
    1."""

    rows: tuple[NDArray[np.int32] | None, ...]

    def expand(self, feature: int, ids: NDArray[np.int32], out: NDArray[np.int32]) -> None:
        """Writes the multi-hot ids of `ids` [n], each in [0, rows kept), to `out` [n, multi_hot_size], C-ordered."""
        table = self.rows[feature]
        if table is None:
            out[:, 0] = ids
        else:  # Writes straight to `out`, unlike mode="raise", and without Python's interpreter lock.
            np.take(table, ids, axis=0, out=out, mode="clip")


def open_expansion_tables(
    directory: Path, rows: Sequence[int], multi_hot_sizes: Sequence[int], kept: Sequence[int] | None = None
) -> ExpansionTables:
    """Maps the tables of a model from `directory`/expansion_tables, drawing them first if they are missing.

    They depend on all rows and sizes together (one random sequence produces all tables), so each model has its own
    folder. It appears by a rename when complete. One process draws while others that need the same tables wait. kept:
    number of first rows to keep of each table, if all ids are known to be below it; None for all rows. ValueError if
    tables are missing and the directory cannot be written.
    """
    what = ["whole rows", list(rows), list(multi_hot_sizes), *([] if kept is None else [list(kept)])]
    folder = directory / FOLDER / hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]
    kept = rows if kept is None else kept
    if not folder.exists():
        try:
            _create(folder, rows, multi_hot_sizes, kept)
        except OSError as error:
            raise ValueError(
                f"the tables that expand 1-hot ids cannot be written to {folder.parent} ({error.strerror or error}): "
                f"make it writable, with {_gb(kept, multi_hot_sizes):.1f} GB free, or choose another --data.path"
            ) from error
    return ExpansionTables(
        tuple(
            map_array(folder / f"{feature}.npy", np.int32, hot) if hot > 1 else None
            for feature, hot in enumerate(multi_hot_sizes)
        )
    )


def draw_tables(
    rows: Sequence[int], multi_hot_sizes: Sequence[int], kept: Sequence[int], advance: Advance = lambda _: None
) -> Iterator[Iterator[NDArray[np.int32]]]:
    """Yields the reference's tables in order, each as consecutive pieces [n, hot] of its first `kept` rows.

    A table's pieces must be consumed before the next table is requested, which skips the rows that are not kept.
    advance: called with the number of ids skipped. Drawing int32 in pieces gives the same numbers as the reference's
    single int64 draw: RandomState spends one 32-bit word per attempt for any range below 2^32.
    """
    rng = np.random.RandomState(REFERENCE_SEED)

    def pieces(table_rows: int, hot: int, kept_rows: int) -> Iterator[NDArray[np.int32]]:
        most = max(1, CHUNK_IDS // hot)
        for start in range(0, kept_rows, most):
            count = min(most, kept_rows - start)
            piece = np.empty((count, hot), dtype=np.int32)
            piece[:, 0] = np.arange(start, start + count)
            piece[:, 1:] = rng.randint(0, table_rows, size=(count, hot - 1), dtype=np.int32)
            yield piece

    for table_rows, hot, kept_rows in zip(rows, multi_hot_sizes, kept, strict=True):
        yield pieces(table_rows, hot, kept_rows)
        _skip(rng, table_rows, (table_rows - kept_rows) * (hot - 1), advance)


def _skip(rng: np.random.RandomState, high: int, count: int, advance: Advance) -> None:
    """Advances `rng` like randint(0, high, size=count), in a third of its time.

    randint masks a 32-bit word to the bits of high - 1 and retries if the result is not below high; if high is 1 it
    takes no word. A word gives at most one number, so taking one word per missing number never takes too many.
    """
    mask = (1 << (high - 1).bit_length()) - 1
    while count and mask:
        words = rng.randint(0, 1 << 32, size=min(count, SKIPPED_WORDS), dtype=np.uint32)
        taken = int(np.count_nonzero((words & np.uint32(mask)) < high))
        count -= taken
        advance(taken)


def _create(folder: Path, rows: Sequence[int], multi_hot_sizes: Sequence[int], kept: Sequence[int]) -> None:
    folder.parent.mkdir(exist_ok=True)
    with _locked(folder.with_suffix(".lock")) as alone:
        if folder.exists():  # Another process finished it in the meantime.
            return
        title = f"draw the tables that expand 1-hot ids, {_gb(kept, multi_hot_sizes):.1f} GB, once for {folder.parent}"
        partial = folder.with_suffix(".partial" if alone else f".{platform.node()}.{os.getpid()}.partial")
        shutil.rmtree(partial, ignore_errors=True)  # Left by a killed process; nobody else works here now.
        partial.mkdir()
        drawn = [feature for feature, hot in enumerate(multi_hot_sizes) if hot > 1]
        last = max(drawn, default=-1)
        skipped = sum((rows[feature] - kept[feature]) * (multi_hot_sizes[feature] - 1) for feature in drawn[:-1])
        with _shown(title, sum(kept_ids(kept, multi_hot_sizes)) + skipped) as advance:
            tables = draw_tables(rows, multi_hot_sizes, kept, advance)
            for feature, pieces in zip(range(last + 1), tables, strict=False):
                if multi_hot_sizes[feature] > 1:
                    with (partial / f"{feature}.npy").open("wb") as file:
                        write_header(file, np.int32, (kept[feature], multi_hot_sizes[feature]))
                        for piece in pieces:
                            file.write(piece.data)
                            advance(piece.size)
        try:
            os.replace(partial, folder)
        except OSError:
            if not folder.exists():
                raise
            shutil.rmtree(partial)  # Another process was faster, where none waits for the other.


def kept_ids(rows: Sequence[int], multi_hot_sizes: Sequence[int]) -> Iterator[int]:
    """Yields the number of ids of each table that is kept on disk."""
    return (r * hot for r, hot in zip(rows, multi_hot_sizes, strict=True) if hot > 1)


def _gb(rows: Sequence[int], multi_hot_sizes: Sequence[int]) -> float:
    return 4 * sum(kept_ids(rows, multi_hot_sizes)) / 1e9


def _shown(title: str, ids: int) -> AbstractContextManager[Advance]:
    """Shows progress on stderr if drawing takes long; small models' tables are ready at once."""
    return step(title, ids, "M ids") if ids >= SHOWN_IDS else nullcontext(lambda _: None)


@contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Holds an exclusive lock, which the system releases however the process dies; yields False, and warns, on a file
    system without locks."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            alone = True
        except OSError as error:  # such as Lustre, mounted without its option flock
            alone, why = False, f"its file system cannot lock a file ({error.strerror})"
            LOGGER.warning("%s: %s: every process that needs the tables now draws them itself", path.parent, why)
        yield alone
