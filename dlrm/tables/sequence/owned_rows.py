"""The rows of all tables that one rank owns: every W-th row of each table, starting at the rank's number, for W ranks.

Row i of a table belongs to rank i % W, as its row i // W of that table. This stride spreads the most frequent ids,
which data sets tend to number first, over all ranks. The owner stores its rows table after table, with the same number
of rows per table on every rank (that of the rank with the most): so a row's number does not depend on its owner.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.dlrm.tables.initial_weights import fill_initial_weights
from dlrm_bench.dlrm.tables.row_numbers import RowNumbers
from dlrm_bench.dlrm.tables.tables import Tables


@dataclass(frozen=True, slots=True)
class TableShard:
    """A view of one rank's rows of a table: row n is row `row_part` + n * `row_parts` of the table."""

    table: int
    row_part: int
    row_parts: int
    weights: Tensor
    """fp32 [rows of the rank, columns]; no rows where the table has fewer than ranks."""
    state: Tensor
    """fp32 [rows of the rank, 1]: row-wise Adagrad's sum of mean squared gradients."""


class OwnedRows:
    """The memory of one rank's rows, with the initial weights of a seed and states of 0."""

    def __init__(self, tables: Tables, ranks: Ranks, seed: int) -> None:
        """ValueError where the tables have more rows than int32 counts."""
        self._tables, self._part, self._parts = tables, ranks.rank, ranks.world_size
        self.numbers = RowNumbers.of_parts(tables, ranks)
        """Numbers of the rows; there is memory for all of them."""
        self.weights = torch.zeros(self.numbers.count, tables.columns, device=ranks.device)
        self.state = torch.zeros(self.numbers.count, 1, device=ranks.device)
        for shard in self.shards():
            fill_initial_weights(
                shard.weights,
                seed=seed,
                table=shard.table,
                num_embeddings=tables.rows[shard.table],
                row_offset=self._part,
                row_step=self._parts,
            )

    def shards(self) -> Iterator[TableShard]:
        """Yields this rank's part of each table, in their order, as views."""
        for table, (first, rows) in enumerate(zip(self.numbers.first_rows, self._tables.rows, strict=True)):
            of_rank = slice(first, first + len(range(self._part, rows, self._parts)))
            yield TableShard(table, self._part, self._parts, self.weights[of_rank], self.state[of_rank])

    @contextmanager
    def unchanged(self, rows: int) -> Iterator[None]:
        """Restores all rows bit for bit after the body, which trains only on the first `rows` rows of this rank's part
        of each table. The body ends after its training has ended."""
        named = self.numbers.first(rows).long().to(self.weights.device)
        kept = self.weights[named], self.state[named]
        yield
        self.weights[named], self.state[named] = kept
