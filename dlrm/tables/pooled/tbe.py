"""One table-batched embedding (TBE) of tables of one width as a single matrix, with FBGEMM's or our kernels."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
    BoundsCheckMode,
    ComputeDevice,
    EmbeddingLocation,
    PoolingMode,
)
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import Tensor

from dlrm_bench.dlrm.optimizers import SGD, Adagrad, RowWiseAdagrad, TableOptimizer
from dlrm_bench.dlrm.tables.tiers.tiered_rows import TieredRows
from dlrm_bench.kernels.embedding.id_map import Keys
from dlrm_bench.kernels.embedding.pooled_lookup import LookupTable, PooledTable, pooled_lookup
from dlrm_bench.kernels.input_dist.sort_ids import SortTable, sort_ids
from dlrm_bench.kernels.peer_tensors import PeerTensors

_OPTIMIZERS = {
    Adagrad.name: EmbOptimType.EXACT_ADAGRAD,
    RowWiseAdagrad.name: EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    SGD.name: EmbOptimType.EXACT_SGD,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TBEShape:
    """The sizes of a FixedTBE's tables and lookups."""

    rows: tuple[int, ...]
    """Rows of each table."""
    hot: tuple[int, ...]
    """Ids of each sample in each table."""
    columns: int
    """Columns of every table."""
    samples: int
    """Number of samples of one part."""
    dtype: torch.dtype
    """The format of pooled vectors: fp32 or bf16."""
    parts: int = 1
    raw_ids: bool = False
    """Whether ids are int64 of any value instead of rows."""

    @property
    def ids(self) -> int:
        """Number of ids of all parts."""
        return self.parts * self.samples * sum(self.hot)


class FixedTBE:
    """Tables of `columns` columns with fixed multi-hot sizes over `samples` samples.

    The tables are stored one after another: `weights` are fp32 [sum(rows), columns], table t's rows start at
    `first_row[t]`; the optimizer's `state` has the same number of rows and `TableOptimizer.state_columns` columns.
    Samples come in `parts`, each looked up separately: ids are int32 [part][table][samples, hot], flat. A part's pooled
    vectors are [samples, tables * columns]. The bag of a part's (sample, table) has number (part * samples + sample) *
    tables + table: its row when the stacked pooled matrices of all parts are viewed as [parts * samples * tables,
    columns].
    """

    def __init__(
        self,
        shape: TBEShape,
        optimizer: TableOptimizer,
        learning_rate: float,
        device: torch.device,
        sorted_updates: bool = False,
        fbgemm: bool = True,
        tiers: TieredRows | None = None,
        places: int | None = None,
    ) -> None:
        """sorted_updates: the tables are updated from the results of `sort` and never by FBGEMM's backward. fbgemm:
        `lookup` may use FBGEMM; otherwise the Adagrad state of each row is stored right after its weights, and the rows
        of both are strided. tiers: holds the rows of all tables on two tiers; `weights` and `state` are those on the
        device, and all reads and writes use places instead of rows. places: number of rows in memory, for all tables
        together, likewise read and written by places; None: all rows."""
        rows, hot, columns, samples, parts = shape.rows, shape.hot, shape.columns, shape.samples, shape.parts
        self._tbe: SplitTableBatchedEmbeddingBagsCodegen | None = None
        self.host: Tensor | None = None
        """fp32 [H, 2, columns], the rows of `tiers` in host memory."""
        self._pooled: PooledLookup | None = None
        if tiers is not None:
            assert sorted_updates, "FBGEMM does not support rows in host memory"
            self.weights, self.state, self.host = tiers.memory.weights, tiers.memory.state, tiers.memory.host
            self._pooled = PooledLookup(shape, device) if fbgemm else None
        elif fbgemm:
            self._tbe, self.weights, self.state = _fbgemm_tables(shape, places, optimizer, learning_rate, device)
        else:
            assert sorted_updates, "FBGEMM's backward needs its own layout"
            assert isinstance(optimizer, Adagrad), "the sorted update implements exact Adagrad only"
            # Narrow rows are faster when weights and state are adjacent. One H200, updates of the same number of bytes:
            # 64 columns 849 -> 848 us, 32 columns 915 -> 854, 16 columns 1188 -> 851.
            count = sum(rows) if places is None else places
            self.weights, self.state = torch.zeros(count, 2, columns, device=device).unbind(1)
        self.by_places = tiers is not None or places is not None
        """Whether ids are places instead of rows."""
        self.num_tables, self.columns = len(rows), columns
        self.first_row = [sum(rows[:table]) for table in range(len(rows))]
        ends, start = [torch.zeros(1, dtype=torch.int64)], 0
        for size in hot:
            ends.append(start + torch.arange(1, samples + 1) * size)
            start += samples * size
        self._offsets = torch.cat(ends).to(device=device, dtype=torch.int32)
        self._part_ids, self.num_ids = start, parts * start
        self._shape, self._rows, self._device = shape, sum(rows), device
        assert places is not None or not shape.raw_ids, "raw ids have places"
        self._places = places

    def set_learning_rate(self, value: float) -> None:
        """Sets the rate of FBGEMM's backward, starting with the next one; a captured backward keeps the rate of its
        capture."""
        if self._tbe is not None:
            self._tbe.set_learning_rate(value)

    def lookup(self, ids: Tensor, part: int = 0) -> Tensor:
        """Returns a part's pooled vectors, [samples, tables * columns]; if gradients are enabled, in the autograd
        graph, and its backward updates the tables. ids: of all parts; places if rows have places."""
        if self._pooled is not None:
            return self._pooled.lookup(self.weights, self.host, self.of_part(ids, part), part)
        assert self._tbe is not None
        return self._tbe(self.of_part(ids, part), self._offsets)

    def lookup_bags(self, rows: Tensor, offsets: Tensor) -> Tensor:
        """Returns pooled vectors of bags of any length, [samples, tables * columns], outside the autograd graph.

        rows: int32, of their table; may include rows beyond the last bag. offsets: int32 [tables * samples + 1].
        """
        assert self._tbe is not None
        with torch.no_grad():
            return self._tbe(rows, offsets)

    def of_part(self, ids: Tensor, part: int) -> Tensor:
        """Returns a part's ids, [table][samples, hot], of all parts' ids."""
        return ids[part * self._part_ids :][: self._part_ids]

    def sort_table(self, tables: Sequence[int]) -> SortTable:
        """Returns the SortTable to sort these tables' ids, [part][table][samples, hot], flat."""
        of_ids, bags = self._tables_and_bags(tables)
        first_rows = torch.tensor(self.first_row, dtype=torch.int32, device=self._device)
        return SortTable(first_rows[of_ids], bags, self._rows)

    def _tables_and_bags(self, tables: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Returns the table and the bag of each of these tables' ids, [part][table][samples, hot], flat, int32."""
        samples, parts, hot = self._shape.samples, self._shape.parts, torch.tensor(self._shape.hot)
        of_table = torch.tensor(tables, dtype=torch.int64)
        sizes = hot[of_table].repeat_interleave(samples)
        bag = (torch.arange(samples) * self.num_tables + of_table[:, None]).view(-1).repeat_interleave(sizes)
        part = torch.arange(parts)[:, None] * samples * self.num_tables
        of_ids = of_table.repeat_interleave(samples).repeat_interleave(sizes).repeat(parts)
        return of_ids.to(self._device, torch.int32), (part + bag).view(-1).to(self._device, torch.int32)

    def sort(self, rows: Tensor, sorted_rows: Tensor, sorted_bags: Tensor) -> None:
        """Writes rows of `weights` in ascending order to sorted_rows, and the bag of each to sorted_bags. All int32
        [num_ids].

        rows: in the order of the ids; the ids themselves, unless rows have places that are given when they are first
        named: then their places.
        """
        sort_ids(rows, self._order, sorted_rows, sorted_bags)

    def rows_of(self, ids: Tensor) -> Tensor:
        """Returns each id's row, counted over all tables one after another, int32 [num_ids]."""
        return ids + self._first_rows

    def keys_of(self, ids: Tensor) -> Keys:
        """Returns the keys of ids in the map of rows that are created when first named."""
        return Keys(ids, self._tables) if self._shape.raw_ids else Keys(self.rows_of(ids))

    # Created on first use: each needs as much memory as the ids.

    @cached_property
    def _order(self) -> SortTable:
        every = range(self.num_tables)
        if self._places is None:
            return self.sort_table(every)
        bags = self._tables_and_bags(every)[1]
        return SortTable(torch.zeros_like(bags), bags, self._places)

    @cached_property
    def _first_rows(self) -> Tensor:
        """int32 [num_ids], the first row of each id's table."""
        return torch.tensor(self.first_row, dtype=torch.int32, device=self._device)[self._tables]

    @cached_property
    def _tables(self) -> Tensor:
        """int32 [num_ids], the place of each id's table among the tables."""
        return self._tables_and_bags(range(self.num_tables))[0]


class PooledLookup:
    """The lookup of a FixedTBE by our kernel, which supports rows on two tiers, into its own memory."""

    def __init__(self, shape: TBEShape, device: torch.device) -> None:
        columns = len(shape.hot) * shape.columns
        tables = [PooledTable(hot, 0, table * shape.columns) for table, hot in enumerate(shape.hot)]
        self._table = LookupTable(tables, shape.samples, 1, device)
        self._out = [
            PeerTensors([torch.zeros(shape.samples, columns, dtype=shape.dtype, device=device)], 0)
            for _ in range(shape.parts)
        ]

    def lookup(self, weights: Tensor, host: Tensor | None, places: Tensor, part: int) -> Tensor:
        """Returns a part's pooled vectors, [samples, tables * columns], valid until its next lookup."""
        pooled_lookup(weights, places, self._table, self._out[part], host=host)
        return self._out[part].own


def _fbgemm_tables(
    shape: TBEShape, places: int | None, optimizer: TableOptimizer, learning_rate: float, device: torch.device
) -> tuple[SplitTableBatchedEmbeddingBagsCodegen, Tensor, Tensor]:
    """Returns FBGEMM's TBE, and its weights and optimizer state as matrices. places: number of rows of the single table
    that all tables share; None if each table has its own rows."""
    cuda = device.type == "cuda"
    rows = shape.rows if places is None else (places,)
    columns = shape.columns
    place = (EmbeddingLocation.DEVICE, ComputeDevice.CUDA) if cuda else (EmbeddingLocation.HOST, ComputeDevice.CPU)
    tbe = SplitTableBatchedEmbeddingBagsCodegen(
        [(table_rows, columns, *place) for table_rows in rows],
        feature_table_map=None if places is None else [0] * len(shape.hot),
        optimizer=_OPTIMIZERS[optimizer.name],
        learning_rate=learning_rate,
        eps=0.0 if isinstance(optimizer, SGD) else optimizer.eps,
        output_dtype=SparseType.BF16 if shape.dtype == torch.bfloat16 else SparseType.FP32,
        pooling_mode=PoolingMode.SUM,
        # Readers validate ids on the host; a check on the device would cost a kernel per iteration.
        bounds_check_mode=BoundsCheckMode.NONE,
        device=device,
        embedding_table_index_type=torch.int32,
        embedding_table_offset_type=torch.int32,
    )
    weights = (tbe.weights_dev if cuda else tbe.weights_host).detach().view(-1, columns)
    states = [state for (state,) in tbe.split_optimizer_states()]
    size = (sum(rows), optimizer.state_columns(columns))
    assert sum(state.numel() for state in states) == size[0] * size[1]
    # The states are views of one buffer, one per table; combines them.
    first = states[0].view(-1) if states else torch.empty(0, device=device)
    return tbe, weights, first.as_strided(size, (size[1], 1), first.storage_offset())
