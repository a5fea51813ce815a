"""DLRMv4 under TorchRec's DistributedModelParallel: each table split by rows over all ranks.

Rows of a table are read about equally often, so that each rank has an equal part of the work; and the optimizer needs
whole rows (optimizers.py). The benchmark's 559 GiB leave no room for whole tables on single ranks anyway.
"""

import torch
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import QuantizedCommCodecs, ShardingPlan

from dlrm_bench.dlrm.config import require
from dlrm_bench.dlrm.dlrmv4.config import Dlrmv4Training, Exchange, tables
from dlrm_bench.dlrm.dlrmv4.counts import memory_bytes
from dlrm_bench.dlrm.dlrmv4.model import build_model, fill_tables
from dlrm_bench.dlrm.dlrmv4.optimizers import RampedOptimizer, fuse_table_optimizer
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.dlrm.tables.table_memory import table_memory_bytes


def build_sharded(
    config: Dlrmv4Training, ranks: Ranks, exchange: Exchange = "fp32"
) -> tuple[DistributedModelParallel, RampedOptimizer]:
    """Returns the model with its initial weights, and its optimizer, for any of TorchRec's train pipelines. Collective.

    exchange: number format of rows and of their gradients on their way between ranks. fp16 is the reference's default,
    though its README says fp32.

    On GPUs the input dist drops a batch's repeated ids (use_index_dedup), which are nearly all of them; FBGEMM has no
    such operator for CPUs. ValueError, on every rank, where the tables do not fit.
    """
    check_tables_fit(config, ranks.world_size, table_memory_bytes(ranks))
    model = build_model(config, ranks.device)
    fuse_table_optimizer(model, config.optimizer)
    sharder = EmbeddingCollectionSharder(
        qcomm_codecs_registry=_codecs(exchange, ranks.device), use_index_dedup=ranks.device.type == "cuda"
    )
    plan = construct_module_sharding_plan(
        model.model.embeddings,
        {table.name: row_wise() for table in tables(config.model)},
        sharder=sharder,
        world_size=ranks.world_size,
        local_size=ranks.local_world_size,
        device_type=ranks.device.type,
    )
    sharded = DistributedModelParallel(
        model, device=ranks.device, plan=ShardingPlan({"model.embeddings": plan}), sharders=[sharder]
    )
    fill_tables(sharded, config.model, config.seed)
    return sharded, RampedOptimizer(sharded, config.optimizer)


def _codecs(exchange: Exchange, device: torch.device) -> dict[str, QuantizedCommCodecs] | None:
    """Returns TorchRec's codecs of what ranks exchange of tables; on CPUs it has bf16 in fp16's place."""
    if exchange == "fp32":
        return None
    precisions = QCommsConfig(forward_precision=CommType.FP16, backward_precision=CommType.FP16)
    return get_qcomm_codecs_registry(precisions, device=device)


def check_tables_fit(config: Dlrmv4Training, world_size: int, available: int) -> None:
    """ValueError unless a rank's part of tables and states fits in `available` bytes."""
    memory = memory_bytes(config.model)
    needed = (memory["tables"] + memory["table_states"]) / world_size
    require(
        needed <= available,
        f"the tables do not fit: their part of {world_size} rank(s) is {needed / 1e9:.1f} GB and a rank has "
        f"{available / 1e9:.1f} GB; use more GPUs, --preset dlrmv4-one-gpu or dlrmv4-two-gpus, or fewer rows "
        "(--model.event-rows, --model.context-rows)",
    )
