"""A plan of the static EBC as TorchRec's EmbeddingShardingPlanner makes it, from the sharding types that both have.

Table-wise and column-wise shards stay where TorchRec puts them; data-parallel tables become replicated ones.
"""

import math
from collections.abc import Mapping
from itertools import groupby
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.optim.apply_optimizer_in_backward import (
    _apply_optimizer_in_backward as apply_optimizer_in_backward,
)
from torchrec import EmbeddingBagCollection
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.model_parallel import get_default_sharders
from torchrec.distributed.planner.types import ParameterConstraints, PlannerError
from torchrec.distributed.types import EnumerableShardingSpec, ParameterSharding, ShardingType

from dlrm_bench.dlrm.config import ModelConfig, TableOptimizer, TrainingConfig
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.dlrm.tables.plan.plan import Plan, Shard
from dlrm_bench.dlrm.tables.plan.planner import NARROWEST, can_replicate
from dlrm_bench.dlrm.tables.plan.torchrec_planner import sharding_planner, table_configs, table_optimizer
from dlrm_bench.dlrm.tables.table_memory import device_memory_bytes

# Data-parallel tables of TorchRec's may have any size; replicated.py sums the gradients of all rows in every iteration.
DATA_PARALLEL_ROWS = 10_000
# Without a lower bound TorchRec splits no table of 128 columns.
_COLUMN_SHARDS = 4
# All others leave tables in host memory.
_KERNELS = [EmbeddingComputeKernel.FUSED.value, EmbeddingComputeKernel.DENSE.value]


def torchrec_plan(config: TrainingConfig, ranks: Ranks) -> Plan:
    """Returns rank 0's plan, on every rank; ValueError, on every rank too, where there is none. Collective."""
    answer: list[Plan | ValueError | None] = [None]
    if ranks.rank == 0:
        kind: Literal["cuda", "cpu"] = "cuda" if ranks.device.type == "cuda" else "cpu"
        sizes = (ranks.world_size, ranks.local_world_size)
        try:
            answer = [make_torchrec_plan(config, *sizes, kind, device_memory_bytes(ranks))]
        except ValueError as error:
            answer = [error]
    dist.broadcast_object_list(answer, src=0)
    (plan,) = answer
    if isinstance(plan, ValueError):
        raise plan
    assert plan is not None
    return plan


def make_torchrec_plan(
    config: TrainingConfig,
    world_size: int,
    local_world_size: int,
    device: Literal["cuda", "cpu"],
    memory_bytes: int,
) -> Plan:
    """Returns the plan for `world_size` ranks of `memory_bytes` each. ValueError where there is none.

    Data-parallel tables are offered to TorchRec first; where it then leaves a rank without any shard, which the static
    EBC does not have, they are not.
    """
    model, optimizer = config.model, config.optimizer.embedding
    for data_parallel in (True, False) if can_replicate(model.embedding_dim, world_size, optimizer) else (False,):
        shardings = _shardings(config, world_size, local_world_size, device, memory_bytes, data_parallel)
        plan = convert(shardings, model, world_size, optimizer)
        if all(plan.of_rank(rank) for rank in range(world_size)):
            plan.check(model)
            return plan
    raise ValueError(
        f"--plan torchrec: TorchRec's planner leaves some of {world_size} ranks without a table: use --plan balanced, "
        "which splits tables where need be, or fewer ranks"
    )


def convert(
    shardings: Mapping[str, ParameterSharding], model: ModelConfig, world_size: int, optimizer: TableOptimizer
) -> Plan:
    """Returns the plan that places the tables, which have their features' names, as TorchRec's does.

    Where a rank holds shards of several widths it gets narrower pieces of the wide ones, all of one width: exact
    Adagrad and SGD treat each column by itself. ValueError for other sharding types than table-wise, column-wise and
    data-parallel, and for what the optimizer does not allow.
    """
    shards: list[Shard] = []
    replicated = []
    for table, name in enumerate(model.feature_names):
        sharding = shardings[name]
        if sharding.sharding_type == ShardingType.DATA_PARALLEL.value:
            replicated.append(table)
        elif sharding.sharding_type in (ShardingType.TABLE_WISE.value, ShardingType.COLUMN_WISE.value):
            assert isinstance(sharding.sharding_spec, EnumerableShardingSpec)
            shards += [
                Shard(part.placement.rank(), table, part.shard_offsets[1], part.shard_sizes[1])
                for part in sharding.sharding_spec.shards
            ]
        else:
            raise ValueError(
                f"--plan torchrec: table {name} is sharded {sharding.sharding_type}, and --pipeline static has "
                "table_wise, column_wise and data_parallel only: use --plan balanced"
            )
    if replicated and not can_replicate(model.embedding_dim, world_size, optimizer):
        raise ValueError(
            f"--plan torchrec: table {model.feature_names[replicated[0]]} is data_parallel, which --pipeline "
            "static has for several ranks, exact Adagrad and 2^n columns only: use --plan balanced"
        )
    if optimizer == "rowwise_adagrad" and any(shard.columns != model.embedding_dim for shard in shards):
        raise ValueError(
            "--plan torchrec: a table is sharded column_wise, and rowwise Adagrad's state is of whole rows: use "
            "--optimizer.embedding adagrad or --plan balanced"
        )
    return Plan(world_size=world_size, shards=tuple(_of_one_width(sorted(shards))), replicated=tuple(replicated))


def _of_one_width(shards: list[Shard]) -> list[Shard]:
    """Returns the same columns on the same ranks, all of a rank in pieces of the widest width that divides them."""
    pieces = []
    for rank, of_rank in groupby(shards, key=lambda shard: shard.rank):
        own = list(of_rank)
        width = math.gcd(*(shard.columns for shard in own))
        pieces += [
            Shard(rank, shard.table, column, width)
            for shard in own
            for column in range(shard.column, shard.column + shard.columns, width)
        ]
    return sorted(pieces)


def _shardings(
    config: TrainingConfig,
    world_size: int,
    local_world_size: int,
    device: Literal["cuda", "cpu"],
    memory_bytes: int,
    data_parallel: bool,
) -> Mapping[str, ParameterSharding]:
    """Returns the sharding of each table, by its feature's name; the planner is set up as for TorchRec's own model."""
    model = config.model
    collection = EmbeddingBagCollection(tables=table_configs(model), device=torch.device("meta"))
    module = torch.nn.ModuleDict({"ebc": collection})
    optimizer, arguments = table_optimizer(config.optimizer)
    apply_optimizer_in_backward(optimizer, module.parameters(), arguments)
    width = model.embedding_dim // _COLUMN_SHARDS
    splits = config.optimizer.embedding != "rowwise_adagrad" and width % NARROWEST == 0

    def constraints(rows: int, pooling_factor: int) -> ParameterConstraints:
        types = [ShardingType.TABLE_WISE.value]
        if splits:
            types.append(ShardingType.COLUMN_WISE.value)
        if data_parallel and rows <= DATA_PARALLEL_ROWS:
            types.append(ShardingType.DATA_PARALLEL.value)
        return ParameterConstraints(
            sharding_types=types,
            compute_kernels=_KERNELS,
            pooling_factors=[float(pooling_factor)],
            min_partition=width if splits else None,
        )

    by_table = {
        name: constraints(rows, size)
        for name, rows, size in zip(model.feature_names, model.rows, model.multi_hot_sizes, strict=True)
    }
    machine = (world_size, local_world_size, device, memory_bytes)
    planner = sharding_planner(by_table, config.local_batch_size, *machine)
    try:
        plan = planner.plan(module, get_default_sharders())
    except PlannerError as error:
        raise ValueError(
            f"--plan torchrec: TorchRec's planner cannot place the tables in {memory_bytes / 1e9:.1f} GB a rank; use "
            f"--plan balanced, more GPUs or a smaller --model.table-scale ({error})"
        ) from error
    return plan.plan["ebc"]
