"""Published MLPerf results, for comparison with ours."""

from typing import NamedTuple

BENCHMARK = "dlrm_dcnv2"
"""The benchmark of all of them, as MLPerf's logs name it."""


class Published(NamedTuple):
    """A published MLPerf result, from its logs: ms per iteration is train only."""

    system: str
    source: str
    global_batch_size: int
    ms_per_iteration: float
    minutes: float


PUBLISHED = (
    Published("8 x H200", "HugeCTR, NVIDIA v4.0", 55296, 3.25, 3.47),
    Published("8 x H200", "HugeCTR, HPE v5.0", 65536, 3.71, 3.44),
    Published("8 x H100", "HugeCTR, NVIDIA v4.0", 55296, 3.53, 3.84),
    Published("8 x B200", "HugeCTR, NVIDIA v5.0", 55296, 2.15, 2.26),
    Published("64 x H100", "HugeCTR, NVIDIA v4.1", 135168, 2.35, 1.32),
    Published("128 x H100", "HugeCTR, NVIDIA v4.1", 135168, 1.77, 0.94),
    Published("64 x GB200", "HugeCTR, Supermicro v5.0", 135168, 1.30, 0.713),
)
"""Computed from the logs in mlcommons/training_results_v4.0, v4.1 and v5.0 as bench/mlperf/published_logs.py does."""
