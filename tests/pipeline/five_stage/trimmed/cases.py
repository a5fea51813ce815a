"""Plans, models and batches for tests of the trimmed input dist, on TorchRec's sharder and on ours."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.optim.apply_optimizer_in_backward import (
    _apply_optimizer_in_backward as apply_optimizer_in_backward,
)
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, PoolingType
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel, TrainPipelineSparseDist
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_row_wise,
    table_wise,
)
from torchrec.distributed.train_pipeline.runtime_forwards import PipelinedForward
from torchrec.distributed.types import ShardedTensor, ShardingPlan
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.five_stage.trimmed.sharder import TrimmedEBCSharder

SIZES = {"f0": 3, "f1": 1, "f2": 2, "f3": 4, "f4": 1, "unused": 2}
TABLES = {  # rows, features
    "a": (50, ["f0"]),
    "b": (90, ["f1"]),
    "c": (71, ["f2", "f4"]),
    "d": (20, ["f3"]),
    "e": (43, ["f4", "f0"]),
}
DIM = 16
STRIDES = (6, 6, 6, 4, 6)


def twcw(ranks: list[int]) -> Callable[..., Any]:
    """TorchRec has no constructor for it; its shards are those of a column-wise table."""

    def sharding(*args: Any, **kwargs: Any) -> Any:
        of_columns = column_wise(ranks=ranks)(*args, **kwargs)
        of_columns.sharding_type = "table_column_wise"
        return of_columns

    return sharding


@dataclass(frozen=True)
class Case:
    plan: Callable[[], dict[str, Callable[..., Any]]]
    """Of each table; without a table the model has none of it."""
    undeclared: tuple[str, ...] = ()
    """Features of variable lengths."""
    static: tuple[str, ...] = ()
    dynamic: tuple[str, ...] = ()
    torchrec: tuple[str, ...] = ()
    all_to_alls: int = 1
    reads: int = 0
    world_size: int = 2
    ids: torch.dtype = torch.int64
    host_knows_lengths: bool = False
    fused_params: dict[str, Any] = field(default_factory=dict)
    pooling: PoolingType = PoolingType.SUM
    codecs: bool = False
    """Pooled vectors and their gradients go between ranks in fp16."""
    cuda_graph: bool = False
    weighted: bool = False


def plan_of(*shardings: Any) -> Callable[[], dict[str, Callable[..., Any]]]:
    return lambda: dict(zip(TABLES, shardings, strict=False))


ALL = ("f0", "f1", "f2", "f3", "f4")
THREE = ("f0", "f1", "f2", "f4")
"""Of the first three tables."""
TW = plan_of(table_wise(0), table_wise(1), table_wise(0), table_wise(1), table_wise(1))
CW = plan_of(*(column_wise(ranks=ranks) for ranks in ([0, 1], [1, 0], [1, 1], [0, 0], [1, 0])))
DP = plan_of(*[data_parallel()] * 5)
RW = plan_of(*[row_wise()] * 5)
TW_CW_DP = plan_of(table_wise(1), column_wise(ranks=[0, 1]), table_wise(0), data_parallel(), twcw([1, 0]))
WITH_RW = plan_of(table_wise(1), column_wise(ranks=[0, 1]), row_wise(), data_parallel(), row_wise())
WITH_TWRW = plan_of(table_wise(1), column_wise(ranks=[0, 1]), *[table_row_wise(0)] * 3)
int32 = {"embedding_table_index_type": torch.int32, "embedding_table_offset_type": torch.int32}

CASES = {
    "tw": Case(TW, static=ALL),
    "tw, rank 0 alone has tables": Case(plan_of(table_wise(0), table_wise(0)), static=("f0", "f1")),
    "tw, graphs": Case(TW, static=ALL, cuda_graph=True),
    "cw": Case(CW, static=ALL),
    "dp": Case(DP, static=ALL, all_to_alls=0),
    "tw cw twcw dp": Case(TW_CW_DP, static=ALL),
    "tw cw twcw dp, graphs": Case(TW_CW_DP, static=ALL, cuda_graph=True),
    "tw cw twcw dp, lengths on the host": Case(TW_CW_DP, static=ALL, host_knows_lengths=True),
    "tw cw twcw dp, int32": Case(TW_CW_DP, static=ALL, ids=torch.int32, fused_params=int32),
    "tw cw twcw dp, mean": Case(TW_CW_DP, static=ALL, pooling=PoolingType.MEAN),
    "tw cw twcw dp, unused varies": Case(TW_CW_DP, undeclared=("unused",), static=ALL),
    "rw": Case(RW, dynamic=ALL, all_to_alls=2, reads=1),
    "rw, lengths vary": Case(RW, undeclared=ALL, dynamic=ALL, all_to_alls=2, reads=1),
    "rw, int32": Case(RW, undeclared=ALL, dynamic=ALL, all_to_alls=2, reads=1, ids=torch.int32, fused_params=int32),
    "tw cw dp, all vary": Case(TW_CW_DP, undeclared=ALL, dynamic=ALL, all_to_alls=2, reads=1),
    "tw cw twcw dp, weighted": Case(TW_CW_DP, static=ALL, weighted=True),
    "tw cw twcw dp, weighted, graphs": Case(TW_CW_DP, static=ALL, weighted=True, cuda_graph=True),
    "tw cw twcw dp, unused varies, weighted": Case(TW_CW_DP, undeclared=("unused",), static=ALL, weighted=True),
    "rw, lengths vary, weighted": Case(RW, undeclared=ALL, dynamic=ALL, all_to_alls=2, reads=1, weighted=True),
    "tw cw twcw dp, codecs": Case(TW_CW_DP, static=ALL, codecs=True),
    "twrw": Case(WITH_TWRW, static=("f0", "f1"), torchrec=("f0", "f2", "f3", "f4")),
    "dp varies": Case(DP, undeclared=("f2",), dynamic=ALL, all_to_alls=0, reads=1),
    "tw cw dp rw": Case(
        WITH_RW, static=("f0", "f1", "f3"), dynamic=("f0", "f2", "f4"), all_to_alls=3, reads=1
    ),
    "tw cw dp rw, some vary": Case(
        WITH_RW, undeclared=("f1", "f2"), static=("f0", "f3"), dynamic=("f0", "f1", "f2", "f4"), all_to_alls=3, reads=1
    ),
}  # fmt: skip
CASES |= {
    "tw cw twcw dp, 3 ranks": Case(
        plan_of(table_wise(2), column_wise(ranks=[0, 2]), table_wise(0), data_parallel(), twcw([2, 1])),
        static=ALL,
        world_size=3,
    ),
    "tw cw dp rw, 3 ranks": Case(
        WITH_RW, undeclared=("f4",), static=("f0", "f1", "f3"), dynamic=("f0", "f2", "f4"), all_to_alls=3, reads=1,
        world_size=3,
    ),
    "tw cw dp rw, some vary, int32, weighted": Case(
        WITH_RW, undeclared=("f1", "f2"), static=("f0", "f3"), dynamic=("f0", "f1", "f2", "f4"), all_to_alls=3, reads=1,
        weighted=True, ids=torch.int32, fused_params=int32,
    ),
    "1 rank, lengths vary, weighted": Case(
        plan_of(table_wise(0), row_wise(), data_parallel()), undeclared=("f1",), static=("f0", "f2", "f4"),
        dynamic=("f1",), all_to_alls=0, reads=1, world_size=1, weighted=True,
    ),
    "1 rank": Case(plan_of(table_wise(0), table_wise(0), data_parallel()), static=THREE, all_to_alls=0, world_size=1),
    "1 rank, lengths vary": Case(
        plan_of(table_wise(0), row_wise(), data_parallel()), undeclared=ALL, dynamic=THREE, all_to_alls=0, reads=1,
        world_size=1,
    ),
}  # fmt: skip


class Model(nn.Module):
    def __init__(self, case: Case, device: torch.device) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(
                name=name, num_embeddings=TABLES[name][0], embedding_dim=DIM, feature_names=TABLES[name][1],
                pooling=case.pooling,
            )
            for name in case.plan()
        ]  # fmt: skip
        self.ebc = EmbeddingBagCollection(tables=tables, is_weighted=case.weighted, device=torch.device("meta"))
        width = DIM * sum(len(table.feature_names) for table in tables)
        self.weights = nn.Parameter(torch.linspace(-1, 1, width, device=device))

    def forward(self, batch: Batch) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """TorchRec's pipelines take the first for the loss and give the second back."""
        pooled = self.ebc(batch.sparse_features).values()
        logits = (pooled * self.weights).sum(dim=1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
        return loss, (loss.detach(), pooled.detach())


@dataclass
class Sharded:
    model: DistributedModelParallel
    optimizer: KeyedOptimizerWrapper

    @property
    def ebc(self) -> Any:
        return self.model.module.ebc


def sharded(case: Case, ranks: Ranks, sharder: EmbeddingBagCollectionSharder) -> Sharded:
    model = Model(case, ranks.device)
    apply_optimizer_in_backward(torch.optim.Adagrad, model.ebc.parameters(), {"lr": 0.05, "eps": 1e-8})
    plan = construct_module_sharding_plan(
        model.ebc, case.plan(), sharder, local_size=ranks.local_world_size, world_size=ranks.world_size,
        device_type=ranks.device.type,
    )  # fmt: skip
    model = DistributedModelParallel(
        model, device=ranks.device, plan=ShardingPlan({"ebc": plan}), sharders=[sharder], init_parameters=True
    )
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    return Sharded(model, KeyedOptimizerWrapper(dense, lambda params: torch.optim.Adagrad(params, lr=0.05)))


def codecs(case: Case, ranks: Ranks) -> dict[str, Any] | None:
    if not case.codecs:
        return None
    return get_qcomm_codecs_registry(QCommsConfig(CommType.FP16, CommType.FP16), device=ranks.device)


def stock(case: Case, ranks: Ranks) -> Sharded:
    sharder = EmbeddingBagCollectionSharder(dict(case.fused_params), qcomm_codecs_registry=codecs(case, ranks))
    return sharded(case, ranks, sharder)


def trimmed(case: Case, ranks: Ranks, **options: Any) -> Sharded:
    sizes = {key: size for key, size in SIZES.items() if key not in case.undeclared}
    options = {"cuda_graph": case.cuda_graph} | options
    sharder = TrimmedEBCSharder(sizes, dict(case.fused_params), codecs(case, ranks), **options)
    return sharded(case, ranks, sharder)


def batches(case: Case, ranks: Ranks, strides: tuple[int, ...] = STRIDES) -> list[Batch]:
    """Other ids for each rank and batch. Keys stand in another order than the tables."""
    random = torch.Generator().manual_seed(17 + ranks.rank)
    keys = ["f3", "f0", "unused", "f2", "f4", "f1"]
    made = []
    for stride in strides:
        lengths, values = [], []
        for key in keys:
            size = SIZES[key]
            varying = torch.randint(0, 2 * size + 1, (stride,), generator=random)
            lengths.append(varying if key in case.undeclared else torch.full((stride,), size))
            values.append(torch.randint(0, 20, (int(lengths[-1].sum()),), generator=random))
        kjt = KeyedJaggedTensor(
            keys=keys, values=torch.cat(values).to(case.ids), lengths=torch.cat(lengths).to(torch.int32), stride=stride,
            weights=torch.rand(sum(map(len, values)), generator=random) if case.weighted else None,
        )  # fmt: skip
        if case.host_knows_lengths:
            kjt.sync()
        labels = torch.randint(0, 2, (stride,), generator=random).float()
        made.append(Batch(dense_features=torch.zeros(stride, 1), sparse_features=kjt, labels=labels).to(ranks.device))
    return made


def fresh(made: list[Batch]) -> Iterator[Batch]:
    """KJTs keep what was computed from them: each pipeline gets its own."""
    for batch in made:
        old = batch.sparse_features
        kjt = KeyedJaggedTensor(
            keys=old.keys(), values=old.values(), lengths=old.lengths(), stride=old.stride(),
            weights=old.weights_or_none(),
            length_per_key=old.length_per_key_or_none(), offset_per_key=old.offset_per_key_or_none(),
        )  # fmt: skip
        yield Batch(batch.dense_features, kjt, batch.labels)


def flat(state: Mapping[str, Any], prefix: str = "") -> dict[str, Tensor]:
    """Local tensors of a state_dict, by their path."""
    tensors = {}
    for name, value in state.items():
        if isinstance(value, Mapping):
            tensors |= flat(value, f"{prefix}{name}/")
        elif isinstance(value, ShardedTensor):
            for shard in value.local_shards():
                tensors[f"{prefix}{name}{shard.metadata.shard_offsets}"] = shard.tensor.clone().cpu()
        elif isinstance(value, Tensor):
            tensors[prefix + name] = value.detach().clone().cpu()
    return tensors


@dataclass
class Trained:
    losses: list[float]
    pooled: list[Tensor]
    state: dict[str, Tensor]
    keys: list[str]


def train(what: Sharded, made: list[Batch], ranks: Ranks, in_pipeline: bool) -> Trained:
    losses, pooled = [], []
    data = fresh(made)
    pipeline = TrainPipelineSparseDist(what.model, what.optimizer, ranks.device)
    for batch in made:
        if in_pipeline:
            loss, of_batch = pipeline.progress(data)
        else:
            what.optimizer.zero_grad()
            loss, (_, of_batch) = what.model(next(data))
            loss.backward()
            what.optimizer.step()
        assert len(of_batch) == batch.sparse_features.stride()
        assert isinstance(what.ebc.forward, PipelinedForward) == in_pipeline
        losses.append(loss.item())
        pooled.append(of_batch.cpu())
    state = {
        "model": what.model.state_dict(),
        "fused": what.model.fused_optimizer.state_dict()["state"],
        "dense": what.optimizer.state_dict()["state"],
    }
    return Trained(losses, pooled, flat(state), list(state["model"]))


def equal_weights(case: Case, ranks: Ranks) -> tuple[Sharded, Sharded]:
    pair = stock(case, ranks), trimmed(case, ranks)
    pair[1].model.load_state_dict(pair[0].model.state_dict())
    return pair
