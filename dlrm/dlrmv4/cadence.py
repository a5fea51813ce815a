"""MLPerf's evaluations of DLRMv4: on a grid of samples, from the first point on at which a run may have converged.

Source: ruleset 6.1.0 of mlperf-logging (compliance_checker/training_6.1.0/closed_dlrmv4.yaml), which follows the
reference (mlcommons/training, pull request 889).
"""

from dlrm_bench.dlrm.benchmark import Evaluations
from dlrm_bench.dlrm.dlrmv4.data.mlperf_checksums import TRAIN_SAMPLES


def cadence(train_samples: int, global_batch_size: int, evaluations: int) -> Evaluations:
    """Returns the iterations at which a run evaluates: every ceil(train_samples / evaluations / global batch)
    iterations, which is `evaluations` times per epoch of `train_samples` if counted from the beginning.

    The first evaluation is at the first grid point at which the reference's runs may have converged, by the reference's
    linear fit: floor((4480 * global batch + 135,331,840) / 3) samples. If an epoch has another number of samples than
    MLPerf's, as with generated data, the first evaluation is at the same share of the epoch. train_samples are those of
    all training windows, also in a run of the first of them (--data.train-windows).
    """
    every = -(-train_samples // (evaluations * global_batch_size))
    earliest = (4480 * global_batch_size + 135_331_840) // 3
    if train_samples != TRAIN_SAMPLES:
        earliest = earliest * train_samples // TRAIN_SAMPLES
    return Evaluations(every=every, first=max(1, -(-earliest // (every * global_batch_size))) * every, at_end=False)
