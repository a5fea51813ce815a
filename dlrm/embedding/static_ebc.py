"""A sharded embedding-bag collection of fixed shapes, straight on FBGEMM's table-batched embeddings (TBE).

Local batch, multi-hot sizes and plan are constants, so every split, offset and layout is too: nothing of an iteration
depends on the host, and all of it can be captured in a CUDA graph. One rank's ids and vectors, for W ranks, B local
samples, G = W * B, and the rank's T shards of C columns each:

    local ids      [feature][B, hot]            as a Batch has them
    sent           [rank][its shards][B, hot]   one all-to-all with constant splits
    received       [rank][T][B, hot]
    looked up      [T][G, hot]                  TBE's order: by table, then by sample of the global batch
    pooled         [G, T * C]                   rows r * B .. (r + 1) * B belong to rank r: the all-to-all sends as is
    output         [rank s][B, T_s * C_s]       regrouped into the columns of the interaction input
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
    BoundsCheckMode,
    ComputeDevice,
    EmbeddingLocation,
    PoolingMode,
)
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import Tensor

from dlrm.config import ModelConfig, OptimizerConfig
from dlrm.embedding.initial_weights import fill_initial_weights
from dlrm.embedding.plan import Plan, Shard
from dlrm.ranks import Ranks
from kernels.gather_segments import Segment, SegmentTable, gather_segments
from kernels.regroup import RegroupTable, Run, regroup_backward, regroup_forward
from kernels.sorted_adagrad import adagrad_update, sort_ids


@dataclass(slots=True)
class DistributedIds:
    """Model-parallel ids of one batch: what the input dist leaves for lookup and update."""

    ids: Tensor
    """int32 [T][G, hot], flat."""
    sorted_ids: Tensor | None = None
    """int32, flat: ids plus the first row of their table, in ascending order."""
    sorted_bags: Tensor | None = None
    """int32, flat: the row of the pooled gradient, viewed as [G * T, C], of each sorted id."""


@dataclass(frozen=True, slots=True)
class TableShard:
    """A view of one shard's memory."""

    shard: Shard
    weights: Tensor
    """fp32 [rows, columns]."""
    state: Tensor
    """fp32 [rows, columns], Adagrad's sum of squared gradients."""


class StaticEBC:
    """The embedding stages of one rank. Its methods launch work and never wait for it."""

    def __init__(
        self,
        model: ModelConfig,
        optimizer: OptimizerConfig,
        plan: Plan,
        ranks: Ranks,
        batch_size: int,
        seed: int,
        wire_dtype: torch.dtype,
        presort: bool,
    ) -> None:
        """Collective: makes the process groups of its all-to-alls.

        batch_size: local, B. wire_dtype: of pooled vectors and their gradients, fp32 or bf16; tables and Adagrad
        state are fp32. presort: sort ids in the input dist and update tables from sorted ids; otherwise FBGEMM's
        fused backward sorts and updates.
        """
        self.model, self.plan, self.batch_size = model, plan, batch_size
        self.device, self.wire_dtype, self.presort = ranks.device, wire_dtype, presort
        self.learning_rate = torch.tensor([optimizer.learning_rate], device=ranks.device)
        self.eps = optimizer.eps
        self.shards = plan.of_rank(ranks.rank)
        self.columns = self.shards[0].columns
        self._global_batch = batch_size * ranks.world_size
        self._ids_group, self._pooled_group = dist.new_group(), dist.new_group()
        self._build_tables(optimizer, seed)
        self._build_input_dist(ranks.world_size)
        self._build_output_dist(ranks.world_size)

    # Stage 1

    def input_dist(self, ids: Tensor, out: DistributedIds | None = None) -> DistributedIds:
        """Ids of this rank's samples to ids of this rank's shards; into `out` where given.

        ids: int32, the flat ids of one Batch, on the device.
        """
        sent = torch.empty(sum(self._send_splits), dtype=torch.int32, device=self.device)
        gather_segments(ids, self._send_segments, sent)
        received = torch.empty_like(self._bags)
        dist.all_to_all_single(received, sent, self._receive_splits, self._send_splits, group=self._ids_group)
        if out is None:
            out = self.empty_ids()
        linear = torch.empty_like(received) if self.presort else None
        gather_segments(received, self._receive_segments, out.ids, linear)
        if linear is not None:
            assert out.sorted_ids is not None
            assert out.sorted_bags is not None
            sorted_ids, sorted_bags = sort_ids(linear, self._bags, self._num_rows)
            out.sorted_ids.copy_(sorted_ids)
            out.sorted_bags.copy_(sorted_bags)
        return out

    def empty_ids(self) -> DistributedIds:
        """Memory for one batch's ids, all zero."""
        zeros = torch.zeros_like(self._bags)
        if not self.presort:
            return DistributedIds(zeros)
        return DistributedIds(zeros, zeros.clone(), zeros.clone())

    # Stage 2

    def lookup(self, ids: DistributedIds) -> Tensor:
        """Pooled vectors of the global batch, [G, T * C] in wire_dtype."""
        with torch.set_grad_enabled(not self.presort):
            return self._tbe(ids.ids, self._offsets)

    def output_dist(self, pooled: Tensor) -> Tensor:
        """All pooled vectors of the local batch, flat: [rank s][B, T_s * C_s]."""
        received = torch.empty(sum(self._output_splits), dtype=self.wire_dtype, device=self.device)
        dist.all_to_all_single(
            received, pooled.detach().view(-1), self._output_splits, self._pooled_splits, group=self._pooled_group
        )
        return received

    def regroup(self, received: Tensor, out: Tensor) -> None:
        """Writes output_dist's blocks into `out`, [B, num_features * dim] with any row stride, in table order."""
        regroup_forward(received, self._regroup, out)

    # Stage 4

    def gradient_dist(self, grad: Tensor) -> Tensor:
        """Gradient of `regroup`'s output, [B, num_features * dim], to that of `lookup`'s, [G, T * C]."""
        sent = torch.empty(sum(self._output_splits), dtype=self.wire_dtype, device=self.device)
        regroup_backward(grad, self._regroup, sent)
        received = torch.empty(
            self._global_batch, len(self.shards) * self.columns, dtype=self.wire_dtype, device=self.device
        )
        dist.all_to_all_single(
            received.view(-1), sent, self._pooled_splits, self._output_splits, group=self._pooled_group
        )
        return received

    def update(self, ids: DistributedIds, pooled: Tensor, grad: Tensor) -> None:
        """Exact Adagrad on the rows that `ids` named. grad: [G, T * C] in wire_dtype; pooled: what `lookup` gave."""
        if self.presort:
            assert ids.sorted_ids is not None
            assert ids.sorted_bags is not None
            adagrad_update(
                self._weights,
                self._state,
                grad.view(-1, self.columns),
                ids.sorted_ids,
                ids.sorted_bags,
                self.learning_rate,
                self.eps,
            )
        else:
            pooled.backward(grad)

    # State

    def tables(self) -> Iterator[TableShard]:
        """Every shard of this rank with its weights and optimizer state, as views."""
        start = 0
        for shard in self.shards:
            stop = start + self.model.rows[shard.table]
            yield TableShard(shard, self._weights[start:stop], self._state[start:stop])
            start = stop

    # Construction

    def _build_tables(self, optimizer: OptimizerConfig, seed: int) -> None:
        cuda = self.device.type == "cuda"
        location = (
            (EmbeddingLocation.DEVICE, ComputeDevice.CUDA) if cuda else (EmbeddingLocation.HOST, ComputeDevice.CPU)
        )
        self._tbe = SplitTableBatchedEmbeddingBagsCodegen(
            [(self.model.rows[shard.table], shard.columns, *location) for shard in self.shards],
            optimizer=EmbOptimType.EXACT_ADAGRAD,
            learning_rate=optimizer.learning_rate,
            eps=optimizer.eps,
            output_dtype=SparseType.BF16 if self.wire_dtype == torch.bfloat16 else SparseType.FP32,
            pooling_mode=PoolingMode.SUM,
            # Readers validate ids on the host; a check on the device would cost a kernel an iteration.
            bounds_check_mode=BoundsCheckMode.NONE,
            device=self.device,
            embedding_table_index_type=torch.int32,
            embedding_table_offset_type=torch.int32,
        )
        # Tables of one width lie behind one another, so all of them are one matrix.
        weights = self._tbe.weights_dev if cuda else self._tbe.weights_host
        self._weights = weights.detach().view(-1, self.columns)
        self._num_rows = len(self._weights)
        self._state = self._flat_state().view(-1, self.columns)
        for part in self.tables():
            fill_initial_weights(
                part.weights,
                seed=seed,
                table=part.shard.table,
                num_embeddings=self.model.rows[part.shard.table],
                column_offset=part.shard.column,
            )

    def _flat_state(self) -> Tensor:
        states = [state for (state,) in self._tbe.split_optimizer_states()]
        total = sum(state.numel() for state in states)
        return states[0].view(-1).as_strided((total,), (1,), states[0].storage_offset())

    def _build_input_dist(self, world_size: int) -> None:
        hot, batch = self.model.multi_hot_sizes, self.batch_size
        feature_start = [batch * sum(hot[:feature]) for feature in range(len(hot))]
        send = []
        self._send_splits = []
        at = 0
        for rank in range(world_size):
            start = at
            for shard in self.plan.of_rank(rank):
                length = batch * hot[shard.table]
                send.append(Segment(feature_start[shard.table], at, length))
                at += length
            self._send_splits.append(at - start)
        self._send_segments = SegmentTable(send, self.device)
        per_rank = batch * sum(hot[shard.table] for shard in self.shards)
        self._receive_splits = [per_rank] * world_size
        receive, offsets, bags = [], [torch.zeros(1, dtype=torch.int64)], []
        samples = torch.arange(self._global_batch)
        at = before = row = 0
        for position, shard in enumerate(self.shards):
            length = batch * hot[shard.table]
            for rank in range(world_size):
                receive.append(Segment(rank * per_rank + before, at + rank * length, length, row))
            offsets.append(at + (samples + 1) * hot[shard.table])
            bags.append((samples * len(self.shards) + position).repeat_interleave(hot[shard.table]))
            at += world_size * length
            before += length
            row += self.model.rows[shard.table]
        self._receive_segments = SegmentTable(receive, self.device)
        self._offsets = torch.cat(offsets).to(device=self.device, dtype=torch.int32)
        self._bags = torch.cat(bags).to(device=self.device, dtype=torch.int32)

    def _build_output_dist(self, world_size: int) -> None:
        dim, batch = self.model.embedding_dim, self.batch_size
        widths, runs = [], []
        for rank in range(world_size):
            column = 0
            for shard in self.plan.of_rank(rank):
                runs.append(Run(rank, column, shard.table * dim + shard.column, shard.columns))
                column += shard.columns
            widths.append(column)
        self._output_splits = [batch * width for width in widths]
        self._pooled_splits = [batch * len(self.shards) * self.columns] * world_size
        self._regroup = RegroupTable(batch, widths, runs, self.device)
