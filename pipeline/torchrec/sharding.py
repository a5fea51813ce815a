"""Shards a benchmark's model with TorchRec: its embedding collections, sharders, a plan, initial weights."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim.apply_optimizer_in_backward import (
    _apply_optimizer_in_backward as apply_optimizer_in_backward,
)
from torchrec import EmbeddingBagCollection, EmbeddingCollection
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
from torchrec.distributed.model_parallel import DataParallelWrapper
from torchrec.distributed.planner.types import PlannerError
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.types import QuantizedCommCodecs, ShardingPlan, ShardingType

from dlrm_bench.dlrm.config import TrainingConfig, require
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.dlrm.tables.initial_weights import fill_initial_weights
from dlrm_bench.dlrm.tables.plan.constraints import FLAG, described
from dlrm_bench.dlrm.tables.table_memory import check_tables_fit, device_memory_bytes, host_memory_bytes
from dlrm_bench.dlrm.tables.tables import Tables
from dlrm_bench.dlrm.torchrec_model import TorchRecModel
from dlrm_bench.pipeline.torchrec.constraints import check_offered, with_constraints
from dlrm_bench.pipeline.torchrec.guard import TorchRecLossGuard
from dlrm_bench.pipeline.torchrec.options import TorchRecModelOptions
from dlrm_bench.pipeline.torchrec.planner import sharding_planner, table_optimizer
from dlrm_bench.pipeline.torchrec.state import tensor_blocks

Codecs = dict[str, QuantizedCommCodecs]
_BY_ROWS = (ShardingType.ROW_WISE, ShardingType.TABLE_ROW_WISE, ShardingType.GRID_SHARD)


@dataclass(frozen=True, slots=True)
class Sharders:
    """The sharders of each kind of collection, with the same codecs."""

    bags: EmbeddingBagCollectionSharder
    sequences: EmbeddingCollectionSharder

    @classmethod
    def of_torchrec(cls, codecs: Codecs | None, drops_repeats: bool) -> "Sharders":
        """Returns TorchRec's own sharders. drops_repeats: whether to deduplicate the ids of sequences."""
        return cls(
            EmbeddingBagCollectionSharder(qcomm_codecs_registry=codecs),
            EmbeddingCollectionSharder(qcomm_codecs_registry=codecs, use_index_dedup=drops_repeats),
        )

    def of(self, collection: nn.Module) -> Any:
        """Returns the sharder of a collection."""
        return self.bags if isinstance(collection, EmbeddingBagCollection) else self.sequences


@dataclass(frozen=True, slots=True)
class Built:
    """A sharded model with the objects from its construction that the pipeline keeps."""

    model: DistributedModelParallel
    plan: ShardingPlan
    tables: frozenset[str]
    """Names of the tables' weights in the state_dict."""
    guard: TorchRecLossGuard


def quantized_codecs(options: TorchRecModelOptions, device: torch.device) -> Codecs | None:
    """Returns the codecs of looked-up vectors and their gradients for TorchRec's collectives; None if these stay fp32.

    Gradients of a mean loss are small, so they use bf16, with fp32's exponents, as in TorchRec's own example, see
    torchrec.distributed.fbgemm_qcomm_codec. On the CPU TorchRec puts fp16 in bf16's place.
    """
    if options.quantized_comms == "none":
        return None
    forward = {"bf16": CommType.BF16, "fp16": CommType.FP16}[options.quantized_comms]
    precisions = QCommsConfig(forward_precision=forward, backward_precision=CommType.BF16)
    return get_qcomm_codecs_registry(precisions, device=device)


def build_sharded(
    config: TrainingConfig,
    of_benchmark: TorchRecModel,
    options: TorchRecModelOptions,
    ranks: Ranks,
    sharders: Sharders,
    left_out: Collection[ShardingType],
    data_parallel: DataParallelWrapper | None,
) -> Built:
    """Returns the model, sharded and with its initial weights. Collective.

    left_out: sharding types that the planner must not choose. data_parallel: how the dense network is replicated; None
    is TorchRec's default. ValueError, on every rank, if the tables do not fit.
    """
    memory = device_memory_bytes(ranks) + (_host_bytes(options, ranks) or 0)
    check_tables_fit(config.model.tables, config.optimizer.tables, memory, ranks.device)
    module = of_benchmark.module
    collections = {
        path: part
        for path, part in module.named_modules()
        if isinstance(part, EmbeddingBagCollection | EmbeddingCollection)
    }
    guard = TorchRecLossGuard(module, ranks)
    rows: dict[str, int] = {}
    optimizer, arguments = table_optimizer(config.optimizer)
    for path, part in collections.items():
        apply_optimizer_in_backward(optimizer, part.parameters(), dict(arguments))
        rows |= {f"{path}.{name}": len(weights) for name, weights in part.named_parameters()}
    of_kinds = [sharder for sharder in (sharders.bags, sharders.sequences) if _has(collections, sharder)]
    plan = _plan(config, of_benchmark, options, ranks, collections, sharders, left_out)
    sharded = DistributedModelParallel(
        module=module, device=ranks.device, plan=plan, sharders=of_kinds, data_parallel_wrapper=data_parallel
    )
    guard.watch_lookups(sharded)
    _fill_tables(sharded, rows, config.seed)
    return Built(sharded, plan, frozenset(rows), guard)


def _plan(
    config: TrainingConfig,
    of_benchmark: TorchRecModel,
    options: TorchRecModelOptions,
    ranks: Ranks,
    collections: Mapping[str, nn.Module],
    sharders: Sharders,
    left_out: Collection[ShardingType],
) -> ShardingPlan:
    """Returns the plan of all tables, under the user's constraints. Collective."""
    tables = config.model.tables
    constraints = options.constraints_on(tables)
    assert tables.whole == (of_benchmark.constraints is None and not of_benchmark.by_rows), "--print-plan shows it"
    if of_benchmark.constraints is None:
        require(
            not constraints,
            f"{FLAG}: this model's tables are assigned round-robin, without TorchRec's planner; leave it out",
        )
        return _plan_of_all(collections, tables, sharders, ranks, of_benchmark.by_rows)
    assert not _has(collections, sharders.sequences), "the planner handles EmbeddingBagCollections only"
    left_out = {*left_out, *(() if options.row_wise else _BY_ROWS)}
    planned = _PlanningSharder(sharders.bags, left_out)
    of_tables = with_constraints(
        of_benchmark.constraints, constraints, tables, of_benchmark.table_prefix, options.prefetches
    )
    kind: Literal["cuda", "cpu"] = "cuda" if ranks.device.type == "cuda" else "cpu"
    check_offered(constraints, tables, planned.sharding_types(kind))
    memory = device_memory_bytes(ranks)
    machine = (ranks.world_size, ranks.local_world_size, kind, memory, _host_bytes(options, ranks))
    planner = sharding_planner(of_tables, config.local_batch_size, *machine)
    try:
        return planner.collective_plan(of_benchmark.module, [cast(Any, planned)], dist.GroupMember.WORLD)
    except PlannerError as error:
        also = f", or leave out some of {FLAG} {described(constraints, tables)}" if constraints else ""
        raise ValueError(
            f"TorchRec's planner cannot place the tables in {memory / 1e9:.1f} GB per rank; use more GPUs, a smaller "
            f"--model.table-scale or a smaller --local-batch-size{also} ({error})"
        ) from error


def _host_bytes(options: TorchRecModelOptions, ranks: Ranks) -> int | None:
    """Returns a rank's share of host memory for tables that constraints keep there; None if there are none."""
    return None if options.in_host_memory() is None else host_memory_bytes(ranks)


class _PlanningSharder(EmbeddingBagCollectionSharder):
    """A sharder for the planner, without some sharding types.

    ParameterConstraints can exclude types too, but through a set of names, whose order changes from process to process,
    and with it the choice between equal plans.
    """

    def __init__(self, sharder: EmbeddingBagCollectionSharder, left_out: Collection[ShardingType]) -> None:
        super().__init__(sharder.fused_params, sharder.qcomm_codecs_registry)
        self._left_out = {kind.value for kind in left_out}

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Returns TorchRec's sharding types, without those left out, in its order."""
        return [kind for kind in super().sharding_types(compute_device_type) if kind not in self._left_out]


def _has(collections: Mapping[str, nn.Module], sharder: Any) -> bool:
    return any(isinstance(part, sharder.module_type) for part in collections.values())


def _plan_of_all(
    collections: Mapping[str, nn.Module], tables: Tables, sharders: Sharders, ranks: Ranks, by_rows: bool
) -> ShardingPlan:
    """Returns a plan that assigns whole tables to their owners, or each table by rows to all ranks. tables: those of
    the collections, in their order."""
    plans, owners = {}, iter(tables.owners(ranks.world_size))
    for path, part in collections.items():
        of_table = {}
        for table in sharders.of(part).shardable_parameters(part):
            of_table[table] = row_wise() if by_rows else table_wise(rank=next(owners))
        plans[path] = construct_module_sharding_plan(
            part,
            of_table,
            sharders.of(part),
            local_size=ranks.local_world_size,
            world_size=ranks.world_size,
            device_type=ranks.device.type,
        )
    return ShardingPlan(plans)


def _fill_tables(sharded: DistributedModelParallel, rows: Mapping[str, int], seed: int) -> None:
    """Fills the tables. rows: of each table, by the name of its weights, in the order that numbers the tables."""
    state: dict[str, Tensor] = sharded.state_dict()
    for table, (name, num_embeddings) in enumerate(rows.items()):
        for part in tensor_blocks(state[name], state[name]):
            if isinstance(part.local, Tensor):
                row, column = part.start
                fill_initial_weights(
                    part.local,
                    seed=seed,
                    table=table,
                    num_embeddings=num_embeddings,
                    row_offset=row,
                    column_offset=column,
                )
