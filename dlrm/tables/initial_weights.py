"""Initial embedding weights that do not depend on how the tables are sharded.

Element (row, column) of a table is a hash of (seed, table, row, column), so any rank can fill any part of any table by
itself, and every sharding and world size starts from the same weights.
"""

import math

import torch
from torch import Tensor

from dlrm_bench.kernels.embedding._split_mix import GOLDEN, mix, signed
from dlrm_bench.kernels.embedding.initial_rows import uniform

# Elements per pass: bounds the int64 temporaries to some hundred MB while full-size tables are filled.
_CHUNK_ELEMENTS = 1 << 24


def table_key(seed: int, table: int) -> int:
    """Returns the start of one table's counters: the hash of seed and table, as the signed integer of its 64 bits."""
    key = torch.tensor(signed(seed * GOLDEN))
    return int(mix(mix(key) + signed((table + 1) * GOLDEN)))


def distribution(num_embeddings: int) -> tuple[float, float]:
    """Returns the factor for a 24-bit number, and the value to subtract, for weights uniform in +-sqrt(1 / rows)."""
    bound = math.sqrt(1 / num_embeddings)
    return 2 * bound / 2**24, bound


@torch.no_grad()
def fill_initial_weights(
    weights: Tensor,
    *,
    seed: int,
    table: int,
    num_embeddings: int,
    row_offset: int = 0,
    column_offset: int = 0,
    row_step: int = 1,
) -> None:
    """Fills one shard in place with its table's initial weights, uniform in +-sqrt(1 / num_embeddings).

    weights: floating point [rows, columns], the part of table number `table` that starts at (row_offset,
    column_offset) and has every row_step-th row; num_embeddings: number of rows of the whole table. The distribution
    is the MLPerf reference's (TorchRec's EmbeddingBagConfig default).
    """
    rows, columns = weights.shape
    scale, bound = distribution(num_embeddings)
    key = table_key(seed, table)
    # 2^20 columns a row: the counter of an element does not depend on the shard's width.
    column_counter = torch.arange(column_offset, column_offset + columns, device=weights.device)
    step = max(1, _CHUNK_ELEMENTS // columns)
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        row_counter = row_offset + row_step * torch.arange(start, stop, device=weights.device)
        counter = (row_counter[:, None] << 20) + column_counter
        weights[start:stop] = uniform(counter, key) * scale - bound
