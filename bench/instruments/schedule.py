"""Number of iterations of a run, and when it evaluates."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from dlrm_bench.bench.config import RunConfig
from dlrm_bench.bench.stats.series import drift_within
from dlrm_bench.dlrm.benchmark import Evaluations
from dlrm_bench.dlrm.benchmarks import named
from dlrm_bench.dlrm.data.dataset import Dataset
from dlrm_bench.dlrm.runtime.ranks import Ranks

_EPOCH_BY_TIME = 1000  # iterations of random batches


@dataclass(kw_only=True, slots=True, frozen=True)
class Schedule:
    """Number of iterations of a run and MLPerf's cadence of evaluations, for one data set and one global batch size."""

    global_batch_size: int
    iterations: int
    """Number of iterations; in a run by time, the number before its first check of the clock."""
    evaluate_every: int | None
    """None if the run has no target."""
    first_evaluation: int = 0
    """First iteration that an evaluation may follow."""
    evaluates_last: bool = True
    """Whether a run with a target evaluates after its last iteration, whatever the cadence."""
    iterations_per_epoch: float
    """Iterations of an epoch, not rounded: MLPerf's epoch_num is samples seen over train samples. Random batches have
    no end: their epoch is the planned number of samples, and in a run by time a thousand iterations."""
    most: int = 1 << 40
    """Largest number of iterations that the data allow."""
    min_time_s: float | None = None
    """Minimum seconds of the iterations after the warm-up, in a run by time."""
    max_time_s: float | None = None
    """Maximum seconds for which such a run continues until it is steady; None if it ends in any case."""
    warmup_time_s: float = 0.0
    """Minimum seconds of the warm-up of such a run."""
    first: int = 0
    """Number of iterations of the checkpoint that the run resumes."""

    @property
    def last(self) -> int:
        """Largest number of iterations of any run of this schedule."""
        return self.iterations if self.min_time_s is None else self.most

    def resumed(self, first: int) -> "Schedule":
        """Returns the schedule of a run that resumes after `first` iterations; a run by time takes its time again.

        ValueError if a run to a target would end before its next evaluation.
        """
        if self.min_time_s is not None:
            return replace(self, first=first, iterations=min(first + self.iterations, self.most))
        if self.evaluate_every is not None and not self.evaluates_last:
            following = math.ceil(max(first + 1, self.first_evaluation) / self.evaluate_every) * self.evaluate_every
            if following > self.iterations:
                raise ValueError(
                    f"--target-auc: the next evaluation is after iteration {following}, and the run resumes after "
                    f"iteration {first} and ends after {self.iterations}: raise --iterations or leave it out"
                )
        return replace(self, first=first)

    def epoch_num(self, iteration: int) -> float:
        """Returns the fraction of the epoch after `iteration` iterations."""
        return iteration / self.iterations_per_epoch

    def evaluates_after(self, iteration: int) -> bool:
        """Whether an evaluation follows an iteration: at the cadence from the first evaluation on, and, if the
        benchmark's rules allow it, after the last iteration."""
        if self.evaluate_every is None:
            return False
        if iteration == self.iterations and self.evaluates_last:
            return True
        return iteration >= self.first_evaluation and iteration % self.evaluate_every == 0

    def warmup_of(self, latencies_ms: np.ndarray, warmup: int) -> int:
        """Returns the number of first iterations that are not timed, in a run with the latencies [n].

        It is `warmup`, or in a run by time the number that the warm-up's time takes, if that is larger; above n if that
        time has not passed.
        """
        if self.min_time_s is None or self.warmup_time_s == 0:
            return warmup
        elapsed_ms = np.cumsum(latencies_ms, dtype=np.float64)
        return max(warmup, int(np.searchsorted(elapsed_ms, 1000 * self.warmup_time_s)) + 1)

    def lacking(self, latencies_ms: np.ndarray, warmup: int) -> int:
        """Returns the number of iterations that a run by time still lacks, given its own `latencies_ms` [n]; 0 in other
        runs, and when complete.

        warmup: iterations of the warm-up, whatever their time. The number fills the remaining time at the median speed
        of the later half of the iterations, plus 5 %, so that one check of the clock in the warm-up nearly always
        suffices: the timed iterations are then one stretch. A run that is not steady continues for half as long again,
        so that its beginning weighs less.
        """
        if self.min_time_s is None:
            return 0
        done = len(latencies_ms)
        timed = latencies_ms[self.warmup_of(latencies_ms, warmup) :]
        timed_s = float(timed.sum()) / 1000
        remaining_s = self.min_time_s - timed_s
        if remaining_s <= 0:
            if self.max_time_s is None or timed_s >= self.max_time_s or _steady(timed):
                return 0
            remaining_s = min(timed_s / 2, self.max_time_s - timed_s)
        typical_ms = float(np.median(latencies_ms[done // 2 :]))
        warming_ms = 1000 * self.warmup_time_s - float(latencies_ms.sum())
        warming = max(0, warmup - done, math.ceil(warming_ms / typical_ms))
        more = math.ceil(1.05 * 1000 * remaining_s / typical_ms)
        return min(warming + more, self.most - self.first - done)


def _steady(latencies_ms: np.ndarray) -> bool:
    """Whether a series [n] is known to be steady: False if it is too short for the test."""
    drift = drift_within(latencies_ms)
    return drift is not None and drift.steady


def plan_schedule(
    config: RunConfig, train_samples: int | None, world_size: int, epoch_iterations: int | None = None
) -> Schedule:
    """Returns the schedule of a run. ValueError, naming the flag, if the data set cannot fill the requested iterations.

    train_samples: samples of one epoch; None for random batches. epoch_iterations: its number of global batches; by
    default the number that the samples fill.
    """
    global_batch_size = config.local_batch_size * world_size
    by_time = config.iterations is None and config.target_auc is None and config.min_time is not None
    first_look = max(1, config.warmup_iterations // 2)  # in the middle of the warm-up: checks stop before timing
    if train_samples is None:
        iterations = first_look if by_time else config.iterations
        assert iterations is not None  # RunConfig ensures it
        return Schedule(
            global_batch_size=global_batch_size,
            iterations=iterations,
            evaluate_every=None,
            iterations_per_epoch=_EPOCH_BY_TIME if by_time else iterations,
            min_time_s=config.min_time if by_time else None,
            max_time_s=config.max_time,
            warmup_time_s=config.warmup_time or 0.0,
        )
    # The last partial batch is dropped.
    per_epoch = train_samples // global_batch_size if epoch_iterations is None else epoch_iterations
    iterations = config.iterations or per_epoch
    if per_epoch == 0:
        raise ValueError(
            f"--local-batch-size {config.local_batch_size} on {world_size} rank(s) exceeds the {train_samples} "
            f"training samples of {config.data.path}: lower it"
        )
    if iterations > per_epoch:
        raise ValueError(
            f"--iterations {iterations} exceeds one epoch, {per_epoch} global batches of {global_batch_size} "
            "samples: lower it or leave it out"
        )
    if config.warmup_iterations >= iterations:
        raise ValueError(
            f"--warmup-iterations {config.warmup_iterations} leaves nothing to time of {iterations} iterations: "
            "lower it"
        )
    evaluations = named(config.benchmark).cadence(train_samples, global_batch_size, config.evaluations_per_epoch)
    _require_an_evaluation(config, evaluations, iterations, per_epoch, by_time)
    return Schedule(
        global_batch_size=global_batch_size,
        iterations=first_look if by_time else iterations,
        most=iterations,
        min_time_s=config.min_time if by_time else None,
        max_time_s=config.max_time,
        warmup_time_s=config.warmup_time or 0.0,
        evaluate_every=evaluations.every if config.target_auc is not None else None,
        first_evaluation=evaluations.first,
        evaluates_last=evaluations.at_end,
        iterations_per_epoch=train_samples / global_batch_size,
    )


def epoch_iterations(config: RunConfig, dataset: Dataset, ranks: Ranks) -> int | None:
    """Returns the number of global batches of an epoch, if the data set knows it: fewer than its samples would fill if
    each of several parts leaves some out."""
    if dataset.train_samples is None or dataset.train_samples < config.local_batch_size * ranks.world_size:
        return None
    batches = dataset.train_batches(ranks.rank, ranks.world_size, config.local_batch_size)
    return len(batches) if isinstance(batches, Sequence) else None


def _require_an_evaluation(
    config: RunConfig, evaluations: Evaluations, iterations: int, per_epoch: int, by_time: bool
) -> None:
    """Raises ValueError if a run to a target would end before its first evaluation, and no evaluation follows its last
    iteration. per_epoch: iterations that the data allow."""
    if config.target_auc is None or by_time or evaluations.at_end or iterations >= evaluations.first:
        return
    windows = getattr(config.data, "train_windows", None) if per_epoch < evaluations.first else None
    given = {"--iterations": config.iterations, "--data.train-windows": windows}
    ended_by = [flag for flag, value in given.items() if value is not None]
    way_out = f"leave {' and '.join(ended_by)} out" if ended_by else "lower --local-batch-size"
    raise ValueError(
        f"--target-auc {config.target_auc}: the first evaluation is after {evaluations.first} iterations, and the run "
        f"has {iterations}: {way_out}, or raise --evaluations-per-epoch"
    )
