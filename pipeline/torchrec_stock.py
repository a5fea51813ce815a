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
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from dlrm.config import ModelConfig, OptimizerConfig, RunConfig
from dlrm.data.batch import Batch
from dlrm.embedding.capacity import HEADROOM, check_tables_fit, device_memory_bytes
from dlrm.embedding.initial_weights import fill_initial_weights
from dlrm.model import DenseNetwork, torchrec_names
from dlrm.ranks import Ranks

_TABLE_PREFIX = "t_"


class StockPipeline:
    """TorchRec's own sharded DLRM_DCN under TrainPipelineSparseDist; see pipeline.interface.Pipeline."""

    def __init__(self, config: RunConfig, ranks: Ranks) -> None:
        """Needs an initialised process group; collective: every rank must construct it with the same config."""
        device = self._device = ranks.device
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

    def describe(self) -> dict[str, Any]:
        """Sharding type and ranks of every table, as the planner chose them."""
        tables = next(iter(self._plan.plan.values()))
        return {
            "sharding_plan": {
                name.removeprefix(_TABLE_PREFIX): {
                    "sharding_type": sharding.sharding_type,
                    "compute_kernel": sharding.compute_kernel,
                    "ranks": sharding.ranks,
                }
                for name, sharding in tables.items()
            }
        }


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
    check_tables_fit(model, memory, device)
    train_model = DLRMTrain(_build_unsharded(model, config.seed, device))
    apply_optimizer_in_backward(
        torch.optim.Adagrad,
        train_model.model.sparse_arch.parameters(),
        {"lr": config.optimizer.learning_rate, "eps": config.optimizer.eps},
    )
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
            _TABLE_PREFIX + name: ParameterConstraints(pooling_factors=[float(size)])
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
            name=_TABLE_PREFIX + name, embedding_dim=model.embedding_dim, num_embeddings=rows, feature_names=[name]
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


def _fill_tables(sharded: DistributedModelParallel, model: ModelConfig, seed: int) -> None:
    state = {name.split(".")[-2]: value for name, value in sharded.state_dict().items() if ".embedding_bags." in name}
    for table, (name, rows) in enumerate(zip(model.feature_names, model.rows, strict=True)):
        weights = state[_TABLE_PREFIX + name]
        if isinstance(weights, ShardedTensor):
            shards = [(shard.tensor, *shard.metadata.shard_offsets) for shard in weights.local_shards()]
        else:
            shards = [(weights, 0, 0)]  # data-parallel: every rank holds the whole table
        for tensor, row, column in shards:
            fill_initial_weights(
                tensor, seed=seed, table=table, num_embeddings=rows, row_offset=row, column_offset=column
            )


def _build_optimizer(model: DistributedModelParallel, config: OptimizerConfig) -> CombinedOptimizer:
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())),
        lambda params: torch.optim.Adagrad(params, lr=config.learning_rate, eps=config.eps),
    )
    return CombinedOptimizer([model.fused_optimizer, dense])
