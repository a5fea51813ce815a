"""MLPerf's Criteo day files: checked when opened; their values are checked as they are read.

Day i of N samples is
    day_i_dense.npy              float32 (N, dense features), already log-transformed
    day_i_labels.npy             int32 (N, 1), 0 or 1
    day_i_sparse_multi_hot.npz   uncompressed zip of 0.npy, 1.npy, ...: int32 (N, hot), one for each feature, raw ids
                                 int64; or
    day_i_sparse.npy             int32 (N, features), one id per feature, to be expanded
(mlcommons/training, recommendation_v2/torchrec_dlrm). Every error about a file is a ValueError with file and member.
"""

import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from io import FileIO
from pathlib import Path

import numpy as np
from numpy.typing import DTypeLike, NDArray

from dlrm_bench.dlrm.data.distributions import raw_ids
from dlrm_bench.dlrm.data.npy import COPY_AGAIN, ArrayFile, RowFiles, member_span, open_array, write_header
from dlrm_bench.dlrm.data.paths import why_not
from dlrm_bench.dlrm.dcnv2.config import ModelConfig
from dlrm_bench.dlrm.dcnv2.data.expansion import FOLDER, ExpansionTables

WRITE_CHUNK = 1 << 16  # Samples.

Ids = NDArray[np.int32]
AnyIds = NDArray[np.int32] | NDArray[np.int64]


def dense_file(directory: Path, day: int) -> Path:
    """Returns the path of a day's dense features."""
    return directory / f"day_{day}_dense.npy"


def labels_file(directory: Path, day: int) -> Path:
    """Returns the path of a day's labels."""
    return directory / f"day_{day}_labels.npy"


def one_hot_file(directory: Path, day: int) -> Path:
    """Returns the path of a day's ids, one per feature."""
    return directory / f"day_{day}_sparse.npy"


def multi_hot_file(directory: Path, day: int) -> Path:
    """Returns the path of a day's ids, several per feature."""
    return directory / f"day_{day}_sparse_multi_hot.npz"


class Day(ABC):
    """One day, open for reading. Each subclass reads one of the two formats of ids."""

    def __init__(self, directory: Path, day: int, model: ModelConfig) -> None:
        self._model = model
        dense, labels = dense_file(directory, day), labels_file(directory, day)
        fix = f"set --model.dense-in-features, or {COPY_AGAIN}"
        self._dense = _open_file(dense, np.float32, model.dense_in_features, fix)
        self._labels = _open_file(labels, np.int32, 1)
        self.num_samples = len(self._dense)
        self._check_samples(self._labels)

    @abstractmethod
    def read(self, start: int, stop: int, memory: NDArray[np.uint8], positions: NDArray[np.int64]) -> None:
        """Reads samples [start, stop), n of them, as stored in the files. Thread-safe.

        memory: receives the arrays [n, columns] dense, labels and each feature's ids in turn, C-ordered, array i from
        byte positions[i] on, of [2 + features] positions. ValueError names a file that can no longer be read. Values
        are not checked: see check_values.
        """

    def check_values(
        self, start: int, dense: NDArray[np.float32], labels: NDArray[np.int32], ids: Sequence[AnyIds]
    ) -> None:
        """Checks every value of samples returned by `read`, starting with sample `start`.

        Raises ValueError with file, feature, value and sample for an id outside its table, a label other than 0 or 1,
        and a non-finite dense value.
        """
        finite = np.isfinite(dense)
        if not finite.all():
            row, column = np.argwhere(~finite)[0]
            raise ValueError(
                f"{self._dense.name}: dense feature {column} of sample {start + row} is {dense[row, column]}, which is "
                f"not finite: {COPY_AGAIN}"
            )
        is_label = (labels == 0) | (labels == 1)
        if not is_label.all():
            row = int(np.argmin(is_label))
            raise ValueError(
                f"{self._labels.name}: the label of sample {start + row} is {labels[row]}, neither 0 nor 1: "
                f"{COPY_AGAIN}"
            )
        self._check_ids(start, ids)

    @abstractmethod
    def _check_ids(self, start: int, ids: Sequence[AnyIds]) -> None: ...

    def _check_samples(self, array: ArrayFile) -> None:
        if len(array) != self.num_samples:
            raise ValueError(
                f"{array.name} has {len(array)} samples, but {Path(self._dense.name).name} has "
                f"{self.num_samples}: all files of a day must belong together; {COPY_AGAIN}"
            )


class MultiHotDay(Day):
    """A day whose ids are stored multi-hot."""

    def __init__(self, directory: Path, day: int, model: ModelConfig) -> None:
        super().__init__(directory, day, model)
        self._members = open_members(multi_hot_file(directory, day), model.multi_hot_sizes, model.raw_ids)
        for member in self._members:
            self._check_samples(member)
        self._rows = RowFiles([self._dense, self._labels, *self._members])

    def read(self, start: int, stop: int, memory: NDArray[np.uint8], positions: NDArray[np.int64]) -> None:
        """See Day.read."""
        assert 0 <= start < stop <= self.num_samples
        self._rows.read(start, stop - start, memory, positions)

    def _check_ids(self, start: int, ids: Sequence[AnyIds]) -> None:
        if self._model.raw_ids:
            return
        for feature, (member, rows, block) in enumerate(zip(self._members, self._model.rows, ids, strict=True)):
            outside = (block < 0) | (block >= rows)
            if outside.any():
                row, column = np.argwhere(outside)[0]
                where = f"{member.name}: id {block[row, column]} of sample {start + row} (feature cat_{feature}) is"
                if block[row, column] < 0:
                    raise ValueError(f"{where} negative: {COPY_AGAIN}")
                raise ValueError(
                    f"{where} outside its table of {rows} rows: choose the --model.num-embeddings and "
                    "--model.table-scale that the files were made for"
                )


class OneHotDay(Day):
    """A day whose ids are stored 1-hot.

    They are reduced modulo the table's rows and then expanded, both as in the reference (its
    scripts/materialize_synthetic_multihot_dataset.py), so these files work with any table_scale.
    """

    tables: ExpansionTables
    """The model's tables, to be set before reading; opening them can take minutes, so files are checked first."""

    def __init__(self, directory: Path, day: int, model: ModelConfig) -> None:
        super().__init__(directory, day, model)
        fix = f"give --model.num-embeddings one table for each feature of the files, or {COPY_AGAIN}"
        self._ids = _open_file(one_hot_file(directory, day), np.int32, model.num_features, fix)
        self._check_samples(self._ids)
        self._table_rows = np.asarray(model.rows, dtype=np.int32)
        self._rows = RowFiles([self._dense, self._labels])

    def read(self, start: int, stop: int, memory: NDArray[np.uint8], positions: NDArray[np.int64]) -> None:
        """See Day.read. Negative ids, which exist in no table, raise an error here."""
        assert 0 <= start < stop <= self.num_samples
        n = stop - start
        self._rows.read(start, n, memory, positions[:2])
        ids = np.empty((n, len(self._table_rows)), dtype=np.int32)
        self._ids.read(start, ids)
        if (
            ids.view(np.uint32) >= self._table_rows.view(np.uint32)
        ).any():  # As unsigned numbers, negative ones are large.
            if ids.min() < 0:
                row, feature = np.argwhere(ids < 0)[0]
                raise ValueError(
                    f"{self._ids.name}: id {ids[row, feature]} of sample {start + row} (feature cat_{feature}) is "
                    f"negative: {COPY_AGAIN}"
                )
            ids %= self._table_rows
        of_features = np.ascontiguousarray(ids.T)
        for feature, (hot, position) in enumerate(zip(self._model.multi_hot_sizes, positions[2:], strict=True)):
            block = memory[position : position + 4 * n * hot].view(np.int32).reshape(n, hot)
            self.tables.expand(feature, of_features[feature], block)

    def _check_ids(self, start: int, ids: Sequence[AnyIds]) -> None:
        for feature, (rows, block) in enumerate(zip(self._model.rows, ids, strict=True)):
            if (block.view(np.uint32) >= rows).any():
                raise ValueError(
                    f"the table that expands feature cat_{feature} is damaged: it holds ids outside [0, {rows}): "
                    f"remove the folder {FOLDER} beside the day files"
                )


def _open_file(path: Path, dtype: DTypeLike, columns: int, fix: str = COPY_AGAIN) -> ArrayFile:
    if not path.is_file():
        raise ValueError(
            f"{path} {why_not(path)}: check --data.path, --data.source and --data.train-days (the day after the last "
            "training day evaluates)"
        )
    return open_array(path, dtype, columns, fix=fix)


def open_members(path: Path, multi_hot_sizes: Sequence[int], raw_ids: bool = False) -> list[ArrayFile]:
    """Opens the ids of a multi-hot file: one int32 or, of raw ids, int64 [N, multi_hot_sizes[f]] for each feature."""
    if not path.is_file():
        raise ValueError(
            f"{path} {why_not(path)}: check --data.path and --data.train-days, or choose --data.source one_hot"
        )
    try:
        with zipfile.ZipFile(path) as archive:  # Reads only the directory at the file's end; knows zip64.
            infos = {info.filename: info for info in archive.infolist()}
    except (zipfile.BadZipFile, NotImplementedError) as error:  # the latter where a damaged byte asks for a later zip
        raise ValueError(f"{path} is not a complete zip file ({error}): {COPY_AGAIN}") from error
    names = [f"{feature}.npy" for feature in range(len(multi_hot_sizes))]
    if odd := sorted(infos.keys() ^ set(names)):
        state = "unexpected" if odd[0] in infos else "missing"
        raise ValueError(
            f"{path}: expected the {len(names)} members 0.npy to {names[-1]}, found {len(infos)} ({odd[0]} {state}): "
            "give --model.num-embeddings and --model.multi-hot-sizes one number for each feature of the files"
        )
    fix = f"set --model.multi-hot-sizes that the files were made for, or {COPY_AGAIN}"
    dtype, convert = np.int64 if raw_ids else np.int32, "convert it with numpy's astype"
    if not raw_ids:
        convert += ", or add --model.raw-ids if ids may be any int64"
    file = FileIO(path)  # Shared by all members: 24 days of 26 files each could exceed a process's open-file limit.
    return [
        open_array(
            path, dtype, hot, fix=fix, member=name, span=member_span(path, infos[name]), file=file, convert=convert
        )
        for name, hot in zip(names, multi_hot_sizes, strict=True)
    ]


def write_multi_hot(
    path: Path, one_hot: Ids, multi_hot_sizes: Sequence[int], tables: ExpansionTables, raw: bool = False
) -> None:
    """Writes a day's multi-hot file from its 1-hot ids [N, features], each below its table's rows. raw: with raw ids of
    these rows.

    Writes the same format as numpy.savez, but in pieces: a whole feature is never in memory.
    """

    def column(feature: int, start: int, stop: int) -> Ids:
        return one_hot[start:stop, feature]

    write_multi_hot_columns(path, len(one_hot), column, multi_hot_sizes, lambda: tables, lambda _: None, raw)


def write_multi_hot_columns(
    path: Path,
    samples: int,
    column: Callable[[int, int, int], Ids],
    multi_hot_sizes: Sequence[int],
    open_tables: Callable[[], ExpansionTables],
    advance: Callable[[int], None],
    raw: bool = False,
) -> None:
    """Writes a day's multi-hot file, like write_multi_hot, from ids that are not in memory.

    column: (feature, start, stop) to the feature's 1-hot ids of samples [start, stop), each below its table's rows.
    open_tables: called for each feature, so that other features' tables do not stay mapped. advance: called after each
    piece with its number of ids. raw: as for write_multi_hot.
    """
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for feature, hot in enumerate(multi_hot_sizes):
            tables = open_tables()
            with archive.open(f"{feature}.npy", "w", force_zip64=True) as member:
                write_header(member, np.int64 if raw else np.int32, (samples, hot))
                for start in range(0, samples, WRITE_CHUNK):
                    ids = column(feature, start, min(start + WRITE_CHUNK, samples))
                    block = np.empty((len(ids), hot), dtype=np.int32)
                    tables.expand(feature, ids, block)
                    assert (block[:, 0] == ids).all(), "an id exceeds its table's kept rows"
                    member.write(raw_ids(block, salt=feature).data if raw else block.data)
                    advance(len(ids))
