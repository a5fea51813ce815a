"""Times on one GPU of the dense network apart from its GEMMs, and of FBGEMM's lookup and update of tables."""

from collections.abc import Sequence

from dlrm_bench.dlrm.runtime.gpu_types import H200, GpuCosts
from dlrm_bench.dlrm.tables.id_statistics import IdStatistics
from dlrm_bench.dlrm.tables.plan.plan import Shard
from dlrm_bench.dlrm.tables.tables import Tables

# The dense network with weight gradients, alone as a graph on an H200: 307 us at 512 samples, 1520 at 6912
# (results/LABBOOK.md, "Kernels of the static engine").
_ELEMENTWISE_US, _ELEMENTWISE_US_PER_SAMPLE = 65.0, 0.047
# One H200, fbgemm-gpu 1.6.0, exact Adagrad, bf16 output: FBGEMM's forward and backward on a 40M-row table at 5.5
# million uniform ids, by columns, and for each call. Single tables of 0.4 to 1.5 million ids are predicted within 10 %.
_FBGEMM_US_PER_MILLION_IDS = {16: 196.0, 32: 228.0, 64: 376.0, 128: 674.0}
_FBGEMM_US = 180.0
# Time of a repeated id of a row in the batch, relative to the row's first id. Ten one-hot tables of 3 to 17295 rows in
# one call: 396 us at 55296 samples.
_FBGEMM_REPEATED_ID = 0.57


def fbgemm_us(
    shards: Sequence[Shard], tables: Tables, global_batch_size: int, ids: IdStatistics, costs: GpuCosts
) -> float:
    """Returns the predicted microseconds of FBGEMM's forward and backward of a rank's tables in an iteration."""
    widths, us = sorted(_FBGEMM_US_PER_MILLION_IDS), 0.0
    for shard in shards:
        width = next((width for width in widths if shard.columns <= width), widths[-1])
        hot = tables.hot[shard.table]
        distinct = ids.distinct_rows(tables.rows[shard.table], hot, global_batch_size)
        million = (distinct + _FBGEMM_REPEATED_ID * (global_batch_size * hot - distinct)) / 1e6 / shard.row_parts
        us += million * _FBGEMM_US_PER_MILLION_IDS[width] * max(1.0, shard.columns / widths[-1])
    return _FBGEMM_US + us * H200.costs.memory_bytes_per_us / costs.memory_bytes_per_us


def elementwise_us(batch: int) -> float:
    """Returns the microseconds of the dense network apart from its GEMMs for a local batch."""
    return _ELEMENTWISE_US + _ELEMENTWISE_US_PER_SAMPLE * batch
