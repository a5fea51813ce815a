"""Converts Criteo's raw days to MLPerf's files: dlrm-bench data preprocess RAW OUT

RAW holds day_0, day_1, ... (or day_0.gz, ...); the last day evaluates. OUT receives both of MLPerf's formats, 1-hot and
multi-hot, with a manifest of checksums. The files equal the reference's (mlcommons/training, recommendation_v2,
scripts/process_Criteo_1TB_Click_Logs_dataset.sh and materialize_synthetic_multihot_dataset.py), byte for byte; except
that the last day's 1-hot ids, which torchrec 1.8 leaves in 64 bits, have 32 like all others.

There are five steps, each resumable after a kill: parse the raw days; number each feature's hashes in the order of
their first appearance; find the shuffle of the training days; scatter rows to their destinations; and, day by day,
gather and write the rows. The first, fourth and fifth step resume after the last complete day, the second after the
last complete feature, the third from its beginning.

Memory does not grow with the rows of a day. The peak is the numbering of the largest feature's distinct hashes, 8 bytes
per slot of a hash table (dlrm/data/contiguous.py): 6.6 GB for Criteo's 293 million. Parsing takes 0.6 GB, finding the
shuffle of 4.2 billion rows 3.7, scattering 0.6, gathering 2.8. A frequency threshold above 1 also counts hashes, with
up to 7 GB more. In addition, writing multi-hot ids maps one feature's expansion table at a time, up to 16.0 GB of file
pages that the system drops if memory is short. With --workers N, N days or features are processed at a time, and their
memory adds up: by calculation, four workers number Criteo's largest features in up to 20 GB and gather in 11. Disk
space in addition to OUT's files: up to 185 bytes per row during the work, 0.8 TB for Criteo's days, and 24 GB for the
rows of the expansion tables that Criteo's ids reach, which small inputs do not keep. Estimates of disk space and time
are printed first, and too little space is an error.
"""

import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from dlrm_bench.dlrm.data.checksums import changed_files
from dlrm_bench.dlrm.data.paths import why_not
from dlrm_bench.dlrm.dcnv2.config import ModelConfig
from dlrm_bench.dlrm.dcnv2.data.disk_space import require_space
from dlrm_bench.dlrm.dcnv2.data.manifest import MARKER, Manifest, read_manifest, require_equal, sole_writer
from dlrm_bench.dlrm.dcnv2.data.preprocess_job import ANOTHER_OUT, SCRATCH, PreprocessJob
from dlrm_bench.dlrm.dcnv2.data.raw_tsv import DENSE_FIELDS, HASH_FIELDS, raw_days
from dlrm_bench.dlrm.dcnv2.presets import training
from dlrm_bench.dlrm.runtime.command_line import exit_status
from dlrm_bench.dlrm.runtime.parsed import options_of

VERSION = 1  # Raised when equal raw files would give other files.


@dataclass(kw_only=True, slots=True, frozen=True)
class PreprocessConfig:
    """Converts raw Criteo days to MLPerf's files."""

    raw: Annotated[Path, tyro.conf.Positional]
    """Directory of the raw days day_0, day_1, ..., plain or gzip (day_0.gz, ...)."""
    out: Annotated[Path, tyro.conf.Positional]
    """Directory to write; unfinished work in it is continued."""
    formats: Literal["both", "one_hot", "multi_hot"] = "both"
    """Ids to write: one per feature (160 bytes per sample), or the multi-hot sizes (912 bytes per sample)."""
    preset: str = "mlperf-dcnv2"
    """The preset whose tables and sizes the multi-hot ids fit."""
    table_scale: float | None = None
    """Factor on the preset's table rows, as --model.table-scale of the run; by default the preset's own."""
    frequency_threshold: int = 0
    """Hashes that appear less often share one id; with 0 or 1, none do (MLPerf: 0)."""

    workers: int = 1
    """Number of days, or features, processed at a time, in threads; each needs its own memory."""

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ValueError(f"--workers is {self.workers}: at least one is needed")
        if self.frequency_threshold < 0:
            raise ValueError(f"--frequency-threshold is {self.frequency_threshold}: choose 0 or more")


def preprocess(config: PreprocessConfig) -> tuple[Manifest, bool]:
    """Writes the files unless they already exist; returns their manifest, and whether anything was done.

    Raises ValueError if raw files are malformed, or the directory holds anything else.
    """
    run = training(config.preset)
    model = run.model if config.table_scale is None else replace(run.model, table_scale=config.table_scale)
    if (model.dense_in_features, model.num_features) != (DENSE_FIELDS, HASH_FIELDS):
        raise ValueError(
            f"--preset {config.preset} has {model.dense_in_features} dense and {model.num_features} categorical "
            f"features: choose one with the {DENSE_FIELDS} and {HASH_FIELDS} of Criteo's files"
        )
    if not config.raw.is_dir():
        raise ValueError(f"{config.raw} {why_not(config.raw)}: name the directory of the raw days day_0, day_1, ...")
    raw = raw_days(config.raw)
    if len(raw) < 2:
        raise ValueError(f"{config.raw} has one day only: at least two are needed, because the last one evaluates")
    _check_generated(config.raw, raw)
    parameters = _parameters(config, model, raw)
    if not (config.out / MARKER).exists():
        if manifest := read_manifest(config.out):
            require_equal(config.out, manifest.parameters, parameters, ANOTHER_OUT)
            return manifest, False
        if config.out.is_dir() and (odd := sorted(path.name for path in config.out.glob("day_*"))):
            raise ValueError(f"{config.out} holds {odd[0]}, which this program did not make: choose another OUT")
    estimate = require_space(config.out, raw, model, config.formats, config.workers)
    print(estimate, file=sys.stderr, flush=True)
    config.out.mkdir(parents=True, exist_ok=True)
    with sole_writer(config.out):
        if manifest := read_manifest(config.out):  # From a process that ended just before it removed its marker.
            require_equal(config.out, manifest.parameters, parameters, ANOTHER_OUT)
            shutil.rmtree(config.out / SCRATCH, ignore_errors=True)
            return manifest, False
        job = PreprocessJob(config.raw, raw, config.out, model, parameters, config.workers)
        return job.run(), True


def _check_generated(directory: Path, raw: Sequence[Path]) -> None:
    """Raises ValueError if the raw days are generated ones and have changed since."""
    if (directory / MARKER).exists():
        raise ValueError(f"{directory} holds an unfinished data set: finish 'dlrm-bench data generate' first")
    if manifest := read_manifest(directory):
        for finding in changed_files(directory, manifest.files, [path.name for path in raw]):
            raise ValueError(finding)


def _parameters(config: PreprocessConfig, model: ModelConfig, raw: Sequence[Path]) -> dict[str, Any]:
    """Returns the parameters that determine the files' content."""
    return {
        "preprocess_version": VERSION,
        "raw_bytes": [path.stat().st_size for path in raw],
        "frequency_threshold": config.frequency_threshold,
        "formats": config.formats,
        "rows": list(model.rows),
        "multi_hot_sizes": list(model.multi_hot_sizes),
    }


def main(args: Sequence[str] | None = None) -> int:
    """Command line entry; returns the exit status."""
    return exit_status(lambda: _run(args))


def _run(args: Sequence[str] | None) -> int:
    config = options_of(PreprocessConfig, args, "data preprocess", __doc__)
    manifest, done = preprocess(config)
    print(
        f"{'wrote' if done else 'nothing to do, complete with these parameters:'} {config.out}: "
        f"{len(manifest.samples_per_day)} days, {manifest.train_samples} training and {manifest.eval_samples} "
        "evaluation samples"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
