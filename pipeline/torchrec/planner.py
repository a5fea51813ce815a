"""The set-up of TorchRec's planner: the tables' optimizer, whose state counts as memory, and the machine."""

from collections.abc import Mapping
from typing import Any, Literal

import torch
import torchrec.optim
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.storage_reservations import HeuristicalStorageReservation
from torchrec.distributed.planner.types import ParameterConstraints

from dlrm_bench.dlrm.config import OptimizerOptions
from dlrm_bench.dlrm.optimizers import SGD, Adagrad
from dlrm_bench.dlrm.tables.table_memory import HEADROOM


def table_optimizer(config: OptimizerOptions) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Returns class and arguments of the tables' optimizer, whose state the planner counts as memory."""
    optimizer, rate = config.tables, {"lr": config.learning_rate}
    if isinstance(optimizer, SGD):
        return torch.optim.SGD, rate
    kind = torch.optim.Adagrad if isinstance(optimizer, Adagrad) else torchrec.optim.RowWiseAdagrad
    return kind, {**rate, "eps": optimizer.eps}


def sharding_planner(
    constraints: Mapping[str, ParameterConstraints],
    batch_size: int,
    world_size: int,
    local_world_size: int,
    device: Literal["cuda", "cpu"],
    memory_bytes: int,
    host_bytes: int | None = None,
) -> EmbeddingShardingPlanner:
    """Returns TorchRec's planner. constraints: by table. batch_size: local. memory_bytes: of each rank's device,
    without headroom. host_bytes: of each rank, for tables that are not on its GPU; None is TorchRec's default."""
    return EmbeddingShardingPlanner(
        topology=Topology(
            world_size=world_size,
            local_world_size=local_world_size,
            compute_device=device,
            hbm_cap=memory_bytes if device == "cuda" else None,
            ddr_cap=memory_bytes if device == "cpu" else host_bytes,
        ),
        batch_size=batch_size,
        constraints=dict(constraints),
        storage_reservation=HeuristicalStorageReservation(percentage=1 - HEADROOM),
    )
