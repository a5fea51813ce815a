"""FBGEMM's times are as measured."""

import pytest

from dlrm_bench.bench.scale.kernel_times import fbgemm_us
from dlrm_bench.dlrm.runtime.gpu_types import H200
from dlrm_bench.dlrm.tables.id_statistics import UNIFORM
from dlrm_bench.dlrm.tables.plan.plan import Shard
from tests.dlrm.tables.plan.test_plan import model_of


@pytest.mark.parametrize("dim", [128, 64, 32, 16])
def test_fbgemm_is_within_a_tenth_of_what_was_measured(dim):
    """Microseconds of forward and backward of one call, exact Adagrad, by width and table."""
    hot = model_of([40_000_000] * 4, [100, 27, 25, 12])
    small = model_of([17295, 7122, 1543, 63, 10, 4, 976, 14, 108, 36], [1] * 10)
    measured = {
        128: [(0, 55296, 3801), (1, 55296, 1284), (2, 55296, 1201), (3, 55296, 629), (0, 4096, 435)],
        64: [(0, 55296, 2201), (1, 55296, 743)],
        32: [(0, 55296, 1406), (0, 4096, 252)],
        16: [(0, 55296, 1232)],
    }
    for table, global_batch_size, us in measured[dim]:
        shards = [Shard(0, table, 0, dim)]
        assert fbgemm_us(shards, hot, global_batch_size, UNIFORM, H200.costs) == pytest.approx(us, rel=0.1)
    if dim == 128:
        shards = [Shard(0, table, 0, 128) for table in range(10)]
        assert fbgemm_us(shards, small, 55296, UNIFORM, H200.costs) == pytest.approx(396, rel=0.1)
