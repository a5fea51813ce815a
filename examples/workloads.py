"""Models of several kinds with batches drawn at random: what any_model_ladder.py measures. Tables are table-wise."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim.apply_optimizer_in_backward import (
    _apply_optimizer_in_backward as apply_optimizer_in_backward,
)
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.models.deepfm import SimpleDeepFMNN
from torchrec.models.dlrm import DLRM, DLRM_DCN, DLRM_Projection
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.streamable import Pipelineable

from dlrm_bench.hstu.batch import batch_ids, random_batches
from dlrm_bench.hstu.config import PRESETS
from dlrm_bench.hstu.model import HstuRanker, HstuTrain
from dlrm_bench.pipeline.five_stage import TrimmedEBCSharder, TrimmedECSharder

DIM, DENSE, ROWS, HOT, LONGEST = 64, 13, 100_000, 2, 50
USER, ITEM = [f"u{i}" for i in range(8)], [f"i{i}" for i in range(8)]
DISTINCT = 8
"""Batches that a rank trains on in turn."""

Sharders = Literal["TorchRec's", "trimming", "trimming, graphs"]
Tables = tuple[type[torch.optim.Optimizer], dict[str, float]]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model, its batches, and the sharders that trim its input dists."""

    model: Callable[[], nn.Module]
    """Tables on "meta"."""
    batches: Callable[[int, int, bool], list[Any]]
    """DISTINCT batches of (samples, rank); and whether they have the form that graphs and trimmed input dists need."""
    trimming: Callable[[int, bool], list[Any]]
    """Sharders for batches of so many samples; and whether they replay their exchanges as CUDA graphs."""
    sizes: tuple[int, ...]
    """Samples of a rank: of small batches and large ones."""
    tables: Tables = field(default=(torch.optim.Adagrad, {"lr": 0.02, "eps": 1e-8}))
    """The tables' optimizer; all else has Adam."""
    again: Callable[[Any], Any] = lambda batch: batch
    """Makes a batch of one that was trained on before, with KJTs that nobody has asked anything."""


@dataclass
class Batch(Pipelineable):
    dense: Tensor
    bags: KeyedJaggedTensor
    history: KeyedJaggedTensor
    labels: Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> "Batch":
        moved = {f.name: getattr(self, f.name).to(device=device, non_blocking=non_blocking) for f in fields(self)}
        return Batch(**moved)

    def pin_memory(self) -> "Batch":
        return Batch(**{f.name: getattr(self, f.name).pin_memory() for f in fields(self)})

    def record_stream(self, stream: torch.Stream) -> None:
        for of in fields(self):
            getattr(self, of.name).record_stream(stream)


def pinned(batches: list[Any]) -> list[Any]:
    return [batch.pin_memory() for batch in batches] if torch.cuda.is_available() else batches


def plain(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Returns the KJT without what it has noted of itself."""
    return KeyedJaggedTensor(features.keys(), features.values(), lengths=features.lengths(), stride=features.stride())


def draw(size: int, seed: int, full: bool) -> Batch:
    """Returns a batch; full: of histories of LONGEST items all, not of 10 to LONGEST."""
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(10, LONGEST + 1, (size,), generator=random, dtype=torch.int32)
    lengths = lengths.fill_(LONGEST) if full else lengths
    names = [*USER, *ITEM]
    dense = torch.rand(size, DENSE, generator=random)
    ids = torch.randint(0, ROWS, (size * len(names) * HOT,), generator=random)
    history = torch.randint(0, ROWS, (int(lengths.sum()),), generator=random)
    labels = torch.randint(0, 2, (size,), generator=random).float()
    of_names = torch.full((size * len(names),), HOT, dtype=torch.int32)
    return Batch(
        dense=dense,
        bags=KeyedJaggedTensor(names, ids, lengths=of_names, stride=size),
        history=KeyedJaggedTensor(["history"], history, lengths=lengths, stride=size),
        labels=labels,
    )


def bags(names: list[str]) -> EmbeddingBagCollection:
    tables = [
        EmbeddingBagConfig(name=f"t_{name}", embedding_dim=DIM, num_embeddings=ROWS, feature_names=[name])
        for name in names
    ]
    return EmbeddingBagCollection(tables=tables, device=torch.device("meta"))


class Loss(nn.Module):
    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        loss = nn.functional.binary_cross_entropy_with_logits(self.logits(batch), batch.labels)
        return loss, loss.detach()


class OfTorchRec(Loss):
    def __init__(self, model: nn.Module, ends_in_sigmoid: bool = False) -> None:
        super().__init__()
        self.model, self._ends_in_sigmoid = model, ends_in_sigmoid

    def logits(self, batch: Batch) -> Tensor:
        out = self.model(batch.dense, batch.bags).squeeze(-1)
        return out.logit(1e-6) if self._ends_in_sigmoid else out


class Tower(nn.Module):
    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.tables = bags(names)
        self.mlp = nn.Sequential(nn.Linear(DIM * len(names), 256), nn.ReLU(), nn.Linear(256, DIM))

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return self.mlp(self.tables(features).values())


class TwoTower(Loss):
    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = Tower(USER), Tower(ITEM)

    def logits(self, batch: Batch) -> Tensor:
        return (self.user(batch.bags) * self.item(batch.bags)).sum(dim=1)


class Sequence(Loss):
    """SASRec-like: two layers of causal attention over the history, and a tower over the item's features."""

    def __init__(self) -> None:
        super().__init__()
        config = EmbeddingConfig(name="t_history", embedding_dim=DIM, num_embeddings=ROWS, feature_names=["history"])
        self.items = EmbeddingCollection(tables=[config], device=torch.device("meta"))
        self.item = Tower(ITEM)
        self.positions = nn.Parameter(torch.randn(LONGEST, DIM) * 0.02)
        layer = {"dim_feedforward": 2 * DIM, "dropout": 0.0, "batch_first": True, "norm_first": True}
        self.layers = nn.ModuleList([nn.TransformerEncoderLayer(DIM, 2, **layer) for _ in range(2)])
        self.register_buffer("future", torch.full((LONGEST, LONGEST), float("-inf")).triu(1))

    def logits(self, batch: Batch) -> Tensor:
        x = self.items(batch.history)["history"].to_padded_dense(LONGEST) + self.positions
        for layer in self.layers:
            x = layer(x, src_mask=self.future)
        return (x.mean(dim=1) * self.item(batch.bags)).sum(dim=1)


def _of_bags(model: Callable[[], nn.Module], full: bool = True, sizes: tuple[int, ...] = (64, 16384)) -> Workload:
    """full: whether all histories are of the same length."""
    lengths = {"history": LONGEST} if full else {}
    return Workload(
        model=model,
        batches=lambda size, rank, fixed: pinned([draw(size, 100 * rank + i, full) for i in range(DISTINCT)]),
        trimming=lambda size, graphs: [
            TrimmedEBCSharder(dict.fromkeys([*USER, *ITEM], HOT), cuda_graph=graphs),
            TrimmedECSharder(lengths, cuda_graph=graphs),
        ],
        sizes=sizes,
        again=lambda batch: replace(batch, bags=plain(batch.bags), history=plain(batch.history)),
    )


def _of_dlrm(kind: Callable[..., nn.Module], **more: Any) -> Workload:
    layers = {"dense_arch_layer_sizes": [256, DIM], "over_arch_layer_sizes": [256, 128, 1]}
    return _of_bags(
        lambda: OfTorchRec(
            kind(embedding_bag_collection=bags([*USER, *ITEM]), dense_in_features=DENSE, **layers, **more)
        )
    )


def _of_hstu(preset: str) -> Workload:
    """Batches of the form that is asked for are padded to one of a few capacities."""
    config, meta = PRESETS[preset], torch.device("meta")

    def batches(size: int, rank: int, fixed: bool) -> list[Any]:
        # A seed of which 256 samples of hstu-small on two ranks have fewer elements than TorchRec counts, 2 ** 31.
        made = random_batches(config, size, seed=4, rank=rank, padded=fixed, ranks=dist.get_world_size())
        return pinned([next(made) for _ in range(DISTINCT)])

    return Workload(
        model=lambda: HstuTrain(HstuRanker(config, tables_device=meta)),
        batches=batches,
        trimming=lambda size, graphs: [TrimmedECSharder(batch_ids=batch_ids(config, size), cuda_graph=graphs)],
        sizes=(4, 32, 256),
        tables=(RowWiseAdagrad, {"lr": 0.02, "eps": 1e-8}),
        again=lambda batch: replace(batch, features=plain(batch.features)),
    )


BRANCH = {"interaction_branch1_layer_sizes": [4 * DIM], "interaction_branch2_layer_sizes": [4 * DIM]}
WORKLOADS = {
    "DLRM": _of_dlrm(DLRM),
    "DLRM_DCN": _of_dlrm(DLRM_DCN, dcn_num_layers=3, dcn_low_rank_dim=128),
    "DLRM_Projection": _of_dlrm(DLRM_Projection, **BRANCH),
    "DeepFM": _of_bags(lambda: OfTorchRec(SimpleDeepFMNN(DENSE, bags([*USER, *ITEM]), 256, DIM), ends_in_sigmoid=True)),
    "two towers": _of_bags(TwoTower),
    "sequence, lengths vary": _of_bags(Sequence, full=False, sizes=(64, 4096)),
    "sequence, padded": _of_bags(Sequence, sizes=(64, 4096)),
    **{preset: _of_hstu(preset) for preset in PRESETS},
}


def stream(workload: Workload, batches: list[Any]) -> Iterator[Any]:
    """Yields the batches in turn, without end."""
    while True:
        yield from map(workload.again, batches)


def build(
    workload: Workload, size: int, device: torch.device, kind: Sharders
) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    """Returns a sharded model and its optimizer. Collective; the same weights with every call. kind: trimming sharders
    are told of batches of `size` samples."""
    torch.manual_seed(0)
    model = workload.model()
    sharders: list[Any] = [EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()]
    if kind != "TorchRec's":
        sharders = workload.trimming(size, kind == "trimming, graphs")
    by_type, plans, world, count = {s.module_type: s for s in sharders}, {}, dist.get_world_size(), 0
    for path, module in model.named_modules():
        if type(module) in by_type:
            apply_optimizer_in_backward(workload.tables[0], module.parameters(), dict(workload.tables[1]))
            of_table = {}
            for table in by_type[type(module)].shardable_parameters(module):
                of_table[table], count = table_wise(rank=count % world), count + 1
            sizes = {"local_size": world, "world_size": world, "device_type": device.type}
            plans[path] = construct_module_sharding_plan(module, of_table, by_type[type(module)], **sizes)
    torch.manual_seed(1 + dist.get_rank())  # of tables
    sharded = DistributedModelParallel(model, device=device, plan=ShardingPlan(plans), sharders=sharders)
    rest = dict(in_backward_optimizer_filter(sharded.named_parameters()))
    adam = KeyedOptimizerWrapper(rest, lambda parameters: torch.optim.Adam(parameters, lr=1e-3))
    return sharded, CombinedOptimizer([sharded.fused_optimizer, adam])
