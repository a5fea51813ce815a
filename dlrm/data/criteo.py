"""MLPerf's Criteo day files: checked when opened, memory-mapped, checked again as they are read.

Day i of N samples is
    day_i_dense.npy              float32 (N, dense features), already log-transformed
    day_i_labels.npy             int32 (N, 1), 0 or 1
    day_i_sparse_multi_hot.npz   uncompressed zip of 0.npy, 1.npy, ...: int32 (N, hot), one for each feature; or
    day_i_sparse.npy             int32 (N, features), one id per feature, to be expanded
(mlcommons/training, recommendation_v2/torchrec_dlrm). All errors about files are ValueErrors that name file and member.
"""

import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from dlrm_bench.dlrm.config import ModelConfig
from dlrm_bench.dlrm.data.expansion import ExpansionTables
from dlrm_bench.dlrm.data.npy import COPY_AGAIN, map_array, member_span, write_header

WRITE_CHUNK = 1 << 16  # Samples.

Ids = NDArray[np.int32]


def dense_file(directory: Path, day: int) -> Path:
    """The file of a day's dense features."""
    return directory / f"day_{day}_dense.npy"


def labels_file(directory: Path, day: int) -> Path:
    """The file of a day's labels."""
    return directory / f"day_{day}_labels.npy"


def one_hot_file(directory: Path, day: int) -> Path:
    """The file of a day's ids, one per feature."""
    return directory / f"day_{day}_sparse.npy"


def multi_hot_file(directory: Path, day: int) -> Path:
    """The file of a day's ids, several per feature."""
    return directory / f"day_{day}_sparse_multi_hot.npz"


class Day(ABC):
    """One day, open for reading. Subclasses read the two formats of ids."""

    def __init__(self, directory: Path, day: int, model: ModelConfig) -> None:
        self._directory = directory
        self._day = day
        self._model = model
        dense, labels = dense_file(directory, day), labels_file(directory, day)
        fix = f"set --model.dense-in-features, or {COPY_AGAIN}"
        self._dense = _map_file(dense, np.float32, model.dense_in_features, fix)
        self._labels = _map_file(labels, np.int32, 1)
        self.num_samples = len(self._dense)
        self._check_samples(labels, self._labels)

    def read(
        self, start: int, stop: int, dense: NDArray[np.float32], labels: NDArray[np.float32], ids: list[Ids]
    ) -> None:
        """Read samples [start, stop), n of them, and check every value.

        dense: [n, dense_in_features], labels: [n], ids: one [n, hot] for each feature; all are written.
        Raises ValueError with file, feature, value and sample for an id outside its table, a label that is neither
        0 nor 1, and a dense value that is not finite.
        """
        assert 0 <= start < stop <= self.num_samples
        np.copyto(dense, self._dense[start:stop])
        finite = np.isfinite(dense)
        if not finite.all():
            row, column = np.argwhere(~finite)[0]
            raise ValueError(
                f"{dense_file(self._directory, self._day)}: dense feature {column} of sample {start + row} is "
                f"{dense[row, column]}, which is not finite: {COPY_AGAIN}"
            )
        found = self._labels[start:stop, 0]
        np.copyto(labels, found, casting="same_kind")
        if found.view(np.uint32).max() > 1:  # Seen as unsigned, negative numbers are large.
            row = int(np.argmax((found != 0) & (found != 1)))
            raise ValueError(
                f"{labels_file(self._directory, self._day)}: the label of sample {start + row} is {found[row]}, "
                f"neither 0 nor 1: {COPY_AGAIN}"
            )
        self._read_ids(start, stop, ids)

    @abstractmethod
    def _read_ids(self, start: int, stop: int, out: list[Ids]) -> None: ...

    def _check_samples(self, path: Path, array: NDArray[Any], member: str = "") -> None:
        if len(array) != self.num_samples:
            raise ValueError(
                f"{path}{member} has {len(array)} samples, but {dense_file(self._directory, self._day).name} has "
                f"{self.num_samples}: the files of a day belong together; {COPY_AGAIN}"
            )


class MultiHotDay(Day):
    """A day whose ids are stored multi-hot."""

    def __init__(self, directory: Path, day: int, model: ModelConfig) -> None:
        super().__init__(directory, day, model)
        self._path = multi_hot_file(directory, day)
        self._members = map_members(self._path, model.multi_hot_sizes)
        for feature, member in enumerate(self._members):
            self._check_samples(self._path, member, f"[{feature}.npy]")

    def _read_ids(self, start: int, stop: int, out: list[Ids]) -> None:
        for feature, (member, rows, block) in enumerate(zip(self._members, self._model.rows, out, strict=True)):
            np.copyto(block, member[start:stop])
            if block.view(np.uint32).max() >= rows:
                row, column = np.argwhere((block < 0) | (block >= rows))[0]
                raise ValueError(
                    f"{self._path}[{feature}.npy]: id {block[row, column]} of sample {start + row} (feature "
                    f"cat_{feature}) is outside its table of {rows} rows: choose --model.num-embeddings and "
                    "--model.table-scale as the files were made for"
                )


class OneHotDay(Day):
    """A day whose ids are stored 1-hot.

    They are reduced modulo the table's rows and then expanded, both as the reference does (its
    scripts/materialize_synthetic_multihot_dataset.py), so these files serve any table_scale.
    """

    tables: ExpansionTables
    """The model's, to be set before reading; opening them can take minutes, so files are checked before."""

    def __init__(self, directory: Path, day: int, model: ModelConfig) -> None:
        super().__init__(directory, day, model)
        self._path = one_hot_file(directory, day)
        fix = f"--model.num-embeddings needs one table for each feature of the files, or {COPY_AGAIN}"
        self._ids = _map_file(self._path, np.int32, model.num_features, fix)
        self._check_samples(self._path, self._ids)

    def _read_ids(self, start: int, stop: int, out: list[Ids]) -> None:
        ids = self._ids[start:stop]
        if ids.min() < 0:
            row, feature = np.argwhere(ids < 0)[0]
            raise ValueError(
                f"{self._path}: id {ids[row, feature]} of sample {start + row} (feature cat_{feature}) is negative: "
                f"{COPY_AGAIN}"
            )
        folded = ids % np.asarray(self._model.rows, dtype=np.int32)
        for feature, block in enumerate(out):
            self.tables.expand(feature, folded[:, feature], block)


def _map_file(path: Path, dtype: DTypeLike, columns: int, fix: str = COPY_AGAIN) -> NDArray[Any]:
    if not path.is_file():
        raise ValueError(
            f"{path} does not exist: check --data.path, --data.source and --data.train-days (the day after the last "
            "training day evaluates)"
        )
    return map_array(path, dtype, columns, fix=fix)


def map_members(path: Path, multi_hot_sizes: Sequence[int]) -> list[Ids]:
    """Memory-map the ids of a multi-hot file: one int32 [N, multi_hot_sizes[f]] for each feature."""
    if not path.is_file():
        raise ValueError(
            f"{path} does not exist: check --data.path and --data.train-days, or choose --data.source one_hot"
        )
    try:
        with zipfile.ZipFile(path) as archive:  # Reads only the directory at the file's end; knows zip64.
            infos = {info.filename: info for info in archive.infolist()}
    except zipfile.BadZipFile as error:
        raise ValueError(f"{path} is not a complete zip file ({error}): {COPY_AGAIN}") from error
    names = [f"{feature}.npy" for feature in range(len(multi_hot_sizes))]
    if odd := sorted(infos.keys() ^ set(names)):
        state = "unexpected" if odd[0] in infos else "missing"
        raise ValueError(
            f"{path}: expected the {len(names)} members 0.npy to {names[-1]}, found {len(infos)} ({odd[0]} {state}): "
            "--model.num-embeddings and --model.multi-hot-sizes need one number for each feature of the files"
        )
    fix = f"set --model.multi-hot-sizes as the files were made for, or {COPY_AGAIN}"
    return [
        map_array(path, np.int32, hot, fix=fix, member=name, span=member_span(path, infos[name]))
        for name, hot in zip(names, multi_hot_sizes, strict=True)
    ]


def write_multi_hot(path: Path, one_hot: Ids, multi_hot_sizes: Sequence[int], tables: ExpansionTables) -> None:
    """Write a day's multi-hot file from its 1-hot ids [N, features], each below its table's rows.

    Like numpy.savez of the expanded arrays, but in pieces: a whole feature never lies in memory.
    """

    def column(feature: int, start: int, stop: int) -> Ids:
        return one_hot[start:stop, feature]

    write_multi_hot_columns(path, len(one_hot), column, multi_hot_sizes, lambda: tables, lambda _: None)


def write_multi_hot_columns(
    path: Path,
    samples: int,
    column: Callable[[int, int, int], Ids],
    multi_hot_sizes: Sequence[int],
    open_tables: Callable[[], ExpansionTables],
    advance: Callable[[int], None],
) -> None:
    """Write a day's multi-hot file as write_multi_hot does, for ids that are not in memory.

    column: (feature, start, stop) to the feature's 1-hot ids of samples [start, stop), each below its table's rows.
    open_tables: called for each feature, so that no other feature's tables stay mapped. advance: called with the
    number of ids after each piece.
    """
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for feature, hot in enumerate(multi_hot_sizes):
            tables = open_tables()
            with archive.open(f"{feature}.npy", "w", force_zip64=True) as member:
                write_header(member, np.int32, (samples, hot))
                for start in range(0, samples, WRITE_CHUNK):
                    ids = column(feature, start, min(start + WRITE_CHUNK, samples))
                    block = np.empty((len(ids), hot), dtype=np.int32)
                    tables.expand(feature, ids, block)
                    member.write(block.data)
                    advance(len(ids))
