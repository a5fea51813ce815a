"""The configuration of one run: model and data, pipeline, length, and output.

A field's docstring is its help text. Errors name the flag to change. Complete configurations live in presets.py.
"""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import tyro

from dlrm_bench.dlrm.benchmarks import named
from dlrm_bench.dlrm.config import DataT, ModelT, OptimizerT, TrainingConfig, require
from dlrm_bench.pipeline.static.options import StaticOptions
from dlrm_bench.pipeline.torchrec.options import FiveStageSwitches, TorchRecOptions

PipelineOptions = TorchRecOptions | FiveStageSwitches | StaticOptions

PIPELINES: Mapping[str, type[PipelineOptions]] = {
    options.name: options for options in (TorchRecOptions, FiveStageSwitches, StaticOptions)
}
"""The options of each pipeline, by the name that --pipeline takes."""


Division = Literal["closed", "open"]


@dataclass(kw_only=True, slots=True, frozen=True)
class MLPerfConfig:
    """The submission block of the MLPerf log."""

    org: str = "unaffiliated"
    """Submitting organisation."""
    division: Division = "open"
    """MLPerf division; closed fixes model, data, target and optimizer: another run is logged as open, with the
    reason."""
    status: Literal["onprem", "cloud", "research", "preview"] = "onprem"
    """Availability category."""
    platform: str | None = None
    """Name of the system; by default made from the machine's GPUs."""
    clear_cache: bool = False
    """Drop the page cache of every node before initialising, as submissions must (needs root)."""


@dataclass(kw_only=True, slots=True, frozen=True)
class CheckpointConfig:
    """Interval and folder of the checkpoints, from which --resume continues."""

    every: int | None = None
    """Number of iterations between checkpoints; without it, only the state before a non-finite loss is saved, if
    --checkpoint.path is given."""
    path: Path | None = None
    """Folder of checkpoints, shared by all nodes; the last complete checkpoint is kept."""

    def __post_init__(self) -> None:
        require(self.every is None or self.every > 0, "--checkpoint.every must be positive")
        require(
            self.every is None or self.path is not None,
            "--checkpoint.path is missing: --checkpoint.every saves to a folder",
        )


@dataclass(kw_only=True, slots=True, frozen=True)
class SnapshotConfig:
    """Interval and folder of snapshots in the node's memory, from which --resume auto continues within seconds."""

    every: int | None = None
    """Number of iterations between snapshots; each is written to --checkpoint.path, if given, in the background. With
    --dynamic-rows a snapshot has all places, those without a row too."""
    path: Path | None = None
    """Folder of snapshots, in memory (tmpfs); by default a folder of this user in /dev/shm. A successful run removes
    its snapshots, and the folder if nothing else is in it."""

    def __post_init__(self) -> None:
        require(self.every is None or self.every > 0, "--snapshot.every must be positive")
        require(self.path is None or self.every is not None, "--snapshot.path is of no use without --snapshot.every")

    @property
    def folder(self) -> Path | None:
        """The folder of snapshots; None where none are taken."""
        return None if self.every is None else self.path or Path(f"/dev/shm/dlrm-bench-{os.geteuid()}")


@dataclass(kw_only=True, slots=True, frozen=True)
class RunConfig(TrainingConfig[ModelT, DataT, OptimizerT]):
    """One run of the benchmark."""

    preset: str
    """Name of the preset that this configuration started from."""
    benchmark: tyro.conf.Suppress[str]
    """The benchmark that the preset belongs to."""
    pipeline: Annotated[PipelineOptions, tyro.conf.arg(name="")] = field(default_factory=TorchRecOptions)
    """The pipeline that trains, with its options."""
    mlperf: MLPerfConfig = field(default_factory=MLPerfConfig)
    iterations: int | None = None
    """Number of training iterations, warm-up included; by default as many as --min-time needs, or else one epoch."""
    min_time: float | None = None
    """Seconds of iterations after the warm-up at which training ends, unless the epoch ends first; applies without
    --iterations and --target-auc."""
    warmup_time: float | None = None
    """Minimum duration of the warm-up in seconds, reached by additional iterations; applies with --min-time. A GPU's
    power cap sets in after about one second."""
    max_time: float | None = None
    """Maximum seconds of timed iterations: training continues beyond --min-time until iterations are steady. Steady
    means that the medians of their eighths differ by 2 % at most, or by no more than chance."""
    warmup_iterations: int = 50
    """Number of first iterations, which the latency summary excludes; the raw times include them."""
    target_auc: float | None = None
    """Stop with success at the first evaluation that reaches this AUC; without it nothing is evaluated."""
    evaluations_per_epoch: int = 20
    """Evaluate every floor(train samples / (this * global batch)) iterations."""
    loss_interval: int = 100
    """Number of iterations between two reads of the losses; a non-finite loss stops every rank before any weight
    changes."""
    train_metrics: bool = False
    """Compute NE and calibration of the training batches on the device, over each --loss-interval; iterations.npz has
    all values, the record the last ones."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    snapshot: SnapshotConfig = field(default_factory=SnapshotConfig)
    resume: Path | None = None
    """Continue from this checkpoint, or from the one with the most samples in this folder. auto: from the snapshot or
    checkpoint with the most samples in --snapshot.path and --checkpoint.path, if there is one, as after a restart by
    torchrun --max-restarts. Checksums show damage, not who wrote a checkpoint."""
    stall_timeout: float | None = 60.0
    """Seconds without progress after which training ends on all ranks; ten times as many for each step of the startup,
    from the imports on, and for the first iteration. None: no limit."""
    results_dir: Path = Path("results")
    """Directory of records; the run makes one folder in it and never writes into an existing folder."""
    run_id: str | None = None
    """Name of this run's folder; by default date, machine and preset."""

    def __post_init__(self) -> None:
        TrainingConfig.__post_init__(self)
        benchmark = named(self.benchmark)
        require(
            self.pipeline.name in benchmark.pipelines,
            f"--pipeline {self.pipeline.name} does not train {self.preset}: choose one of "
            f"{', '.join(benchmark.pipelines)}",
        )
        self.pipeline.check(self)
        if isinstance(self.pipeline, StaticOptions) and benchmark.check_static is not None:
            benchmark.check_static(self, self.pipeline.dense)
        require(
            self.iterations is not None or self.min_time is not None or not self.data.is_random,
            "--iterations or --min-time is missing: random batches have no end",
        )
        require(
            self.min_time is None or 0 < self.min_time < math.inf,
            f"--min-time is {self.min_time}: give a positive number of seconds",
        )
        require(
            self.max_time is None or self.max_time < math.inf,
            f"--max-time is {self.max_time}: give a number of seconds, or leave it out",
        )
        require(
            self.max_time is None or (self.min_time is not None and self.max_time >= self.min_time),
            f"--max-time {self.max_time} ends a run that continues after --min-time ({self.min_time}): give it as much",
        )
        require(
            self.warmup_time is None or 0 <= self.warmup_time < math.inf, "--warmup-time must be a number of seconds"
        )
        require(self.iterations is None or self.iterations > 0, "--iterations must be positive")
        require(self.warmup_iterations >= 0, "--warmup-iterations must not be negative")
        require(
            self.iterations is None or self.warmup_iterations < self.iterations,
            f"--warmup-iterations ({self.warmup_iterations}) leaves nothing to time: keep it below "
            f"--iterations ({self.iterations})",
        )
        require(
            self.target_auc is None or 0.5 < self.target_auc < 1,
            f"--target-auc is {self.target_auc}: an AUC target lies between 0.5 and 1",
        )
        way_out = "choose a --data.source of files" if hasattr(self.data, "source") else "leave it out"
        require(
            self.target_auc is None or not self.data.is_random,
            f"--target-auc: random data have no evaluation samples: {way_out}",
        )
        require(self.evaluations_per_epoch > 0, "--evaluations-per-epoch must be positive")
        require(
            self.stall_timeout is None or 1 <= self.stall_timeout < math.inf,
            f"--stall-timeout is {self.stall_timeout}: give at least one second, or None for no limit",
        )
        require(self.loss_interval > 0, "--loss-interval must be positive")
        require(
            self.snapshot.every is None or self.checkpoint.every is None,
            "--checkpoint.every and --snapshot.every: choose one; snapshots are written to --checkpoint.path as well",
        )
        require(
            not self.resumes_newest or self.snapshot.every is not None or self.checkpoint.path is not None,
            "--resume auto looks for snapshots and checkpoints: give --snapshot.every or --checkpoint.path",
        )
        for flag, path in (
            ("--results-dir", self.results_dir),
            ("--data.path", self.data.path),
            ("--checkpoint.path", self.checkpoint.path),
            ("--snapshot.path", self.snapshot.path),
            ("--resume", self.resume),
            ("--run-id", self.run_id),
        ):
            require(
                _is_utf8(path), f"{flag} is {str(path)!a}, which is not UTF-8, as the record is: choose another name"
            )
        require(
            self.run_id is None or (self.run_id not in ("", ".", "..") and "/" not in self.run_id),
            f"--run-id is {self.run_id!r}: it names a folder, without slashes",
        )

    @property
    def resumes_newest(self) -> bool:
        """Whether --resume is auto."""
        return self.resume == Path("auto")


def _is_utf8(path: Path | str | None) -> bool:
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return False
    return True


def as_json(config: RunConfig) -> dict[str, Any]:
    """Returns the configuration as run.json holds it: tuples as lists, paths as text, the pipeline's name among its
    options."""
    resolved = cast(dict[str, Any], json.loads(json.dumps(asdict(config), default=str)))
    return resolved | {"pipeline": {"name": config.pipeline.name, **resolved["pipeline"]}}
