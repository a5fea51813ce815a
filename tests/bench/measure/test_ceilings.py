"""The sizes of the work that is measured. That it can be measured, test_cli.py shows."""

import pytest

from dlrm_bench.bench.measure.ceilings import dense_weights, gemm_shapes, lookup_bytes, update_bytes
from dlrm_bench.bench.presets import preset
from dlrm_bench.dlrm.config import OptimizerConfig
from dlrm_bench.dlrm.model import DenseNetwork
from dlrm_bench.dlrm.presets import MLPERF_MODEL


def test_sizes_of_the_mlperf_model() -> None:
    assert dense_weights(MLPERF_MODEL) == 16_044_545
    assert dense_weights(preset("smoke").model) == sum(
        p.numel() for p in DenseNetwork(preset("smoke").model).parameters()
    )
    flop = sum(2 * m * n * k for m, n, k in gemm_shapes(MLPERF_MODEL, batch=1).values())
    assert flop == pytest.approx(96e6, rel=0.01)
    assert lookup_bytes(MLPERF_MODEL, 1, pooled_size=2) == 214 * (4 + 512) + 26 * 128 * 2
    assert update_bytes(MLPERF_MODEL, OptimizerConfig(), 1, gradient_size=4) == 214 * (4 + 2048) + 26 * 128 * 4
    assert (
        update_bytes(MLPERF_MODEL, OptimizerConfig(embedding="sgd"), 1, gradient_size=4)
        == 214 * (4 + 1024) + 26 * 128 * 4
    )
