"""Generates day files whose best possible AUC is known: dlrm-bench data generate --preset smoke

A teacher with fixed weights gives each sample its probability, from which the label is drawn. A model that learns
approaches the teacher's own AUC, which the manifest contains; no model can be expected to exceed it. The same samples
are written in both formats, multi-hot and 1-hot; or, with --raw tsv, as days in Criteo's raw format, for `dlrm-bench
data preprocess`; or, with --raw-ids, multi-hot with ids that are any int64, for tables without a declared size.
"""

import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
import tyro
from numpy.typing import NDArray

from dlrm_bench.dlrm.data.checksums import Checksum, checksum
from dlrm_bench.dlrm.data.distributions import log_counts, zipf_ids
from dlrm_bench.dlrm.data.metrics import exact_auc
from dlrm_bench.dlrm.data.npy import write_header
from dlrm_bench.dlrm.dcnv2.config import ModelConfig
from dlrm_bench.dlrm.dcnv2.data import criteo, planted_tsv
from dlrm_bench.dlrm.dcnv2.data.expansion import ExpansionTables, open_expansion_tables
from dlrm_bench.dlrm.dcnv2.data.manifest import MANIFEST, MARKER, Manifest, read_manifest, require_equal, sole_writer
from dlrm_bench.dlrm.dcnv2.data.raw_tsv import DENSE_FIELDS, HASH_FIELDS
from dlrm_bench.dlrm.dcnv2.data.teacher import Teacher
from dlrm_bench.dlrm.dcnv2.presets import training
from dlrm_bench.dlrm.runtime.command_line import exit_status
from dlrm_bench.dlrm.runtime.parsed import options_of

CHUNK = 1 << 15  # Samples generated at a time.
MOST = 100  # Maximum of skew and signal: far beyond any use, yet nothing overflows.
GENERATOR_VERSION = 1  # Raised when equal parameters would give other files.
DAY_FILE = re.compile(r"day_\d+(|\.gz|_dense\.npy|_labels\.npy|_sparse\.npy|_sparse_multi_hot\.npz)")

Floats = NDArray[np.float32]
Ids = NDArray[np.int32]


@dataclass(kw_only=True, slots=True, frozen=True)
class PlantedConfig:
    """A data set with a known best AUC, for runs that train to a target AUC."""

    preset: str = "smoke"
    """The preset whose tables and multi-hot sizes the data fits."""
    table_scale: float | None = None
    """Factor on the preset's table rows, as --model.table-scale of the run; by default the preset's own."""
    path: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="[PATH]")] = None
    """Directory to write; by default the preset's --data.path."""
    days: int | None = None
    """Number of days to write, the last one for evaluation; by default the preset's --data.train-days plus one."""
    samples_per_day: int = 250_000
    """Samples of each day."""
    seed: int = 0
    """Seed of teacher and samples."""
    skew: float = 1.05
    """Zipf exponent of each feature's first id; 0 is uniform. The expansion tables determine the other ids."""
    signal: float = 2.0
    """Standard deviation of the teacher's logit; a larger one gives a higher best AUC."""
    base_rate: float = 0.25
    """Share of samples with label 1."""
    raw: Literal["tsv", "tsv.gz"] | None = None
    """Write days in Criteo's raw format instead, plain or gzip; the teacher then uses first ids only."""
    raw_ids: bool = False
    """Write ids that may be any int64, for --model.raw-ids, and only days of multi-hot ids."""
    overwrite: bool = False
    """Replace a data set that this program made with other parameters."""

    def __post_init__(self) -> None:
        # Half a day, rounded up, evaluates: the AUC of a single sample is undefined.
        for flag, least in (("samples_per_day", 3), ("days", 2), ("seed", 0)):
            value = getattr(self, flag)
            if value is not None and value < least:
                raise ValueError(f"--{flag.replace('_', '-')} is {value}: choose at least {least}")
        for flag, value in (("skew", self.skew), ("signal", self.signal)):
            if not 0 <= value <= MOST:
                raise ValueError(f"--{flag} is {value}: choose 0 <= {flag} <= {MOST}")
        if self.raw is not None and self.raw_ids:
            raise ValueError(f"--raw {self.raw}: Criteo's raw days have no --raw-ids: leave one of the two out")
        if not 0 < self.base_rate < 1:
            raise ValueError(f"--base-rate is {self.base_rate}: choose 0 < rate < 1")


def generate(config: PlantedConfig) -> tuple[Path, Manifest, bool]:
    """Writes the data set unless it exists; returns its directory, its manifest, and whether it was written.

    ValueError if the directory holds anything else: a data set with other parameters (without --overwrite), day files
    of unknown origin, or a running generator. Removes files of an interrupted generator. Needs about 120 bytes of
    memory per sample of a day.
    """
    run = training(config.preset)
    model = run.model if config.table_scale is None else replace(run.model, table_scale=config.table_scale)
    path = config.path or run.data.path
    if path is None:
        raise ValueError(f"name the directory to write: preset {config.preset} has none")
    days = config.days or run.data.train_days + 1
    if config.raw and (model.dense_in_features, model.num_features) != (DENSE_FIELDS, HASH_FIELDS):
        raise ValueError(
            f"--raw {config.raw}: Criteo's raw days have {DENSE_FIELDS} dense and {HASH_FIELDS} categorical features, "
            f"preset {config.preset} has {model.dense_in_features} and {model.num_features}: choose another --preset"
        )
    parameters = _parameters(config, model, days)
    if not (path / MARKER).exists():
        if manifest := _finished(path, parameters, config.overwrite):
            return path, manifest, False
        if read_manifest(path) is None and _day_files(path):
            raise ValueError(f"{path} holds day files that this program did not make: choose another PATH")
    path.mkdir(parents=True, exist_ok=True)
    with sole_writer(path):
        # Another generator may have finished in the meantime, or an interrupted one may have left only its marker.
        if manifest := _finished(path, parameters, config.overwrite):
            return path, manifest, False
        _clean(path)
        manifest = _write(path, config, model, days, parameters)
        manifest.write(path)
    return path, manifest, True


def _parameters(config: PlantedConfig, model: ModelConfig, days: int) -> dict[str, Any]:
    """Returns the parameters that determine the files' content."""
    return {
        "generator_version": GENERATOR_VERSION,
        "rows": list(model.rows),
        "multi_hot_sizes": list(model.multi_hot_sizes),
        "dense_in_features": model.dense_in_features,
        "days": days,
        **{name: getattr(config, name) for name in ("samples_per_day", "seed", "skew", "signal", "base_rate")},
        # Older sets, made before these flags existed, lack the keys.
        **({} if config.raw is None else {"raw": config.raw}),
        **({"raw_ids": True} if config.raw_ids else {}),
    }


def _finished(path: Path, parameters: dict[str, Any], overwrite: bool) -> Manifest | None:
    """Returns the manifest of the requested data set if complete; ValueError for another set that must not be lost."""
    manifest = read_manifest(path)
    if manifest is None or manifest.parameters == parameters:
        return manifest
    if overwrite:
        return None
    require_equal(path, manifest.parameters, parameters, "choose another PATH, or replace it with --overwrite")
    return manifest


def _day_files(path: Path) -> list[Path]:
    return [file for file in path.iterdir() if DAY_FILE.fullmatch(file.name)] if path.is_dir() else []


def _clean(path: Path) -> None:
    """Removes an earlier data set, the manifest first: without a manifest nothing looks complete."""
    (path / MANIFEST).unlink(missing_ok=True)
    for file in _day_files(path):
        file.unlink()


def _write(path: Path, config: PlantedConfig, model: ModelConfig, days: int, parameters: dict[str, Any]) -> Manifest:
    if config.raw:
        tables = ExpansionTables((None,) * model.num_features)
    else:
        tables = open_expansion_tables(path, model.rows, model.multi_hot_sizes)
    samples = config.samples_per_day
    teacher = Teacher(model.num_features, model.dense_in_features, config.seed)
    dense, one_hot = _draw(np.random.default_rng([config.seed, 2]), CHUNK, model, config.skew)
    teacher.calibrate(dense, _expand(one_hot, tables), signal=config.signal, base_rate=config.base_rate)
    eval_samples = (samples + 1) // 2
    probabilities = np.empty(samples, dtype=np.float32)
    labels = np.empty(0, dtype=np.int32)
    files: dict[str, Checksum] = {}
    for day in range(days):
        written, labels = _write_day(path, day, config, model, tables, teacher, probabilities)
        files |= {file.name: checksum(file) for file in written}
    if not 0 < labels[:eval_samples].sum() < eval_samples:
        enough = math.ceil(20 / min(config.base_rate, 1 - config.base_rate))
        raise ValueError(
            f"--samples-per-day is {samples}: all {eval_samples} evaluation samples have label {labels[0]}, so the AUC "
            f"is undefined; choose at least {enough}, or another --base-rate, --signal or --seed"
        )
    return Manifest(
        parameters=parameters,
        rows=list(model.rows),
        multi_hot_sizes=list(model.multi_hot_sizes),
        dense_in_features=model.dense_in_features,
        samples_per_day=[samples] * days,
        train_samples=samples * (days - 1),
        eval_samples=eval_samples,
        best_auc=exact_auc(torch.from_numpy(probabilities[:eval_samples]), torch.from_numpy(labels[:eval_samples])),
        files=files,
    )


def _write_day(
    path: Path,
    day: int,
    config: PlantedConfig,
    model: ModelConfig,
    tables: ExpansionTables,
    teacher: Teacher,
    probabilities: Floats,
) -> tuple[list[Path], NDArray[np.int32]]:
    """Writes one day and fills `probabilities` [samples_per_day] with the teacher's; returns its files and labels."""
    rng = np.random.default_rng([config.seed, 3, day])
    n = config.samples_per_day
    one_hot = np.empty((n, model.num_features), dtype=np.int32)
    labels = np.empty(n, dtype=np.int32)
    raw = planted_tsv.raw_file(path, day, config.raw == "tsv.gz")
    first = raw if config.raw else criteo.dense_file(path, day)
    with planted_tsv.open_raw(raw) if config.raw else first.open("wb") as file:
        if not config.raw:
            write_header(file, np.float32, (n, model.dense_in_features))
        for start in range(0, n, CHUNK):
            rows = slice(start, min(start + CHUNK, n))
            dense, one_hot[rows] = _draw(rng, rows.stop - start, model, config.skew)
            probabilities[rows] = teacher.probabilities(dense, _expand(one_hot[rows], tables))
            labels[rows] = rng.random(rows.stop - start, dtype=np.float32) < probabilities[rows]
            if config.raw:
                planted_tsv.write_lines(file, labels[rows], dense, one_hot[rows])
            else:
                file.write(dense.data)
    if config.raw:
        return [raw], labels
    arrays = {criteo.labels_file(path, day): labels[:, None]}
    if not config.raw_ids:
        arrays = {criteo.one_hot_file(path, day): one_hot} | arrays
    for file_path, array in arrays.items():
        with file_path.open("wb") as file:  # np.save would not report that the disk is full
            write_header(file, array.dtype, array.shape)
            file.write(array.data)
    multi_hot = criteo.multi_hot_file(path, day)
    criteo.write_multi_hot(multi_hot, one_hot, model.multi_hot_sizes, tables, config.raw_ids)
    return [first, *arrays, multi_hot], labels


def _draw(rng: np.random.Generator, n: int, model: ModelConfig, skew: float) -> tuple[Floats, Ids]:
    """Returns dense features [n, dense_in_features] and first ids [n, features]."""
    ids = np.stack([zipf_ids(rng, rows, skew, n) for rows in model.rows], axis=1)
    return log_counts(rng, n, model.dense_in_features), ids


def _expand(one_hot: Ids, tables: ExpansionTables) -> list[Ids]:
    sizes = (1 if table is None else table.shape[1] for table in tables.rows)
    blocks = [np.empty((len(one_hot), size), dtype=np.int32) for size in sizes]
    for feature, block in enumerate(blocks):
        tables.expand(feature, one_hot[:, feature], block)
    return blocks


def main(args: Sequence[str] | None = None) -> int:
    """Command line entry; returns the exit status."""
    return exit_status(lambda: _run(args))


def _run(args: Sequence[str] | None) -> int:
    config = options_of(PlantedConfig, args, "data generate", __doc__)
    path, manifest, written = generate(config)
    form = "raw" if config.raw else "multi-hot, raw ids" if config.raw_ids else "multi-hot and 1-hot"
    print(
        f"{'wrote' if written else 'nothing to do, complete with these parameters:'} {path}: "
        f"{len(manifest.samples_per_day)} days, {manifest.train_samples} training and {manifest.eval_samples} "
        f"evaluation samples, {form}\nbest AUC {manifest.best_auc:.5f}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
