"""One table-batched embedding (TBE) of tables of one width, FBGEMM's or our kernels', seen as a single matrix."""

from collections.abc import Sequence
from dataclasses import dataclass

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

from dlrm_bench.dlrm.config import OptimizerConfig
from dlrm_bench.kernels.input_dist.sort_ids import SortTable, sort_ids

_OPTIMIZERS = {
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    "sgd": EmbOptimType.EXACT_SGD,
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
    """Samples of one part."""
    dtype: torch.dtype
    """The format of pooled vectors: fp32 or bf16."""
    parts: int = 1
    padded: bool = False
    """Whether bags may hold ids of -1, which mean nothing."""


class FixedTBE:
    """Tables of `columns` columns with fixed multi-hot sizes over `samples` samples.

    The tables lie one after another: `weights` are fp32 [sum(rows), columns], table t's rows start at `first_row[t]`;
    `state`, the optimizer's, has as many rows and `OptimizerConfig.state_columns` columns. Where there is padding, both
    have one more row before each table. Samples come in `parts`, each looked up by itself: ids are int32
    [part][table][samples, hot], flat. A part's pooled vectors are [samples, tables * columns]. The bag of a part's
    (sample, table) has number (part * samples + sample) * tables + table: its row where the pooled matrices of all
    parts, one below the other, are viewed as [parts * samples * tables, columns].
    """

    def __init__(
        self,
        shape: TBEShape,
        optimizer: OptimizerConfig,
        device: torch.device,
        sorted_updates: bool = False,
        fbgemm: bool = True,
    ) -> None:
        """sorted_updates: the tables are updated from what `sort` gives and never by FBGEMM's backward. fbgemm:
        `lookup` may be called; otherwise the Adagrad state of each row lies right after its weights, and the rows of
        both are strided.

        Where bags are padded, `shift` their ids first. Each table then begins with a row of zeros, so that a lookup of
        fixed shape is exact. FBGEMM's backward writes to that row as to any other, and `lookup` sets it back; sorted
        updates leave it out.
        """
        padding, hot, columns, samples, parts = shape.padded, shape.hot, shape.columns, shape.samples, shape.parts
        self._padding = padding
        rows = [table_rows + padding for table_rows in shape.rows]
        self._tbe: SplitTableBatchedEmbeddingBagsCodegen | None = None
        if fbgemm:
            self._tbe, self.weights, self.state = _fbgemm_tables(rows, columns, optimizer, shape.dtype, device)
        else:
            assert sorted_updates, "FBGEMM's backward has its own layout"
            assert optimizer.embedding == "adagrad", "the sorted update is exact Adagrad's"
            # Narrow rows come faster in pairs. One H200, updates of the same number of bytes: 64 columns 849 -> 848 us,
            # 32 columns 915 -> 854, 16 columns 1188 -> 851.
            self.weights, self.state = torch.zeros(sum(rows), 2, columns, device=device).unbind(1)
        self.num_tables, self.columns = len(rows), columns
        starts = [sum(rows[:table]) for table in range(len(rows))]
        self.row_offsets = starts
        """The offset of each table: `lookup`'s id i means row row_offsets[table] + i of `weights`."""
        self.first_row = [start + padding for start in starts]
        self._zero_rows = torch.tensor(starts, device=device)
        if padding:
            self.weights.index_fill_(0, self._zero_rows, 0)
        self._written_zeros = padding and not sorted_updates
        ends, start = [torch.zeros(1, dtype=torch.int64)], 0
        for size in hot:
            ends.append(start + torch.arange(1, samples + 1) * size)
            start += samples * size
        self._offsets = torch.cat(ends).to(device=device, dtype=torch.int32)
        self._part_ids, self.num_ids = start, parts * start
        self._shape, self._rows, self._device = shape, sum(rows), device
        self._order: SortTable | None = None

    def set_learning_rate(self, value: float) -> None:
        """Sets the rate of FBGEMM's backward, from the next one on; a captured one keeps what it was captured with."""
        if self._tbe is not None:
            self._tbe.set_learning_rate(value)

    def shift(self, ids: Tensor) -> None:
        """Turns ids as a batch has them, -1 for padding, into those that `lookup` and `sort` take, in place."""
        if self._padding:
            ids.add_(1)

    def lookup(self, ids: Tensor, part: int = 0) -> Tensor:
        """Returns a part's pooled vectors, [samples, tables * columns]; in the autograd graph where gradients are
        enabled, and its backward then updates the tables. ids: of all parts."""
        assert self._tbe is not None
        if self._written_zeros:
            self.weights.index_fill_(0, self._zero_rows, 0)
        return self._tbe(self.of_part(ids, part), self._offsets)

    def lookup_bags(self, rows: Tensor, offsets: Tensor) -> Tensor:
        """Returns pooled vectors of bags of any length, [samples, tables * columns], outside of the autograd graph.

        rows: int32, of their table; there may be more of them than are in bags. offsets: int32 [tables * samples + 1].
        """
        assert self._tbe is not None
        with torch.no_grad():
            return self._tbe(rows, offsets)

    def of_part(self, ids: Tensor, part: int) -> Tensor:
        """Returns a part's ids, [table][samples, hot], of all parts' ids."""
        return ids[part * self._part_ids :][: self._part_ids]

    def sort_table(self, tables: Sequence[int]) -> SortTable:
        """Returns what `sort_ids` takes to sort these tables' ids, [part][table][samples, hot], flat."""
        samples, parts, hot = self._shape.samples, self._shape.parts, torch.tensor(self._shape.hot)
        of_table = torch.tensor(tables, dtype=torch.int64)
        sizes = hot[of_table].repeat_interleave(samples)
        bag = (torch.arange(samples) * self.num_tables + of_table[:, None]).view(-1).repeat_interleave(sizes)
        part = torch.arange(parts)[:, None] * samples * self.num_tables
        first_row = torch.tensor(self.row_offsets)[of_table].repeat_interleave(samples).repeat_interleave(sizes)
        bags, first_rows = (
            each.to(device=self._device, dtype=torch.int32) for each in ((part + bag).view(-1), first_row.repeat(parts))
        )
        return SortTable(first_rows, bags, self._rows, self._padding)

    def sort(self, ids: Tensor, sorted_ids: Tensor, sorted_bags: Tensor) -> None:
        """Writes to sorted_ids, int32 [num_ids], rows of `weights` in ascending order, after -1 for every id of
        padding; to sorted_bags the bag of each."""
        if self._order is None:  # not sooner: its memory is as much again as the ids'
            self._order = self.sort_table(range(self.num_tables))
        sort_ids(ids, self._order, sorted_ids, sorted_bags)


def _fbgemm_tables(
    rows: list[int], columns: int, optimizer: OptimizerConfig, output_dtype: torch.dtype, device: torch.device
) -> tuple[SplitTableBatchedEmbeddingBagsCodegen, Tensor, Tensor]:
    """Returns FBGEMM's TBE, and its weights and optimizer state as matrices."""
    cuda = device.type == "cuda"
    place = (EmbeddingLocation.DEVICE, ComputeDevice.CUDA) if cuda else (EmbeddingLocation.HOST, ComputeDevice.CPU)
    tbe = SplitTableBatchedEmbeddingBagsCodegen(
        [(table_rows, columns, *place) for table_rows in rows],
        optimizer=_OPTIMIZERS[optimizer.embedding],
        learning_rate=optimizer.learning_rate,
        eps=optimizer.eps,
        output_dtype=SparseType.BF16 if output_dtype == torch.bfloat16 else SparseType.FP32,
        pooling_mode=PoolingMode.SUM,
        # Readers validate ids on the host; a check on the device would cost a kernel an iteration.
        bounds_check_mode=BoundsCheckMode.NONE,
        device=device,
        embedding_table_index_type=torch.int32,
        embedding_table_offset_type=torch.int32,
    )
    weights = (tbe.weights_dev if cuda else tbe.weights_host).detach().view(-1, columns)
    states = [state for (state,) in tbe.split_optimizer_states()]
    shape = (sum(rows), optimizer.state_columns(columns))
    assert sum(state.numel() for state in states) == shape[0] * shape[1]
    # Views of one buffer, one for each table: taken together.
    first = states[0].view(-1) if states else torch.empty(0, device=device)
    return tbe, weights, first.as_strided(shape, (shape[1], 1), first.storage_offset())
