"""The baseline: DLRM-DCNv2 as the MLPerf reference trains it, on today's TorchRec, nothing patched.

EmbeddingBagCollection, EmbeddingShardingPlanner with the true pooling factors, DistributedModelParallel, exact Adagrad
fused into the embedding backward, torch.optim.Adagrad for the dense weights, TrainPipelineSparseDist. See
mlcommons/training, recommendation_v2/torchrec_dlrm/dlrm_main.py.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.optim.apply_optimizer_in_backward import (
    _apply_optimizer_in_backward as apply_optimizer_in_backward,
)
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.datasets.utils import Batch as TorchRecBatch
from torchrec.distributed import DistributedModelParallel, TrainPipelineSparseDist
from torchrec.distributed.model_parallel import get_default_sharders
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.storage_reservations import HeuristicalStorageReservation
from torchrec.distributed.planner.types import ParameterConstraints, PlannerError
from torchrec.distributed.types import ShardedTensor, ShardingPlan
from torchrec.models.dlrm import DLRM_DCN, DLRMTrain
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from dlrm.config import ModelConfig, OptimizerConfig, RunConfig
from dlrm.data.batch import Batch
from dlrm.embedding.capacity import HEADROOM, check_tables_fit, device_memory_bytes
from dlrm.embedding.initial_weights import fill_initial_weights
from dlrm.model import DenseNetwork, torchrec_names
from dlrm.ranks import Ranks
from pipeline.state import TABLE_PREFIX, ModelState, Part, Parts, gather, scatter, table_key


class StockPipeline:
    """TorchRec's own sharded DLRM_DCN under TrainPipelineSparseDist; see pipeline.interface.Pipeline."""

    def __init__(self, config: RunConfig, ranks: Ranks) -> None:
        """Needs an initialised process group; collective: every rank must construct it with the same config."""
        device = self._device = ranks.device
        self._config, self._ranks = config, ranks
        self._autocast = config.precision == "bf16"
        self._layout = _KJTLayout(config.model, config.local_batch_size, pin=device.type == "cuda")
        self._model, self._plan = _build_model(config, ranks)
        self._optimizer = _build_optimizer(self._model, config.optimizer)
        self._train = TrainPipelineSparseDist(self._model, self._optimizer, device)
        self._eval = TrainPipelineSparseDist(self._model, self._optimizer, device)

    @property
    def model(self) -> DistributedModelParallel:
        """The sharded model, for its state_dict."""
        return self._model

    @property
    def optimizer(self) -> CombinedOptimizer:
        """Fused embedding optimizer and dense optimizer together."""
        return self._optimizer

    def prepare(self, batch: Batch) -> TorchRecBatch:
        """A torchrec Batch over the same memory."""
        return TorchRecBatch(
            dense_features=batch.dense, sparse_features=self._layout.kjt(batch.ids), labels=batch.labels
        )

    def train_step(self, batches: Iterator[TorchRecBatch]) -> Tensor:
        """One `progress` of TrainPipelineSparseDist, which reads two batches ahead."""
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._autocast):
            loss, _, _ = self._train.progress(batches)
        return loss

    def evaluate(self, batches: Iterator[TorchRecBatch]) -> Iterator[tuple[Tensor, Tensor]]:
        """Runs a second TrainPipelineSparseDist on the same model, as the reference does."""
        self._train.detach()
        self._model.eval()
        try:
            with torch.no_grad(), torch.autocast(self._device.type, torch.bfloat16, enabled=self._autocast):
                while True:
                    try:
                        _, logits, labels = self._eval.progress(batches)
                    except StopIteration:
                        return
                    yield logits, labels
        finally:
            self._eval.detach()
            self._model.train()
            # The input dist of the batches in flight is done already: attach without starting it again.
            self._train.attach(sparse_dist=False)

    def state_dict(self) -> ModelState:
        """Weights and optimizer state after the last step, whole, on rank 0. Collective; see pipeline.state."""
        return gather(*self._parts(), self._ranks)

    def load_state_dict(self, state: ModelState) -> None:
        """Goes on from rank 0's `state`, of whatever pipeline; batches in flight stay. Collective; see pipeline.state.

        Writes through what the public state_dict of model and optimizer give, which is the memory they train.
        ValueError where the state is of another model.
        """
        scatter(state, *self._parts(), self._ranks)

    def _parts(self) -> tuple[Parts, Parts]:
        """Weights and optimizer state; ValueError where the latter is of the sharding and not of the model."""
        weights, state = self._model.state_dict(), self._optimizer.state_dict()["state"]
        table_optimizer = self._config.optimizer.embedding
        of_weights, of_optimizer = {}, {}
        for key, value in weights.items():
            name, is_table = key.removeprefix("model."), ".embedding_bags." in key
            of_weights[name] = _tensor_parts(value, value)
            if not is_table or table_optimizer != "sgd":
                parts = _tensor_parts(value, _sums(state.get(key, {})))
                of_optimizer[name] = _of_rows(name, parts) if is_table and table_optimizer != "adagrad" else parts
        return of_weights, of_optimizer

    def describe(self) -> dict[str, Any]:
        """Sharding type and ranks of every table, as the planner chose them."""
        tables = next(iter(self._plan.plan.values()))
        return {
            "sharding_plan": {
                name.removeprefix(TABLE_PREFIX): {
                    "sharding_type": sharding.sharding_type,
                    "compute_kernel": sharding.compute_kernel,
                    "ranks": sharding.ranks,
                }
                for name, sharding in tables.items()
            }
        }

    def close(self) -> None:
        """Nothing to free."""


class _KJTLayout:
    """The parts of a KJT that every batch of fixed multi-hot sizes shares, computed once as the reference does."""

    def __init__(self, model: ModelConfig, batch_size: int, pin: bool) -> None:
        sizes = torch.tensor(model.multi_hot_sizes, dtype=torch.int32)
        self.keys = list(model.feature_names)
        self.stride = batch_size
        self.lengths = sizes.repeat_interleave(batch_size)
        self.offsets = torch.cat([torch.zeros(1, dtype=torch.int64), self.lengths.cumsum(0)])
        if pin:
            self.lengths, self.offsets = self.lengths.pin_memory(), self.offsets.pin_memory()
        self.length_per_key = [batch_size * size for size in model.multi_hot_sizes]
        self.offset_per_key = [0, *torch.tensor(self.length_per_key).cumsum(0).tolist()]

    def kjt(self, values: Tensor) -> KeyedJaggedTensor:
        return KeyedJaggedTensor(
            keys=self.keys,
            values=values,
            lengths=self.lengths,
            offsets=self.offsets,
            stride=self.stride,
            length_per_key=self.length_per_key,
            offset_per_key=self.offset_per_key,
        )


def _build_model(config: RunConfig, ranks: Ranks) -> tuple[DistributedModelParallel, ShardingPlan]:
    model, device = config.model, ranks.device
    memory = device_memory_bytes(ranks)
    check_tables_fit(model, config.optimizer, memory, device)
    train_model = DLRMTrain(_build_unsharded(model, config.seed, device))
    optimizer, arguments = _table_optimizer(config.optimizer)
    apply_optimizer_in_backward(optimizer, train_model.model.sparse_arch.parameters(), arguments)
    planner = EmbeddingShardingPlanner(
        topology=Topology(
            world_size=ranks.world_size,
            local_world_size=ranks.local_world_size,
            compute_device=device.type,
            hbm_cap=memory if device.type == "cuda" else None,
            ddr_cap=memory if device.type == "cpu" else None,
        ),
        batch_size=config.local_batch_size,
        constraints={
            TABLE_PREFIX + name: ParameterConstraints(pooling_factors=[float(size)])
            for name, size in zip(model.feature_names, model.multi_hot_sizes, strict=True)
        },
        storage_reservation=HeuristicalStorageReservation(percentage=1 - HEADROOM),
    )
    try:
        plan = planner.collective_plan(train_model, get_default_sharders(), dist.GroupMember.WORLD)
    except PlannerError as error:
        raise ValueError(
            f"TorchRec's planner cannot place the tables in {memory / 1e9:.1f} GB a rank; use more GPUs, a smaller "
            f"--model.table-scale or a smaller --local-batch-size ({error})"
        ) from error
    sharded = DistributedModelParallel(module=train_model, device=device, plan=plan)
    _fill_tables(sharded, model, config.seed)
    return sharded, plan


def _build_unsharded(model: ModelConfig, seed: int, device: torch.device) -> DLRM_DCN:
    """TorchRec's DLRM_DCN, its tables on the meta device, with the initial dense weights of our DenseNetwork."""
    tables = [
        EmbeddingBagConfig(
            name=TABLE_PREFIX + name, embedding_dim=model.embedding_dim, num_embeddings=rows, feature_names=[name]
        )
        for name, rows in zip(model.feature_names, model.rows, strict=True)
    ]
    dlrm = DLRM_DCN(
        embedding_bag_collection=EmbeddingBagCollection(tables=tables, device=torch.device("meta")),
        dense_in_features=model.dense_in_features,
        dense_arch_layer_sizes=list(model.bottom_mlp),
        over_arch_layer_sizes=list(model.top_mlp),
        dcn_num_layers=model.cross_layers,
        dcn_low_rank_dim=model.cross_rank,
        dense_device=device,
    )
    dense = DenseNetwork(model)
    dense.init_weights(seed)
    theirs = torchrec_names(model)
    result = dlrm.load_state_dict({theirs[name]: value for name, value in dense.state_dict().items()}, strict=False)
    assert not result.unexpected_keys
    assert all("embedding_bags" in key for key in result.missing_keys)
    return dlrm


def _tensor_parts(weights: Tensor | ShardedTensor, tensor: Tensor | ShardedTensor | None) -> list[Part]:
    """Where `weights` has its shards, with the memory of `tensor`, sharded alike and None without a local shard."""
    if not isinstance(weights, ShardedTensor):
        assert isinstance(tensor, Tensor)
        return [Part.whole(tensor)]
    local = {}
    if isinstance(tensor, ShardedTensor):  # rowwise state has offsets of its own; its shards are in the same order
        for shard, of_weights in zip(tensor.local_shards(), weights.local_shards(), strict=True):
            local[tuple(of_weights.metadata.shard_offsets)] = shard.tensor
    return [
        Part(s.placement.rank(), tuple(s.shard_offsets), tuple(s.shard_sizes), local.get(tuple(s.shard_offsets)))
        for s in weights.metadata().shards_metadata
    ]


def _sums(state: dict[str, Any]) -> Tensor | ShardedTensor | None:
    """Adagrad's state, which a fused optimizer calls momentum1 and has only where there is a shard."""
    return next((value for name, value in state.items() if name == "sum" or name.endswith(".momentum1")), None)


def _of_rows(name: str, parts: list[Part]) -> list[Part]:
    """The parts of rowwise state, [rows, 1], of a table sharded as `parts`; ValueError where columns are split."""
    if any(part.start[1] > 0 for part in parts):
        raise ValueError(
            f"{name}: TorchRec's plan splits its columns, so rowwise Adagrad's state is of shards and not of rows: "
            "move states with --optimizer.embedding adagrad"
        )
    return [
        Part(p.owner, p.start, (p.shape[0], 1), p.local.view(-1, 1) if p.local is not None else None) for p in parts
    ]


def _fill_tables(sharded: DistributedModelParallel, model: ModelConfig, seed: int) -> None:
    state = sharded.state_dict()
    for table, rows in enumerate(model.rows):
        weights = state[f"model.{table_key(model, table)}"]
        for part in _tensor_parts(weights, weights):
            if part.local is not None:
                row, column = part.start
                fill_initial_weights(
                    part.local, seed=seed, table=table, num_embeddings=rows, row_offset=row, column_offset=column
                )


def _table_optimizer(config: OptimizerConfig) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Class and arguments of the tables' optimizer."""
    if config.embedding == "sgd":
        return torch.optim.SGD, {"lr": config.learning_rate}
    kind = torch.optim.Adagrad if config.embedding == "adagrad" else RowWiseAdagrad
    return kind, {"lr": config.learning_rate, "eps": config.eps}


def _build_optimizer(model: DistributedModelParallel, config: OptimizerConfig) -> CombinedOptimizer:
    not_fused = dict(in_backward_optimizer_filter(model.named_parameters()))
    # TorchRec leaves data-parallel tables to the dense optimizer.
    tables = {name: value for name, value in not_fused.items() if ".embedding_bags." in name}
    optimizers = [model.fused_optimizer]
    if tables and config.embedding != "adagrad":
        not_fused = {name: value for name, value in not_fused.items() if name not in tables}
        kind, arguments = _table_optimizer(config)
        optimizers.append(KeyedOptimizerWrapper(tables, lambda params: kind(params, **arguments)))
    optimizers.append(
        KeyedOptimizerWrapper(
            not_fused, lambda params: torch.optim.Adagrad(params, lr=config.learning_rate, eps=config.eps)
        )
    )
    return CombinedOptimizer(optimizers)
