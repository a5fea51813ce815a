"""The set-up of TorchRec's planner that every use of it shares: the tables, their optimizer and the machine."""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torchrec import EmbeddingBagConfig
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.storage_reservations import HeuristicalStorageReservation
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.optim import RowWiseAdagrad

from dlrm_bench.dlrm.config import ModelConfig, OptimizerConfig
from dlrm_bench.dlrm.tables.table_memory import HEADROOM


def table_configs(model: ModelConfig, prefix: str = "") -> list[EmbeddingBagConfig]:
    """The tables, each called by `prefix` and the name of its one feature."""
    return [
        EmbeddingBagConfig(
            name=prefix + name, embedding_dim=model.embedding_dim, num_embeddings=rows, feature_names=[name]
        )
        for name, rows in zip(model.feature_names, model.rows, strict=True)
    ]


def table_optimizer(config: OptimizerConfig) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Class and arguments of the tables' optimizer, whose state the planner counts."""
    if config.embedding == "sgd":
        return torch.optim.SGD, {"lr": config.learning_rate}
    kind = torch.optim.Adagrad if config.embedding == "adagrad" else RowWiseAdagrad
    return kind, {"lr": config.learning_rate, "eps": config.eps}


def sharding_planner(
    constraints: Mapping[str, ParameterConstraints],
    batch_size: int,
    world_size: int,
    local_world_size: int,
    device: Literal["cuda", "cpu"],
    memory_bytes: int,
) -> EmbeddingShardingPlanner:
    """TorchRec's planner. constraints: by table. batch_size: local. memory_bytes: of each rank, without headroom."""
    return EmbeddingShardingPlanner(
        topology=Topology(
            world_size=world_size,
            local_world_size=local_world_size,
            compute_device=device,
            hbm_cap=memory_bytes if device == "cuda" else None,
            ddr_cap=memory_bytes if device == "cpu" else None,
        ),
        batch_size=batch_size,
        constraints=dict(constraints),
        storage_reservation=HeuristicalStorageReservation(percentage=1 - HEADROOM),
    )
