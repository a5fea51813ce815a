"""Published MLPerf results, for comparison with ours."""

from typing import NamedTuple

DCNV2, DLRMV4 = "dlrm_dcnv2", "dlrmv4"
"""The benchmarks, as MLPerf's logs name them."""


class Published(NamedTuple):
    """A published MLPerf result, from its logs."""

    benchmark: str
    system: str
    source: str
    global_batch_size: int
    ms_per_iteration: float
    """Milliseconds an iteration, without evaluation."""
    minutes: float
    """Minutes from run_start to the target."""
    eval_seconds: float | None = None
    """Seconds of one evaluation."""


PUBLISHED = (
    Published(DCNV2, "8 x H200", "HugeCTR, NVIDIA v4.0", 55296, 3.25, 3.47),
    Published(DCNV2, "8 x H200", "HugeCTR, HPE v5.0", 65536, 3.71, 3.44),
    Published(DCNV2, "8 x H100", "HugeCTR, NVIDIA v4.0", 55296, 3.53, 3.84),
    Published(DCNV2, "8 x B200", "HugeCTR, NVIDIA v5.0", 55296, 2.15, 2.26),
    Published(DCNV2, "64 x H100", "HugeCTR, NVIDIA v4.1", 135168, 2.35, 1.32),
    Published(DCNV2, "128 x H100", "HugeCTR, NVIDIA v4.1", 135168, 1.77, 0.94),
    Published(DCNV2, "64 x GB200", "HugeCTR, Supermicro v5.0", 135168, 1.30, 0.713),
    Published(DLRMV4, "8 x MI350X", "reference, AMD v6.1", 8192, 730.9, 159.6, 84.9),
    Published(DLRMV4, "16 x MI350X", "reference, AMD v6.1", 16384, 782.4, 112.0, 44.5),
    Published(DLRMV4, "32 x MI350X", "reference, AMD v6.1", 32768, 848.9, 83.3, 24.4),
)
"""Computed as bench/mlperf/published_logs.py does: DLRM-DCNv2's from the logs in mlcommons/training_results_v4.0, v4.1
and v5.0; DLRMv4's are means over the 20 logs of each batch in mlcommons/training, recommendation/rcp_logs, which are no
submissions but the runs behind the reference convergence points. Their iterations include the first, which compile."""
