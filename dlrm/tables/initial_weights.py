"""Initial embedding weights that do not depend on how the tables are sharded.

Element (row, column) of a table is a hash of (seed, table, row, column), so any rank fills any part of any table by
itself and every sharding of every world size starts from the same weights.
"""

import math

import torch
from torch import Tensor


# SplitMix64 (Steele, Lea, Flood, OOPSLA 2014). torch has no unsigned arithmetic on int64, but its products wrap modulo
# 2^64, so the constants stand as the signed integers of the same bits.
def _signed(x: int) -> int:
    return (x + 2**63) % 2**64 - 2**63


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)
# Elements per pass: bounds the int64 temporaries to some hundred MB while full-size tables are filled.
_CHUNK_ELEMENTS = 1 << 24


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64 (torch's own is arithmetic)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def _table_key(seed: int, table: int) -> int:
    """Returns the start of one table's counters: the hash of seed and table, as the signed integer of its 64 bits."""
    key = torch.tensor(_signed(seed * _GOLDEN))
    return int(_mix(_mix(key) + _signed((table + 1) * _GOLDEN)))


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
    column_offset), of every row_step-th row from there; num_embeddings: number of rows of the whole table. The
    distribution is the MLPerf reference's (TorchRec's EmbeddingBagConfig default).
    """
    rows, columns = weights.shape
    bound = math.sqrt(1 / num_embeddings)
    key = _table_key(seed, table)
    # 2^20 columns a row: the counter of an element does not depend on the shard's width.
    column_counter = torch.arange(column_offset, column_offset + columns, device=weights.device)
    step = max(1, _CHUNK_ELEMENTS // columns)
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        row_counter = row_offset + row_step * torch.arange(start, stop, device=weights.device)
        counter = (row_counter[:, None] << 20) + column_counter
        bits = _shift_right(_mix(counter * _GOLDEN + key), 40)  # 24 bits: every value is exact in fp32
        weights[start:stop] = bits.to(torch.float32) * (2 * bound / 2**24) - bound
