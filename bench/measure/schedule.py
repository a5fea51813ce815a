"""How many iterations a run has, and when it evaluates."""

from dataclasses import dataclass

from dlrm_bench.bench.config import RunConfig


@dataclass(kw_only=True, slots=True, frozen=True)
class Schedule:
    """Iterations of a run and MLPerf's cadence of evaluations, for one data set and one global batch size."""

    global_batch_size: int
    iterations: int
    evaluate_every: int | None
    """None where the run has no target."""
    iterations_per_epoch: float
    """Not rounded: MLPerf's epoch_num is samples seen over train samples. Random batches have no end: their epoch is
    the samples that the run is to see."""

    def epoch_num(self, iteration: int) -> float:
        """Fraction of the epoch that `iteration` iterations have seen."""
        return iteration / self.iterations_per_epoch

    def evaluates_after(self, iteration: int) -> bool:
        """Whether an evaluation follows: at the cadence, and after the last iteration whatever the cadence."""
        if self.evaluate_every is None:
            return False
        return iteration % self.evaluate_every == 0 or iteration == self.iterations


def plan_schedule(config: RunConfig, train_samples: int | None, world_size: int) -> Schedule:
    """The schedule of a run. ValueError, naming the flag, if the data set cannot fill the iterations asked for.

    train_samples: samples of one epoch; None for random batches.
    """
    global_batch_size = config.local_batch_size * world_size
    if train_samples is None:
        assert config.iterations is not None  # RunConfig sees to it
        return Schedule(
            global_batch_size=global_batch_size,
            iterations=config.iterations,
            evaluate_every=None,
            iterations_per_epoch=config.iterations,
        )
    per_epoch = train_samples // global_batch_size  # the last partial batch is dropped
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
    cadence = train_samples // (config.evaluations_per_epoch * global_batch_size)
    return Schedule(
        global_batch_size=global_batch_size,
        iterations=iterations,
        evaluate_every=max(1, cadence) if config.target_auc is not None else None,
        iterations_per_epoch=train_samples / global_batch_size,
    )
