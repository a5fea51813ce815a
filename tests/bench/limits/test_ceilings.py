"""The sizes of the work that is measured. That it can be measured, test_cli.py shows."""

from dlrm_bench.bench.limits.ceilings import lookup_bytes, update_bytes
from dlrm_bench.dlrm.config import OptimizerConfig
from dlrm_bench.dlrm.dcnv2.presets import MLPERF_MODEL


def test_sizes_of_the_mlperf_model() -> None:
    assert lookup_bytes(MLPERF_MODEL, 1, pooled_size=2) == 214 * (4 + 512) + 26 * 128 * 2
    assert update_bytes(MLPERF_MODEL, OptimizerConfig(), 1, gradient_size=4) == 214 * (4 + 2048) + 26 * 128 * 4
    assert (
        update_bytes(MLPERF_MODEL, OptimizerConfig(embedding="sgd"), 1, gradient_size=4)
        == 214 * (4 + 1024) + 26 * 128 * 4
    )
