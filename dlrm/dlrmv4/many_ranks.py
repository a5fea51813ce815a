"""A training of DLRMv4 on many ranks, from samples that were measured on few; see benchmark.ManyRanks.

Rows and balance are by counts of generated data (12,000 users, windows 20 to 260) at 128 and 1,024 samples on each of 2
to 64 ranks. Lengths during a run are those that the reference's logs show early and late.
"""

import numpy as np

from dlrm_bench.dlrm.benchmark import ManyRanks, SampleSizes, ToTarget
from dlrm_bench.dlrm.config import TrainingConfig
from dlrm_bench.dlrm.dlrmv4 import counts, work
from dlrm_bench.dlrm.dlrmv4.cadence import cadence
from dlrm_bench.dlrm.dlrmv4.config import DataConfig, ModelConfig
from dlrm_bench.dlrm.dlrmv4.counts import EARLY, LATER, Lengths
from dlrm_bench.dlrm.dlrmv4.data.mlperf_checksums import EVAL_SAMPLES, TRAIN_SAMPLES
from dlrm_bench.dlrm.dlrmv4.presets import MLPERF_EVALUATIONS
from dlrm_bench.dlrm.dlrmv4.ruleset import REFERENCE_CONVERGENCE

_ROWS_GROW = {"stride": 0.73, "users": 0.3}
"""A rank's distinct rows grow with this power of the number of ranks, by --data.deal: by stride a rank has samples of
all users of the global batch. Counts are within a third of it (stride) and within a factor of 2.3 (users)."""
_IMBALANCE = 0.02
"""Counts, means of four batches: 0.0 to 1.9 % with either dealing."""
ASSUMED = (
    "Assumed: a run trains on as many samples as the reference needs at its global batch, by the convergence points, "
    f"and evaluates {EVAL_SAMPLES:,} samples from the first point on that the rules ask for. The operations of its "
    f"samples are the mean of those at {EARLY.mean:,.0f} tokens, early in a run, and at {LATER.mean:,.0f}, near the "
    "target; evaluations have the latter. Rows of many ranks, and 2 % more operations of the most loaded rank, are by "
    "counts of generated data. AMD counted 50,000 rows for 1,024 samples on four ranks, 1.7 times what follows from "
    "record 66."
)


def many_ranks(config: TrainingConfig, sizes: SampleSizes, measured_on: int, ranks: int) -> ManyRanks:
    """Returns the figures for `ranks` ranks of config.local_batch_size samples. ValueError if the dense network or the
    histories are not MLPerf's: only of those are lengths during a run known."""
    model, data = config.model, config.data
    assert isinstance(model, ModelConfig)
    assert isinstance(data, DataConfig)
    mlperf = ModelConfig()
    if (counts.dense_weights(model), model.max_history) != (counts.dense_weights(mlperf), mlperf.max_history):
        raise ValueError(
            "scale knows the histories of a run to the target for MLPerf's dense network alone: give a record of "
            "--preset mlperf-dlrmv4, dlrmv4-two-gpus or dlrmv4-one-gpu"
        )
    measured = work.flop_per_sample(config, sizes)
    return ManyRanks(
        rows=(ranks / measured_on) ** _ROWS_GROW[data.deal],
        imbalance=_IMBALANCE if ranks > 1 else 0.0,
        of_run=(_flop(model, EARLY) + _flop(model, LATER)) / 2 / measured,
        of_evaluation=_flop(model, LATER, trained=False) / measured,
        evaluated=EVAL_SAMPLES,
        to_target=_to_target(ranks * config.local_batch_size),
        assumed=ASSUMED,
    )


def _flop(model: ModelConfig, lengths: Lengths, trained: bool = True) -> float:
    """Returns the necessary operations of a sample; content counts as free, of distinct items it is a thousandth."""
    flop = counts.flop_per_sample(model, lengths, trained=trained, last_layer_candidates=True, content_rows=0.0)
    return flop.total


def _to_target(global_batch_size: int) -> ToTarget | None:
    batches = [*REFERENCE_CONVERGENCE]
    if not batches[0] <= global_batch_size <= batches[-1]:
        return None
    samples = float(np.interp(global_batch_size, batches, [*REFERENCE_CONVERGENCE.values()]))
    points = cadence(TRAIN_SAMPLES, global_batch_size, MLPERF_EVALUATIONS)
    skipped = points.first // points.every - 1
    return ToTarget(samples, samples / (points.every * global_batch_size) - skipped, skipped)
