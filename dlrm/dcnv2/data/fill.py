"""Fills a directory with multi-hot day files for measurements: dlrm-bench data fill DIR --gb 20

Samples are like those of --data.source random: ids distributed and repeated like MLPerf's, with unpredictable labels.
Each day is written by a separate process, so that 20 GB take seconds; a planted set, which a model can learn, takes
hours.
"""

import math
import multiprocessing
import os
import sys
import zipfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro
from numpy.typing import NDArray

from dlrm_bench.dlrm.data.distributions import hashed_ids, log_counts, zipf_ids
from dlrm_bench.dlrm.data.npy import write_header
from dlrm_bench.dlrm.data.steps import step
from dlrm_bench.dlrm.data.workers import no_worker_killed
from dlrm_bench.dlrm.dcnv2.config import ModelConfig
from dlrm_bench.dlrm.dcnv2.data import criteo
from dlrm_bench.dlrm.dcnv2.data.manifest import Manifest, sole_writer
from dlrm_bench.dlrm.dcnv2.data.random_batches import CLICK_RATE
from dlrm_bench.dlrm.dcnv2.presets import training
from dlrm_bench.dlrm.runtime.command_line import exit_status
from dlrm_bench.dlrm.runtime.parsed import options_of

CHUNK = 1 << 16
"""Samples drawn at a time."""


@dataclass(kw_only=True, slots=True, frozen=True)
class FillConfig:
    """Day files of random samples."""

    directory: Annotated[Path, tyro.conf.Positional]
    """Directory to write; it must be empty or not exist."""
    preset: str = "mlperf-dcnv2"
    """The preset whose tables and multi-hot sizes the files fit."""
    table_scale: float | None = None
    """Factor on the preset's table rows, as --model.table-scale of the run; by default the preset's own."""
    gb: float = 20.0
    """Size of all files together."""
    days: int = 8
    """Number of equally large days; half of the last one evaluates (--data.train-days is one less)."""
    seed: int = 0
    """Seed of the samples."""
    skew: float = 1.05
    """Zipf exponent of each feature's first id, like --data.random-skew."""

    def __post_init__(self) -> None:
        if self.days < 2:
            raise ValueError(f"--days is {self.days}: choose at least 2, one to train and one to evaluate")
        if not 0 < self.gb < math.inf:
            raise ValueError(f"--gb is {self.gb}: choose a finite number above 0")
        if self.seed < 0:
            raise ValueError(f"--seed is {self.seed}: choose at least 0")
        if not 0 <= self.skew < math.inf:
            raise ValueError(f"--skew is {self.skew}: choose a finite number of at least 0")


def fill(config: FillConfig) -> Manifest:
    """Writes the files; ValueError if the directory is not empty."""
    run = training(config.preset)
    model = run.model if config.table_scale is None else replace(run.model, table_scale=config.table_scale)
    directory = config.directory
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ValueError(f"{directory} is not empty: name a directory that does not exist")
    samples = max(2, int(config.gb * 1e9 / config.days / (4 * (model.dense_in_features + 1 + model.ids_per_sample))))
    directory.mkdir(parents=True, exist_ok=True)
    with sole_writer(directory), step("fill", config.days, "days", 1) as advance:
        workers = min(config.days, os.cpu_count() or 1)
        fix = f"remove {directory}, and free memory or choose fewer --days, which are written at once"
        with no_worker_killed(fix), ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
            for done in as_completed(
                pool.submit(_write_day, config, model, day, samples) for day in range(config.days)
            ):
                done.result()
                advance(1)
        manifest = Manifest(
            parameters={"random": True, **{k: v for k, v in asdict(config).items() if k not in ("directory", "gb")}},
            rows=list(model.rows),
            multi_hot_sizes=list(model.multi_hot_sizes),
            dense_in_features=model.dense_in_features,
            samples_per_day=[samples] * config.days,
            train_samples=samples * (config.days - 1),
            eval_samples=(samples + 1) // 2,
            best_auc=None,
        )
        manifest.write(directory)
    return manifest


def _write_day(config: FillConfig, model: ModelConfig, day: int, samples: int) -> None:
    rng = np.random.Generator(np.random.SFC64([config.seed, day]))
    for path, dtype, columns, draw in (
        (criteo.dense_file(config.directory, day), np.float32, model.dense_in_features, partial(_dense, rng, model)),
        (criteo.labels_file(config.directory, day), np.int32, 1, partial(_labels, rng)),
    ):
        with path.open("wb") as file:
            write_header(file, dtype, (samples, columns))
            _write(file, samples, draw)
    with zipfile.ZipFile(criteo.multi_hot_file(config.directory, day), "w", zipfile.ZIP_STORED) as archive:
        for feature, hot in enumerate(model.multi_hot_sizes):
            with archive.open(f"{feature}.npy", "w", force_zip64=True) as member:
                write_header(member, np.int32, (samples, hot))
                _write(member, samples, partial(_ids, rng, model, feature, config.skew))


def _write(file: Any, samples: int, draw: Any) -> None:
    for start in range(0, samples, CHUNK):
        file.write(np.ascontiguousarray(draw(min(CHUNK, samples - start))).data)


def _dense(rng: np.random.Generator, model: ModelConfig, n: int) -> NDArray[np.float32]:
    return log_counts(rng, n, model.dense_in_features)


def _labels(rng: np.random.Generator, n: int) -> NDArray[np.int32]:
    return (rng.random((n, 1)) < CLICK_RATE).astype(np.int32)


def _ids(rng: np.random.Generator, model: ModelConfig, feature: int, skew: float, n: int) -> NDArray[np.int32]:
    rows = model.rows[feature]
    first = zipf_ids(rng, rows, skew, n)
    others = hashed_ids(first, model.multi_hot_sizes[feature] - 1, rows, salt=feature)
    return np.concatenate([first[:, None], others], axis=1)


def main(args: Sequence[str] | None = None) -> int:
    """Command line entry; returns the exit status."""
    return exit_status(lambda: _run(args))


def _run(args: Sequence[str] | None) -> int:
    config = options_of(FillConfig, args, "data fill", __doc__)
    manifest = fill(config)
    size = sum(file.stat().st_size for file in config.directory.iterdir())
    print(
        f"wrote {config.directory}: {size / 1e9:.2f} GB, {config.days} days of {manifest.samples_per_day[0]} samples; "
        f"read it with --data.source multi_hot --data.path {config.directory} --data.train-days {config.days - 1}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
