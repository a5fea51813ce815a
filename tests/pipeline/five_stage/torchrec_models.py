"""Small TorchRec models with plans made by hand, trained by any TorchRec pipeline: what one rank has afterwards."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.optim.apply_optimizer_in_backward import (
    _apply_optimizer_in_backward as apply_optimizer_in_backward,
)
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardedTensor, ShardingPlan
from torchrec.models.dlrm import DLRM, DLRM_DCN, DLRMTrain
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from dlrm_bench.dlrm.runtime.ranks import Ranks
from tests.pipeline.five_stage.trimmed.cases import twcw

ROWS = (50, 7, 30, 90, 61, 40)
DIM = 16
FEATURES = [f"f{i}" for i in range(len(ROWS))]
HOT = dict(zip(FEATURES, (3, 1, 2, 4, 1, 2), strict=True))
"""Multi-hot sizes of batches that have fixed ones."""
DENSE_FEATURES = 5
BATCH = 6

TW, CW, TWCW, RW, DP = "table_wise", "column_wise", "table_column_wise", "row_wise", "data_parallel"
OF_FIRST = "table_wise of rank 0"
PLANS = {"TW": [TW] * 6, "CW": [CW] * 6, "RW": [RW] * 6, "DP": [DP] * 6, "mixed": [TW, DP, RW, CW, TW, DP]}
PLANS["TW of rank 0"] = [OF_FIRST] * 6
WITHOUT_ROWS = {"mixed without RW": [TW, DP, DP, CW, TW, CW], "mixed with TWCW": [TW, DP, TWCW, CW, TWCW, TWCW]}

Kind = Literal["dcn", "dot"]


@dataclass(slots=True)
class Trained:
    """On the CPU, of one rank."""

    outputs: list[tuple[Tensor, ...]] = field(default_factory=list)
    """What each `progress` gave: loss, logits, labels."""
    state: dict[str, Tensor] = field(default_factory=dict)
    """Local weights and optimizer state."""
    captured: bool = False
    """Whether the dense part was replayed as a CUDA graph at the end."""


def build(
    ranks: Ranks,
    plan: str,
    kind: Kind = "dcn",
    change: Callable[[DLRMTrain], None] = lambda model: None,
    sharder: EmbeddingBagCollectionSharder | None = None,
    tables_by: type[torch.optim.Optimizer] = torch.optim.Adagrad,
    dense_by: Callable[[Any], torch.optim.Optimizer] = lambda of: torch.optim.Adagrad(of, lr=0.05, eps=1e-8),
) -> tuple[DistributedModelParallel, Any]:
    """A sharded model and its optimizer. Collective; the same weights whatever the plan, and on every call.

    change: what to do to the model before it is sharded.
    """
    device = ranks.device
    names = [f"t_{feature}" for feature in FEATURES]
    tables = [
        EmbeddingBagConfig(name=name, embedding_dim=DIM, num_embeddings=rows, feature_names=[feature])
        for name, rows, feature in zip(names, ROWS, FEATURES, strict=True)
    ]
    torch.manual_seed(0)
    collection = EmbeddingBagCollection(tables=tables, device=torch.device("cpu"))
    arguments: dict[str, Any] = {
        "embedding_bag_collection": collection,
        "dense_in_features": DENSE_FEATURES,
        "dense_arch_layer_sizes": [12, DIM],
        "over_arch_layer_sizes": [12, 1],
    }
    model = DLRM_DCN(dcn_num_layers=2, dcn_low_rank_dim=4, **arguments) if kind == "dcn" else DLRM(**arguments)
    train = DLRMTrain(model)
    change(train)
    of_tables = {"lr": 0.05} if tables_by is torch.optim.SGD else {"lr": 0.05, "eps": 1e-8}
    apply_optimizer_in_backward(tables_by, train.model.sparse_arch.parameters(), of_tables)
    weights = {key: value.clone() for key, value in train.state_dict().items()}
    sharders = None if sharder is None else [sharder]
    planned = _plan(collection, plan, ranks)
    sharded = DistributedModelParallel(module=train, device=device, plan=planned, sharders=sharders)
    _fill(sharded, weights)
    dense = dict(in_backward_optimizer_filter(sharded.named_parameters()))
    return sharded, CombinedOptimizer([sharded.fused_optimizer, KeyedOptimizerWrapper(dense, dense_by)])


def batches(
    ranks: Ranks, count: int, seed: int = 1, size: int = BATCH, lengths_known: bool = False, fixed: bool = False
) -> list[Batch]:
    """Bags of 0 to 4 ids, or with `fixed` of as many as HOT says; those of other ranks and seeds are others."""
    generator = torch.Generator().manual_seed(1000 * seed + ranks.rank)
    result = []
    for _ in range(count):
        lengths = torch.randint(0, 5, (len(FEATURES), size), generator=generator, dtype=torch.int32)
        if fixed:
            lengths[:] = torch.tensor(list(HOT.values()), dtype=torch.int32).view(-1, 1)
        ids = [
            torch.randint(0, rows, (int(of.sum()),), generator=generator)
            for rows, of in zip(ROWS, lengths, strict=True)
        ]
        features = KeyedJaggedTensor(keys=FEATURES, values=torch.cat(ids), lengths=lengths.view(-1), stride=size)
        batch = Batch(
            dense_features=torch.rand(size, DENSE_FEATURES, generator=generator),
            sparse_features=features.sync() if lengths_known else features,
            labels=torch.randint(0, 2, (size,), generator=generator).float(),
        )
        result.append(batch.pin_memory() if ranks.device.type == "cuda" else batch)
    return result


def drain(pipeline: Any, batches: Iterator[Batch], each: Callable[[int], None] = lambda step: None) -> Trained:
    """Calls `progress` until it raises StopIteration, and `each` before every call. Reads nothing before the end."""
    outputs: list[tuple[Tensor, ...]] = []
    while True:
        each(len(outputs))
        try:
            outputs.append(pipeline.progress(batches))
        except StopIteration:
            return Trained([tuple(tensor.detach().cpu() for tensor in output) for output in outputs])


def state(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """Every local tensor of weights and optimizer state by its name, copied."""
    result = {}
    for name, value in model.state_dict().items():
        result |= _local(name, value)
    for key, of_key in optimizer.state_dict()["state"].items():
        for name, value in of_key.items():
            result |= _local(f"{key}/{name}", value)
    return result


def _plan(collection: EmbeddingBagCollection, plan: str, ranks: Ranks) -> ShardingPlan:
    world = ranks.world_size
    of_table = {}
    for i, (feature, sharding) in enumerate(zip(FEATURES, (PLANS | WITHOUT_ROWS)[plan], strict=True)):
        of_table[f"t_{feature}"] = {
            TW: table_wise(rank=i % world),
            OF_FIRST: table_wise(rank=0),
            CW: column_wise(ranks=[i % world, (i + 1) % world]),
            TWCW: twcw([i % world, (i + 1) % world]),
            RW: row_wise(),
            DP: data_parallel(),
        }[sharding]
    module_plan = construct_module_sharding_plan(
        collection,
        of_table,
        EmbeddingBagCollectionSharder(),
        local_size=world,
        world_size=world,
        device_type=ranks.device.type,
    )
    return ShardingPlan({"model.sparse_arch.embedding_bag_collection": module_plan})


def _local(name: str, value: Any) -> dict[str, Tensor]:
    if isinstance(value, ShardedTensor):
        return {f"{name}[{i}]": shard.tensor.cpu().clone() for i, shard in enumerate(value.local_shards())}
    return {name: value.detach().cpu().clone()} if isinstance(value, Tensor) else {}


def _fill(sharded: DistributedModelParallel, weights: dict[str, Tensor]) -> None:
    for name, value in sharded.state_dict().items():
        if isinstance(value, ShardedTensor):
            for shard in value.local_shards():
                (row, column), (rows, columns) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
                shard.tensor.copy_(weights[name][row : row + rows, column : column + columns])
        else:
            value.copy_(weights[name])
