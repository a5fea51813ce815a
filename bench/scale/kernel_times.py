"""Times of the static pipeline's kernels on one GPU, from what a batch names: their bytes at measured rates.

The constants are of kernels timed alone, as graphs, on 2 x H200 with full tables, realistic ids and 64 columns a rank
(results/README.md, "Kernels of the static engine"), at 512 and 6912 samples a GPU: lookup 16 and 173 us, sort 46 and
199, table update 61 and 422, dense network with weight gradients 307 and 1520. These formulas say 20 and 197, 46 and
199, 65 and 395, and 307 and 1520.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from dlrm_bench.dlrm.config import ModelConfig
from dlrm_bench.dlrm.embedding.id_statistics import IdStatistics
from dlrm_bench.dlrm.embedding.plan import Shard, picking_us
from dlrm_bench.dlrm.gpu_costs import H200, GpuCosts

_LOOKUP_US = 3.0
UPDATE_FIXED_US, SORT_FIXED_US = 28.0, 34.0
"""Parts of `update` and `sort` in which few multiprocessors work, such as launches that wait for one another: other
streams' work runs beside them."""
_SORT_US_PER_MILLION_IDS = 55.8
_CACHE_OVER_MEMORY = 1.54
"""Rate of rows that come from the cache, which are those named before in the batch, to the memory's."""
_VECTOR_BYTES = 2
"""Of an element of the pooled vectors' gradients, which update reads once for each id."""
_ELEMENTWISE_US, _ELEMENTWISE_US_PER_SAMPLE = 65.0, 0.047
"""What the dense network takes beside its GEMMs, in bf16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableTimes:
    """Microseconds of one rank's tables in an iteration."""

    lookup: float
    sort: float
    update: float
    picking: float

    @property
    def all(self) -> float:
        """Their sum."""
        return self.lookup + self.sort + self.update + self.picking


def table_times(
    shards: Sequence[Shard], model: ModelConfig, global_batch_size: int, ids: IdStatistics, costs: GpuCosts
) -> TableTimes:
    """Returns the times of a rank that holds these shards. ids: how often they name the same rows.

    A row that the batch names comes from memory once for the lookup, and for the update is read and written with its
    Adagrad state; each id's row comes from the cache, and its gradient.
    """
    row_bytes = id_columns = num_ids = 0.0
    for shard in shards:
        hot, rows = model.multi_hot_sizes[shard.table], model.rows[shard.table]
        share = 1 / shard.row_parts
        row_bytes += 4 * shard.columns * share * ids.distinct_rows(rows, hot, global_batch_size)
        id_columns += shard.columns * share * global_batch_size * hot
        num_ids += share * global_batch_size * hot
    rate, slower = costs.memory_bytes_per_us, H200.memory_bytes_per_us / costs.memory_bytes_per_us
    cache = rate * _CACHE_OVER_MEMORY
    picking = 0.0
    if any(shard.row_parts > 1 for shard in shards):
        picking = costs.picking_us + sum(picking_us(s.table, model, global_batch_size, costs) for s in shards)
    return TableTimes(
        lookup=_LOOKUP_US + row_bytes / rate + 4 * id_columns / cache,
        sort=SORT_FIXED_US + _SORT_US_PER_MILLION_IDS * num_ids / 1e6 * slower,
        update=UPDATE_FIXED_US + 4 * row_bytes / rate + _VECTOR_BYTES * id_columns / cache,
        picking=picking,
    )


def elementwise_us(batch: int) -> float:
    """Returns what the dense network takes beside its GEMMs, of so many local samples."""
    return _ELEMENTWISE_US + _ELEMENTWISE_US_PER_SAMPLE * batch
