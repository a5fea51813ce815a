"""The five steps of preprocessing, each resumable after a kill: see preprocess.py."""

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlrm_bench.dlrm.data.checksums import Checksum, checksum
from dlrm_bench.dlrm.data.contiguous import FIRST_ID, Numbering, ids_of_numbers
from dlrm_bench.dlrm.data.npy import write_header
from dlrm_bench.dlrm.data.steps import Advance, step
from dlrm_bench.dlrm.data.workers import run_all
from dlrm_bench.dlrm.dcnv2.config import ModelConfig
from dlrm_bench.dlrm.dcnv2.data import criteo
from dlrm_bench.dlrm.dcnv2.data.expansion import ExpansionTables, open_expansion_tables
from dlrm_bench.dlrm.dcnv2.data.manifest import Manifest, read_manifest, require_equal
from dlrm_bench.dlrm.dcnv2.data.permutation import write_destinations
from dlrm_bench.dlrm.dcnv2.data.raw_tsv import DENSE_FIELDS, HASH_FIELDS, read_blocks
from dlrm_bench.dlrm.dcnv2.data.shuffled_rows import BUCKET_ROWS, COLUMNS, Words, gather_range, remove_gathered, scatter

SHUFFLE_SEED = 0  # The reference's.
ROWS_AT_ONCE = 1 << 20
SCRATCH = "preprocess.partial"
ANOTHER_OUT = "choose another OUT, or remove it"
"""Remedy if OUT holds other data."""


class PreprocessJob:
    """The work and its state on disk, in OUT/preprocess.partial; a file or folder with its final name is complete."""

    def __init__(
        self,
        raw_directory: Path,
        raw: list[Path],
        out: Path,
        model: ModelConfig,
        parameters: dict[str, Any],
        workers: int = 1,
    ) -> None:
        """raw: the files of the days. parameters: determine the files' content; must equal those of earlier runs.

        workers: number of days or features processed at a time.
        """
        self._raw_directory, self._raw, self._out, self._model = raw_directory, raw, out, model
        self._parameters = parameters
        self._threshold: int = parameters["frequency_threshold"]
        self._formats: str = parameters["formats"]
        self._scratch = out / SCRATCH
        self._workers = workers
        self._removal = Lock()
        self._days, self._last = range(len(raw)), len(raw) - 1
        state = parameters | {"bucket_rows": BUCKET_ROWS}
        if (self._scratch / "parameters.json").exists():
            require_equal(self._scratch, _read_json(self._scratch / "parameters.json"), state, ANOTHER_OUT)
        elif odd := sorted(path.name for path in self._out.glob("day_*")):
            raise ValueError(f"{self._out} holds {odd[0]}, which this program did not make: choose another OUT")
        for folder in ("parsed", "parsed_days", "ids", "scattered", "written_days"):
            (self._scratch / folder).mkdir(parents=True, exist_ok=True)
        _write_json(self._scratch / "parameters.json", state)

    def run(self) -> Manifest:
        """Runs all five steps; returns the manifest, and removes all intermediate files."""
        with step("1/5 parse", sum(path.stat().st_size for path in self._raw), "MB") as advance:
            run_all(self._parse, self._days, advance, self._workers)
        self._facts = [_read_json(self._scratch / "parsed_days" / f"{day}.json") for day in self._days]
        self._rows: list[int] = [facts["rows"] for facts in self._facts]
        self._train_rows = sum(self._rows[:-1])
        with step("2/5 number hashes", sum(self._rows) * HASH_FIELDS, "M ids") as advance:
            run_all(self._number, range(HASH_FIELDS), advance, self._workers)
        with step("3/5 shuffle", self._train_rows, "M rows") as advance:
            if (self._scratch / "destinations.u32").exists():
                advance(self._train_rows)
            else:
                write_destinations(self._scratch / "destinations.u32", self._train_rows, SHUFFLE_SEED, advance)
        with step("4/5 scatter rows", self._train_rows, "M rows") as advance:
            run_all(self._scatter, self._days[:-1], advance, self._workers)
        if self._formats != "one_hot":
            self._open_tables()  # now, so that they are drawn only once, for any number of workers
        with step("5/5 write days", sum(self._rows), "M rows") as advance:
            run_all(self._write, self._days, advance, self._workers)
        return self._finish()

    def _finish(self) -> Manifest:
        files: dict[str, Checksum] = {}
        for day in self._days:
            for name, sums in _read_json(self._scratch / "written_days" / f"{day}.json").items():
                files[name] = Checksum(**sums)
        generated = read_manifest(self._raw_directory)
        manifest = Manifest(
            parameters=self._parameters,
            rows=list(self._model.rows),
            multi_hot_sizes=list(self._model.multi_hot_sizes),
            dense_in_features=DENSE_FIELDS,
            samples_per_day=self._rows,
            train_samples=self._train_rows,
            eval_samples=(self._rows[-1] + 1) // 2,
            best_auc=generated.best_auc if generated else None,
            files=files,
        )
        manifest.write(self._out)
        shutil.rmtree(self._scratch)
        return manifest

    def _parse(self, day: int, advance: Advance) -> None:
        facts = self._scratch / "parsed_days" / f"{day}.json"
        if facts.exists():
            advance(self._raw[day].stat().st_size)
            return
        partial = _fresh(self._scratch / "parsed" / f"{day}.partial")
        names = ["labels", "dense", *(f"cat_{feature}" for feature in range(HASH_FIELDS))]
        files = [(partial / name).open("wb") for name in names]
        rows, smallest, largest, file_bytes = 0, np.iinfo(np.int32).max, np.iinfo(np.int32).min, 0
        try:
            for block in read_blocks(self._raw[day]):
                for file, column in zip(files, [block.labels, block.dense, *block.hashes], strict=True):
                    file.write(column.data)
                rows += len(block.labels)
                smallest, largest = min(smallest, int(block.dense.min())), max(largest, int(block.dense.max()))
                advance(block.file_bytes - file_bytes)
                file_bytes = block.file_bytes
        finally:
            for file in files:
                file.close()
        if largest - smallest + 2 >= 2**31:
            raise ValueError(
                f"{self._raw[day]}: its integers range from {smallest} to {largest}: for log(x - smallest + 2) their "
                "difference must fit in 32 bits; correct the line that holds one of them"
            )
        _replace(partial, self._scratch / "parsed" / str(day))
        _write_json(facts, {"rows": rows, "smallest": smallest})

    def _number(self, feature: int, advance: Advance) -> None:
        folder = self._scratch / "ids" / f"cat_{feature}"
        if folder.exists():
            advance(sum(self._rows))
        else:
            partial = _fresh(folder.with_suffix(".partial"))
            numbering, threshold, largest = Numbering(), self._threshold, 0
            counts = np.zeros(2, dtype=np.int64)
            for day in self._days:
                with (partial / str(day)).open("wb") as file:
                    for hashes in _pieces(self._parsed(day, f"cat_{feature}"), np.uint32):
                        numbers = numbering.number(hashes)
                        if threshold > 1:
                            if numbering.distinct >= len(counts):
                                grown = np.zeros(2 * numbering.distinct, dtype=np.int64)
                                grown[: len(counts)] = counts
                                counts = grown
                            np.add.at(counts, numbers, 1)
                        else:
                            numbers += np.uint32(FIRST_ID - 1)
                        file.write(numbers.data)
                        advance(len(hashes))
            if threshold > 1:
                ids = ids_of_numbers(counts[: numbering.distinct + 1], threshold)
                largest = int(ids.max())
                for day in self._days:
                    with (partial / "mapped").open("wb") as file:
                        for numbers in _pieces(partial / str(day), np.uint32):
                            file.write(ids[numbers].data)
                    (partial / "mapped").replace(partial / str(day))
            else:
                largest = numbering.distinct + FIRST_ID - 1
            _write_json(partial / "largest.json", largest)
            _replace(partial, folder)
        for day in self._days:
            self._parsed(day, f"cat_{feature}").unlink(missing_ok=True)

    def _scatter(self, day: int, advance: Advance) -> None:
        folder = self._scratch / "scattered" / str(day)
        if not folder.exists():
            partial = _fresh(folder.with_suffix(".partial"))
            with (self._scratch / "destinations.u32").open("rb") as file:
                file.seek(4 * sum(self._rows[:day]))
                for rows in self._parsed_rows(day):
                    scatter(partial, rows, np.fromfile(file, dtype=np.uint32, count=len(rows)))
                    advance(len(rows))
            _replace(partial, folder)
        else:
            advance(self._rows[day])
        self._remove_parsed(day)

    def _write(self, day: int, advance: Advance) -> None:
        written = self._scratch / "written_days" / f"{day}.json"
        end = sum(self._rows[: day + 1])
        folders = [self._scratch / "scattered" / str(source) for source in self._days[:-1]]
        if not written.exists():
            pieces = (
                self._parsed_rows(day)
                if day == self._last
                else gather_range(folders, end - self._rows[day], end, self._train_rows)
            )
            paths = self._write_day(day, pieces, advance)
            sums = {path.name: asdict(checksum(path.with_name(f"{path.name}.partial"))) for path in paths}
            for path in paths:
                path.with_name(f"{path.name}.partial").replace(path)
            _write_json(written, sums)
        else:
            advance(self._rows[day])
        if day == self._last:
            self._remove_parsed(day)
        else:
            self._remove_gathered(folders)

    def _remove_gathered(self, folders: list[Path]) -> None:
        """Removes the buckets of written days, except the bucket that the last written day shares with the first
        unwritten one."""
        with self._removal:
            written = 0
            while written < self._last and (self._scratch / "written_days" / f"{written}.json").exists():
                written += 1
            remove_gathered(folders, sum(self._rows[:written]))

    def _write_day(self, day: int, pieces: Iterator[Words], advance: Advance) -> list[Path]:
        """Writes a day's files with the suffix .partial; returns their final names."""
        rows, formats = self._rows[day], self._formats
        dense, labels = criteo.dense_file(self._out, day), criteo.labels_file(self._out, day)
        one_hot, multi_hot = criteo.one_hot_file(self._out, day), criteo.multi_hot_file(self._out, day)
        columns = self._scratch / f"columns_{day}"
        ends = DENSE_FIELDS, DENSE_FIELDS + HASH_FIELDS
        with (
            dense.with_name(f"{dense.name}.partial").open("wb") as dense_file,
            labels.with_name(f"{labels.name}.partial").open("wb") as labels_file,
            one_hot.with_name(f"{one_hot.name}.partial").open("wb") as one_hot_file,
            columns.open("wb") as columns_file,
        ):
            write_header(dense_file, np.float32, (rows, DENSE_FIELDS))
            write_header(labels_file, np.int32, (rows, 1))
            write_header(one_hot_file, np.int32, (rows, HASH_FIELDS))
            done = 0
            for piece in (part for whole in pieces for part in _split(whole)):
                ids = piece[:, ends[0] : ends[1]].view(np.int32)
                dense_file.write(np.ascontiguousarray(piece[:, : ends[0]]).data)
                labels_file.write(np.ascontiguousarray(piece[:, ends[1]]).data)
                if formats != "multi_hot":
                    one_hot_file.write(np.ascontiguousarray(ids).data)
                if formats != "one_hot":
                    # By feature, like a zip file's members, and folded as in the reference.
                    for feature, table_rows in enumerate(self._model.rows):
                        columns_file.seek(4 * (feature * rows + done))
                        columns_file.write((ids[:, feature] % np.int32(table_rows)).data)
                done += len(piece)
                advance(len(piece) * (1.0 if formats == "one_hot" else 0.5))
        paths = [dense, labels]
        if formats == "multi_hot":
            one_hot.with_name(f"{one_hot.name}.partial").unlink()
        else:
            paths.append(one_hot)
        if formats != "one_hot":
            with columns.open("rb") as file:

                def column(feature: int, start: int, stop: int) -> criteo.Ids:
                    file.seek(4 * (feature * rows + start))
                    return np.fromfile(file, dtype=np.int32, count=stop - start)

                criteo.write_multi_hot_columns(
                    multi_hot.with_name(f"{multi_hot.name}.partial"),
                    rows,
                    column,
                    self._model.multi_hot_sizes,
                    self._open_tables,
                    lambda ids: advance(0.5 * ids / HASH_FIELDS),
                )
            paths.append(multi_hot)
        columns.unlink()
        return paths

    def _open_tables(self) -> ExpansionTables:
        """Maps the tables, whole or, if ids do not reach their last rows, only the rows that ids reach."""
        rows, sizes = self._model.rows, self._model.multi_hot_sizes
        kept = [self._rows_reached(feature) if size > 1 else rows[feature] for feature, size in enumerate(sizes)]
        if kept == list(rows):
            return open_expansion_tables(self._out, rows, sizes)
        return open_expansion_tables(self._scratch, rows, sizes, kept)

    def _rows_reached(self, feature: int) -> int:
        """Returns the number of first rows of a table that covers all of the feature's ids."""
        path = self._scratch / "ids" / f"cat_{feature}" / "largest.json"
        if not path.exists():  # started by an earlier version
            return self._model.rows[feature]
        largest = int(_read_json(path))
        rounded = int(np.float32(largest))  # training ids are rounded: see _parsed_rows
        return min(self._model.rows[feature], max(largest, rounded) + 1)

    def _parsed(self, day: int, name: str) -> Path:
        return self._scratch / "parsed" / str(day) / name

    def _parsed_rows(self, day: int) -> Iterator[Words]:
        """Yields a day's rows in raw-file order, each piece [n, COLUMNS], as the reference has them before shuffling.

        The reference shuffles all columns as float32, and so rounds training ids past 2^24 to multiples of 2, 4, ...
        """
        smallest = np.int32(self._facts[day]["smallest"])
        ids = [_pieces(self._scratch / "ids" / f"cat_{feature}" / str(day), np.int32) for feature in range(HASH_FIELDS)]
        labels = _pieces(self._parsed(day, "labels"), np.int32)
        for dense, label, *features in zip(
            _pieces(self._parsed(day, "dense"), np.int32, DENSE_FIELDS), labels, *ids, strict=True
        ):
            rows = np.empty((len(label), COLUMNS), dtype=np.uint32)
            rows[:, :DENSE_FIELDS] = log_dense(dense.reshape(-1, DENSE_FIELDS), smallest).view(np.uint32)
            for feature, column in enumerate(features, start=DENSE_FIELDS):
                rows[:, feature] = column if day == self._last else column.astype(np.float32).astype(np.int32)
            rows[:, -1] = label
            yield rows

    def _remove_parsed(self, day: int) -> None:
        shutil.rmtree(self._scratch / "parsed" / str(day), ignore_errors=True)
        for feature in range(HASH_FIELDS):
            (self._scratch / "ids" / f"cat_{feature}" / str(day)).unlink(missing_ok=True)


def log_dense(dense: NDArray[np.int32], smallest: np.int32) -> NDArray[np.float32]:
    """Returns log(x - smallest + 2) of a day's integers, `smallest` their minimum (BinaryCriteoUtils.tsv_to_npys)."""
    return np.log(dense - (smallest - 2), dtype=np.float32)


def _pieces(path: Path, dtype: type[np.generic], columns: int = 1) -> Iterator[NDArray[Any]]:
    """Yields a file of raw numbers, ROWS_AT_ONCE rows at a time."""
    with path.open("rb") as file:
        while len(piece := np.fromfile(file, dtype=dtype, count=ROWS_AT_ONCE * columns)):
            yield piece


def _split(rows: Words) -> Iterator[Words]:
    return (rows[start : start + ROWS_AT_ONCE] for start in range(0, len(rows), ROWS_AT_ONCE))


def _fresh(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def _replace(partial: Path, final: Path) -> None:
    shutil.rmtree(final, ignore_errors=True)  # A day whose facts were not yet written is parsed again.
    os.replace(partial, final)


def _write_json(path: Path, content: Any) -> None:
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(content, indent=1) + "\n")
    partial.replace(path)


def _read_json(path: Path) -> Any:
    return json.loads(path.read_text())
