"""Tiny models of the kinds that TorchRec users have, with a plan for each of their sharded modules, and batches."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.optim.apply_optimizer_in_backward import (
    _apply_optimizer_in_backward as apply_optimizer_in_backward,
)
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    JaggedTensor,
    KeyedJaggedTensor,
    PoolingType,
)
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.model_parallel import get_default_sharders
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_row_wise,
    table_wise,
)
from torchrec.distributed.types import CacheParams, ModuleSharder, ShardingPlan
from torchrec.models.deepfm import SimpleDeepFMNN
from torchrec.models.dlrm import DLRM, DLRM_DCN, DLRM_Projection
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.streamable import Pipelineable

from dlrm_bench.dlrm.runtime.ranks import Ranks
from tests.pipeline.five_stage.torchrec_models import _fill

DIM, DENSE, LONGEST, BATCH = 8, 5, 6, 6
ROWS = {"u0": 40, "u1": 7, "i0": 30, "i1": 61, "w0": 23, "w1": 19, "history": 50, "context": 17}
SEQUENCES = ("history", "context")

Optimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@dataclass
class AnyBatch(Pipelineable):
    dense: Tensor
    """[batch, DENSE]"""
    bags: KeyedJaggedTensor
    """u0, u1, i0, i1; 0 to 3 ids a bag."""
    weighted: KeyedJaggedTensor
    """w0, w1, with weights."""
    sequences: KeyedJaggedTensor
    """history, context; 0 to LONGEST ids."""
    labels: Tensor
    """[batch]"""

    def to(self, device: torch.device, non_blocking: bool = False) -> "AnyBatch":
        moved = {f.name: getattr(self, f.name).to(device=device, non_blocking=non_blocking) for f in fields(self)}
        return AnyBatch(**moved)

    def pin_memory(self) -> "AnyBatch":
        return AnyBatch(**{f.name: getattr(self, f.name).pin_memory() for f in fields(self)})

    def record_stream(self, stream: torch.Stream) -> None:
        for field in fields(self):
            getattr(self, field.name).record_stream(stream)


def batches(
    ranks: Ranks, count: int, seed: int = 1, sizes: tuple[int, ...] = (BATCH,), full: bool = False
) -> list[Any]:
    """Those of other ranks and seeds are others. sizes: in turn. full: every bag and sequence of LONGEST ids."""
    random = torch.Generator().manual_seed(1000 * seed + ranks.rank)

    def kjt(keys: tuple[str, ...], size: int, longest: int, weighted: bool = False) -> KeyedJaggedTensor:
        lengths = torch.randint(0, longest + 1, (len(keys), size), generator=random, dtype=torch.int32)
        if full:
            lengths.fill_(longest)
        ids = [
            torch.randint(0, ROWS[key], (int(n.sum()),), generator=random) for key, n in zip(keys, lengths, strict=True)
        ]
        weights = torch.rand(int(lengths.sum()), generator=random) if weighted else None
        return KeyedJaggedTensor(list(keys), torch.cat(ids), weights=weights, lengths=lengths.view(-1), stride=size)

    made = []
    for i in range(count):
        size = sizes[i % len(sizes)]
        batch = AnyBatch(
            dense=torch.rand(size, DENSE, generator=random),
            bags=kjt(("u0", "u1", "i0", "i1"), size, 3),
            weighted=kjt(("w0", "w1"), size, 3, weighted=True),
            sequences=kjt(SEQUENCES, size, LONGEST),
            labels=torch.randint(0, 2, (size,), generator=random).float(),
        )
        made.append(batch.pin_memory() if ranks.device.type == "cuda" else batch)
    return made


def bags(names: tuple[str, ...], weighted: bool = False, shared: bool = False) -> EmbeddingBagCollection:
    """shared: the first two features read one table."""
    groups = [list(names[:2]), *([name] for name in names[2:])] if shared else [[name] for name in names]
    tables = [
        EmbeddingBagConfig(
            name=f"t_{group[0]}", embedding_dim=DIM, num_embeddings=max(ROWS[n] for n in group), feature_names=group,
            pooling=PoolingType.SUM if weighted or i % 2 else PoolingType.MEAN,
        )
        for i, group in enumerate(groups)
    ]  # fmt: skip
    return EmbeddingBagCollection(tables=tables, is_weighted=weighted, device=torch.device("cpu"))


def sequences(names: tuple[str, ...] = SEQUENCES, need_indices: bool = False) -> EmbeddingCollection:
    tables = [
        EmbeddingConfig(name=f"s_{name}", embedding_dim=DIM, num_embeddings=ROWS[name], feature_names=[name])
        for name in names
    ]
    return EmbeddingCollection(tables=tables, need_indices=need_indices, device=torch.device("cpu"))


class Loss(nn.Module):
    """(loss, (loss, logits)) of logits that `logits(batch)` gives."""

    def forward(self, batch: AnyBatch) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        logits = self.logits(batch)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
        return loss, (loss.detach(), logits.detach())

    def logits(self, batch: AnyBatch) -> Tensor:
        raise NotImplementedError


class OfTorchRec(Loss):
    """A model of (dense, KJT)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def logits(self, batch: AnyBatch) -> Tensor:
        return self.model(batch.dense, batch.bags).squeeze(-1)


class DeepFM(OfTorchRec):
    """Its model ends in a sigmoid."""

    def logits(self, batch: AnyBatch) -> Tensor:
        return self.model(batch.dense, batch.bags).squeeze(-1).logit(1e-6)


class Tower(nn.Module):
    def __init__(self, names: tuple[str, ...], shared: bool) -> None:
        super().__init__()
        self.tables = bags(names, shared=shared)
        self.mlp = nn.Sequential(nn.Linear(DIM * len(names), DIM), nn.ReLU(), nn.Linear(DIM, DIM))

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return self.mlp(self.tables(features).values())


class TwoTower(Loss):
    """Two modules, one KJT, a table of two features."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = Tower(("u0", "u1"), shared=True), Tower(("i0", "i1"), shared=False)

    def logits(self, batch: AnyBatch) -> Tensor:
        return (self.user(batch.bags) * self.item(batch.bags)).sum(dim=1)


class Sequence(Loss):
    """Attention over unpooled embeddings, padded to a fixed length."""

    def __init__(self) -> None:
        super().__init__()
        self.items = sequences()
        self.positions = nn.Parameter(torch.randn(LONGEST, DIM) * 0.1)
        self.attention = nn.MultiheadAttention(DIM, 2, batch_first=True)
        self.norm, self.out = nn.LayerNorm(DIM), nn.Linear(2 * DIM, 1)
        self.register_buffer("future", torch.ones(LONGEST, LONGEST, dtype=torch.bool).triu(1))

    def logits(self, batch: AnyBatch) -> Tensor:
        return self.of(self.items(batch.sequences))

    def of(self, found: dict[str, JaggedTensor]) -> Tensor:
        history = found["history"].to_padded_dense(LONGEST) + self.positions
        context = found["context"].to_padded_dense(LONGEST).sum(dim=1)
        attended, _ = self.attention(history, history, history, attn_mask=self.future, need_weights=False)
        return self.out(torch.cat([self.norm(history + attended).mean(dim=1), context], dim=1)).squeeze(-1)


class Everything(Loss):
    """Bags with and without weights and with a feature processor, and sequences, at several depths."""

    def __init__(self, processed: bool = True) -> None:
        super().__init__()
        self.weighted = bags(("w0", "w1"), weighted=True)
        self.tower = nn.ModuleDict({"deep": Tower(("u0", "u1", "i0"), shared=True)})
        self.items = sequences(need_indices=True)
        self.processed: nn.Module = bags(("i1",))
        if processed:
            lengths = PositionWeightedModuleCollection({"i1": 4}, device=torch.device("cpu"))
            # Of another table name than the tower's.
            self.processed = FeatureProcessedEmbeddingBagCollection(bags(("i1",), weighted=True), lengths)
        self.out = nn.Linear(5 * DIM + DENSE, 1)

    def logits(self, batch: AnyBatch) -> Tensor:
        found = self.items(batch.sequences)
        pooled = [self.tower["deep"](batch.bags), self.weighted(batch.weighted).values()]
        pooled += [self.processed(batch.bags).values(), found["history"].to_padded_dense(LONGEST).sum(dim=1)]
        return self.out(torch.cat([batch.dense, *pooled], dim=1)).squeeze(-1)


def _dlrm(kind: Callable[..., nn.Module], **more: Any) -> Callable[[], Loss]:
    def make() -> Loss:
        collection = bags(("u0", "u1", "i0", "i1"))
        layers = {"dense_arch_layer_sizes": [6, DIM], "over_arch_layer_sizes": [6, 1]}
        return OfTorchRec(kind(embedding_bag_collection=collection, dense_in_features=DENSE, **layers, **more))

    return make


MODELS: dict[str, Callable[[], Loss]] = {
    "dlrm": _dlrm(DLRM),
    "dcn": _dlrm(DLRM_DCN, dcn_num_layers=2, dcn_low_rank_dim=4),
    "projection": _dlrm(
        DLRM_Projection,
        interaction_branch1_layer_sizes=[2 * DIM],
        interaction_branch2_layer_sizes=[2 * DIM],
    ),
    "deepfm": lambda: DeepFM(SimpleDeepFMNN(DENSE, bags(("u0", "u1", "i0", "i1")), 6, 5)),
    "two towers": TwoTower,
    "sequence": Sequence,
    "everything": Everything,
    "everything, unprocessed": lambda: Everything(processed=False),
}

TW, CW, RW, TWRW, DP = "table_wise", "column_wise", "row_wise", "table_row_wise", "data_parallel"
Plan = Callable[[int, bool], str]
"""Of the how many-th table of all; whether it is of unpooled embeddings."""
PLANS: dict[str, Plan] = {
    "TW": lambda i, sequence: TW,
    "RW": lambda i, sequence: RW,
    "mixed": lambda i, sequence: ([TW, RW, CW, TW] if sequence else [TW, CW, RW, DP])[i % 4],
    "TWRW": lambda i, sequence: TW if sequence else TWRW,  # there is no table-row-wise EmbeddingCollection
    "DP": lambda i, sequence: DP,
}


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def build(
    ranks: Ranks,
    model: Callable[[], nn.Module],
    plan: Plan,
    dense: Optimizer = adam,
    sharders: Mapping[type, ModuleSharder[Any]] | None = None,
    tables: type[torch.optim.Optimizer] = torch.optim.Adagrad,
    cache: CacheParams | None = None,
) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    """A sharded model and its optimizer. Collective; the same weights on every call. sharders: by module type, in place
    of TorchRec's. tables: their optimizer. cache: of all but data-parallel tables, which are in host memory then."""
    torch.manual_seed(0)
    plain = model()
    by_type: dict[type, Any] = {sharder.module_type: sharder for sharder in get_default_sharders()} | dict(
        sharders or {}
    )
    weights = {key: value.clone() for key, value in plain.state_dict().items()}
    plans, count = {}, 0
    for name, module in plain.named_modules():
        if type(module) not in by_type or any(name.startswith(f"{other}.") for other in plans):
            continue
        apply_optimizer_in_backward(tables, _tables(module), {"lr": 0.05, "eps": 1e-8})
        of_table = {}
        for table in by_type[type(module)].shardable_parameters(module):
            of_table[table] = _shard(plan(count, isinstance(module, EmbeddingCollection)), count, ranks)
            count += 1
        of_module = construct_module_sharding_plan(
            module, of_table, by_type[type(module)], local_size=ranks.local_world_size, world_size=ranks.world_size,
            device_type=ranks.device.type,
        )  # fmt: skip
        for sharding in of_module.values() if cache is not None else ():
            if sharding.sharding_type != DP:
                sharding.compute_kernel = EmbeddingComputeKernel.FUSED_UVM_CACHING.value
                sharding.cache_params = cache
        plans[name] = of_module
    sharded = DistributedModelParallel(
        plain, device=ranks.device, plan=ShardingPlan(plans), sharders=list(by_type.values())
    )
    _fill(sharded, weights)
    rest = dict(in_backward_optimizer_filter(sharded.named_parameters()))
    return sharded, CombinedOptimizer([sharded.fused_optimizer, KeyedOptimizerWrapper(rest, dense)])


def _tables(module: nn.Module) -> list[nn.Parameter]:
    return [p for name, p in module.named_parameters() if "embedding" in name]


def _shard(kind: str, index: int, ranks: Ranks) -> Any:
    world, nodes = ranks.world_size, ranks.nodes
    rank = index % world
    return {
        TW: table_wise(rank=rank),
        CW: column_wise(ranks=[rank, (rank + 1) % world]),
        RW: row_wise(),
        TWRW: table_row_wise(host_index=index % nodes),
        DP: data_parallel(),
    }[kind]
