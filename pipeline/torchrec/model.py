"""The parts that every pipeline over TorchRec's modules shares: the sharded DLRM_DCN, its optimizer, its batches, its
state.

EmbeddingBagCollection, EmbeddingShardingPlanner with the true pooling factors, DistributedModelParallel, exact Adagrad
fused into the embedding backward, torch.optim.Adagrad for the dense weights, as the MLPerf reference has them. See
mlcommons/training, recommendation_v2/torchrec_dlrm/dlrm_main.py.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from itertools import repeat
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.optim.apply_optimizer_in_backward import (
    _apply_optimizer_in_backward as apply_optimizer_in_backward,
)
from torchrec import EmbeddingBagCollection
from torchrec.datasets.utils import Batch as TorchRecBatch
from torchrec.distributed import DistributedModelParallel, TrainPipelineBase, TrainPipelineSparseDist
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
from torchrec.distributed.model_parallel import DataParallelWrapper
from torchrec.distributed.planner.types import ParameterConstraints, PlannerError
from torchrec.distributed.types import (
    CommOp,
    QuantizedCommCodecs,
    ShardedTensor,
    ShardingPlan,
    ShardingType,
)
from torchrec.models.dlrm import DLRM_DCN, DLRMTrain
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from dlrm_bench.dlrm.config import check_learning_rate
from dlrm_bench.dlrm.data.batch import Batch
from dlrm_bench.dlrm.dcnv2.config import DcnTraining, ModelConfig, OptimizerConfig
from dlrm_bench.dlrm.dcnv2.network import DenseNetwork
from dlrm_bench.dlrm.dcnv2.state_keys import TABLE_PREFIX, table_key, torchrec_names
from dlrm_bench.dlrm.dense.tallies import Tallies
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.dlrm.tables.initial_weights import fill_initial_weights
from dlrm_bench.dlrm.tables.table_memory import check_tables_fit, device_memory_bytes
from dlrm_bench.pipeline.state import StateBlocks, TensorBlock
from dlrm_bench.pipeline.torchrec.batch import BatchLayout
from dlrm_bench.pipeline.torchrec.guard import TorchRecLossGuard
from dlrm_bench.pipeline.torchrec.options import TorchRecModelOptions
from dlrm_bench.pipeline.torchrec.planner import sharding_planner, table_configs, table_optimizer

_WARM_UP_BATCHES = 3
Codecs = dict[str, QuantizedCommCodecs]
_BY_ROWS = (ShardingType.ROW_WISE, ShardingType.TABLE_ROW_WISE, ShardingType.GRID_SHARD)


class TorchRecPipeline(ABC):
    """TorchRec's sharded DLRM_DCN under one schedule or another; see pipeline/interface.py."""

    _caches_casts = True
    """Whether autocast keeps its casts of the weights. A captured graph must cast them itself, not read casts from
    before its capture."""

    def __init__(
        self,
        config: DcnTraining,
        options: TorchRecModelOptions,
        ranks: Ranks,
        sharder: EmbeddingBagCollectionSharder,
        left_out: Collection[ShardingType] = (),
        data_parallel: DataParallelWrapper | None = None,
    ) -> None:
        """Needs an initialised process group; collective: every rank must construct it with the same config.

        left_out: sharding types that the planner must not choose. data_parallel: how the dense network is replicated;
        None is TorchRec's default.
        """
        self._config, self._ranks, self._device = config, ranks, ranks.device
        self._layout = BatchLayout(config.model, config.local_batch_size, pin=ranks.device.type == "cuda")
        self._model, self._plan, self._guard = _build_model(config, options, ranks, sharder, left_out, data_parallel)
        self._optimizer = _build_optimizer(self._model, config.optimizer, self._guard)
        self._codecs: Codecs | None = sharder.qcomm_codecs_registry
        self._train, self._eval = self._schedule(training=True), self._schedule(training=False)

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
        return self._layout.batch(batch)

    def warm_up(self, evaluates: bool) -> None:
        """Evaluates empty batches where the run will evaluate. Nothing is trained: a step before the first batch would
        leave its own in the schedule."""
        if evaluates:
            batch = Batch.empty(self._config.local_batch_size, self._config.model, pin=self._device.type == "cuda")
            batch.storage.zero_()
            for _ in self.evaluate(map(self.prepare, repeat(batch, _WARM_UP_BATCHES))):
                pass

    def train_step(self, batches: Iterator[TorchRecBatch]) -> Tensor:
        """One `progress` of the schedule, which may read two batches ahead."""
        loss, _, _ = self._progress(self._train, batches)
        return loss

    def evaluate(self, batches: Iterator[TorchRecBatch]) -> Iterator[tuple[Tensor, Tensor]]:
        """Runs a second schedule on the same model, as the reference does."""
        with self._evaluating():
            while True:
                try:
                    with torch.no_grad():
                        _, logits, labels = self._progress(self._eval, batches)
                except StopIteration:
                    return
                yield logits, labels

    def tallies(self) -> Tallies:
        """See dlrm_bench.pipeline.interface.Pipeline."""
        return self._guard.tallies

    def set_learning_rate(self, value: float) -> None:
        """See dlrm_bench.pipeline.interface.Pipeline: of every parameter group; FBGEMM's fused update takes its group's
        in the optimizer's zero_grad, before the backward."""
        check_learning_rate(value)
        for group in self._optimizer.param_groups:
            group["lr"] = value

    def take_blocks(self, blocks: StateBlocks) -> None:
        """See dlrm_bench.pipeline.interface.Pipeline: the blocks are the memory that is trained."""
        self._synchronize()

    def state_blocks(self) -> StateBlocks:
        """See dlrm_bench.pipeline.interface.Pipeline; ValueError where the state is of the sharding and not of the
        model."""
        self._synchronize()
        weights, state = self._model.state_dict(), self._optimizer.state_dict()["state"]
        table_optimizer = self._config.optimizer.embedding
        of_weights, of_optimizer = {}, {}
        for key, value in weights.items():
            name, is_table = key.removeprefix("model."), ".embedding_bags." in key
            of_weights[name] = _tensor_blocks(value, value)
            if not is_table or table_optimizer != "sgd":
                blocks = _tensor_blocks(value, _sums(state.get(key, {})))
                of_optimizer[name] = _of_rows(name, blocks) if is_table and table_optimizer != "adagrad" else blocks
        return StateBlocks(of_weights, of_optimizer)

    @abstractmethod
    def close(self) -> None:
        """See dlrm_bench.pipeline.interface.Pipeline."""

    def describe(self) -> dict[str, Any]:
        """Sharding type and ranks of every table, as the planner chose them; formats of quantised collectives."""
        tables = next(iter(self._plan.plan.values()))
        described: dict[str, Any] = {
            "sharding_plan": {
                name.removeprefix(TABLE_PREFIX): {
                    "sharding_type": sharding.sharding_type,
                    "compute_kernel": sharding.compute_kernel,
                    "ranks": sharding.ranks,
                }
                for name, sharding in tables.items()
            }
        }
        if self._codecs is not None:
            codecs = self._codecs[CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL.name]
            dtypes = {"forward": codecs.forward.quantized_dtype, "backward": codecs.backward.quantized_dtype}
            described["quantized_comms"] = {way: str(dtype).removeprefix("torch.") for way, dtype in dtypes.items()}
        return described

    @abstractmethod
    def _schedule(self, training: bool) -> Any:
        """Returns what schedules model and optimizer, with the method `progress` of TorchRec's train pipelines.

        training: whether it is to train or to evaluate.
        """

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """The model in evaluation mode and the training's schedule out of the way, with its batches in flight."""
        # TorchRec's pipelines but for TrainPipelineBase rewrite the forward of the EBC, one of them at a time.
        rewritten = isinstance(self._train, TrainPipelineSparseDist)
        self._synchronize()
        if rewritten:
            self._train.detach()
        self._model.eval()
        try:
            yield
        finally:
            if isinstance(self._eval, TrainPipelineBase):
                self._eval.reset()
            elif rewritten:
                self._eval.detach()
            self._model.train()
            if rewritten:
                # The input dist of the batches in flight is done already: attach without starting it again.
                self._train.attach(sparse_dist=False)

    def _progress(self, schedule: Any, batches: Iterator[TorchRecBatch]) -> tuple[Tensor, Tensor, Tensor]:
        """Loss, logits [B] and labels [B] of the next batch, detached."""
        autocast = torch.autocast(
            self._device.type,
            torch.bfloat16,
            enabled=self._config.precision == "bf16",
            cache_enabled=self._caches_casts,
        )
        with autocast:
            return schedule.progress(batches)

    def _synchronize(self) -> None:
        """Waits for every stream: schedules read and update tables on streams of their own."""
        if self._device.type == "cuda":
            torch.cuda.synchronize()


def quantized_codecs(options: TorchRecModelOptions, device: torch.device) -> Codecs | None:
    """Returns the codecs of pooled vectors and their gradients for TorchRec's collectives; None where they stay fp32.

    Gradients of a mean loss are small, so they keep fp32's exponents: the pair of TorchRec's own example, see
    torchrec.distributed.fbgemm_qcomm_codec. On the CPU TorchRec puts fp16 in bf16's place.
    """
    if options.quantized_comms == "none":
        return None
    forward = {"bf16": CommType.BF16, "fp16": CommType.FP16}[options.quantized_comms]
    precisions = QCommsConfig(forward_precision=forward, backward_precision=CommType.BF16)
    return get_qcomm_codecs_registry(precisions, device=device)


class _PlanningSharder(EmbeddingBagCollectionSharder):
    """A sharder as the planner sees it, without some sharding types.

    ParameterConstraints leaves types out too, but through a set of names, whose order changes from process to process
    and with it the choice between equal plans.
    """

    def __init__(self, sharder: EmbeddingBagCollectionSharder, left_out: Collection[ShardingType]) -> None:
        super().__init__(sharder.fused_params, sharder.qcomm_codecs_registry)
        self._left_out = {kind.value for kind in left_out}

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """TorchRec's, but for those left out, in its order."""
        return [kind for kind in super().sharding_types(compute_device_type) if kind not in self._left_out]


def _build_model(
    config: DcnTraining,
    options: TorchRecModelOptions,
    ranks: Ranks,
    sharder: EmbeddingBagCollectionSharder,
    left_out: Collection[ShardingType],
    data_parallel: DataParallelWrapper | None,
) -> tuple[DistributedModelParallel, ShardingPlan, TorchRecLossGuard]:
    model, device = config.model, ranks.device
    memory = device_memory_bytes(ranks)
    check_tables_fit(model.tables, config.optimizer.tables, memory, device)
    train_model = DLRMTrain(_build_unsharded(model, config.seed, device))
    guard = TorchRecLossGuard(train_model, ranks)
    optimizer, arguments = table_optimizer(config.optimizer)
    apply_optimizer_in_backward(optimizer, train_model.model.sparse_arch.parameters(), arguments)
    constraints = {
        TABLE_PREFIX + name: ParameterConstraints(pooling_factors=[float(size)])
        for name, size in zip(model.feature_names, model.multi_hot_sizes, strict=True)
    }
    kind: Literal["cuda", "cpu"] = "cuda" if device.type == "cuda" else "cpu"
    machine = (ranks.world_size, ranks.local_world_size, kind, memory)
    planner = sharding_planner(constraints, config.local_batch_size, *machine)
    planned = _PlanningSharder(sharder, {*left_out, *(() if options.row_wise else _BY_ROWS)})
    try:
        plan = planner.collective_plan(train_model, [planned], dist.GroupMember.WORLD)
    except PlannerError as error:
        raise ValueError(
            f"TorchRec's planner cannot place the tables in {memory / 1e9:.1f} GB a rank; use more GPUs, a smaller "
            f"--model.table-scale or a smaller --local-batch-size ({error})"
        ) from error
    sharded = DistributedModelParallel(
        module=train_model, device=device, plan=plan, sharders=[sharder], data_parallel_wrapper=data_parallel
    )
    _fill_tables(sharded, model, config.seed)
    return sharded, plan, guard


def _build_unsharded(model: ModelConfig, seed: int, device: torch.device) -> DLRM_DCN:
    """TorchRec's DLRM_DCN, its tables on the meta device, with the initial dense weights of our DenseNetwork."""
    tables = table_configs(model.tables, TABLE_PREFIX)
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


def _tensor_blocks(weights: Tensor | ShardedTensor, tensor: Tensor | ShardedTensor | None) -> list[TensorBlock]:
    """Returns the blocks of `weights`, with the memory of `tensor`, sharded in the same way; None without a local
    shard."""
    if not isinstance(weights, ShardedTensor):
        assert isinstance(tensor, Tensor)
        return [TensorBlock.whole(tensor)]
    local = {}
    if isinstance(tensor, ShardedTensor):  # rowwise state has offsets of its own; its shards are in the same order
        for shard, of_weights in zip(tensor.local_shards(), weights.local_shards(), strict=True):
            local[tuple(of_weights.metadata.shard_offsets)] = shard.tensor
    return [
        TensorBlock(s.placement.rank(), tuple(s.shard_offsets), tuple(s.shard_sizes), local.get(tuple(s.shard_offsets)))
        for s in weights.metadata().shards_metadata
    ]


def _sums(state: dict[str, Any]) -> Tensor | ShardedTensor | None:
    """Adagrad's state, which a fused optimizer calls momentum1 and has only where there is a shard."""
    return next((value for name, value in state.items() if name == "sum" or name.endswith(".momentum1")), None)


def _of_rows(name: str, blocks: list[TensorBlock]) -> list[TensorBlock]:
    """Returns the blocks of rowwise state, [rows, 1], of a table of `blocks`; ValueError where columns are split."""
    if any(block.start[1] > 0 for block in blocks):
        raise ValueError(
            f"{name}: TorchRec's plan splits its columns, so rowwise Adagrad's state is of shards and not of rows: "
            "move states with --optimizer.embedding adagrad"
        )
    return [
        TensorBlock(b.owner, b.start, (b.shape[0], 1), b.local.view(-1, 1) if b.local is not None else None)
        for b in blocks
    ]


def _fill_tables(sharded: DistributedModelParallel, model: ModelConfig, seed: int) -> None:
    state = sharded.state_dict()
    for table, rows in enumerate(model.rows):
        weights = state[f"model.{table_key(model, table)}"]
        for part in _tensor_blocks(weights, weights):
            if part.local is not None:
                row, column = part.start
                fill_initial_weights(
                    part.local, seed=seed, table=table, num_embeddings=rows, row_offset=row, column_offset=column
                )


def _build_optimizer(
    model: DistributedModelParallel, config: OptimizerConfig, guard: TorchRecLossGuard
) -> CombinedOptimizer:
    not_fused = dict(in_backward_optimizer_filter(model.named_parameters()))
    # TorchRec leaves data-parallel tables to the dense optimizer.
    tables = {name: value for name, value in not_fused.items() if ".embedding_bags." in name}
    optimizers = [model.fused_optimizer, guard.gate(not_fused.values())]
    if tables and config.embedding != "adagrad":
        not_fused = {name: value for name, value in not_fused.items() if name not in tables}
        kind, arguments = table_optimizer(config)
        optimizers.append(KeyedOptimizerWrapper(tables, lambda params: kind(params, **arguments)))
    optimizers.append(
        KeyedOptimizerWrapper(
            not_fused, lambda params: torch.optim.Adagrad(params, lr=config.learning_rate, eps=config.eps)
        )
    )
    return CombinedOptimizer(optimizers)
