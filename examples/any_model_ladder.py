"""TorchRec models of several kinds, under TrainPipelineSparseDist and under FiveStagePipeline with each switch.

    python -m torch.distributed.run --nproc_per_node 2 examples/any_model_ladder.py --out ladder.json

Each row is one model and batch size under one schedule: milliseconds of an iteration (the slowest rank; the median of
some rounds), milliseconds of CPU time, and, from a profiled run of the same, kernel and graph launches, stream syncs
and the share of time in which the GPU had nothing to do. Losses are compared with stock's, from the same weights.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim.apply_optimizer_in_backward import (
    _apply_optimizer_in_backward as apply_optimizer_in_backward,
)
from torch.profiler import ProfilerActivity, profile, record_function
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)
from torchrec.distributed import DistributedModelParallel, TrainPipelineSparseDist
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.models.deepfm import SimpleDeepFMNN
from torchrec.models.dlrm import DLRM, DLRM_DCN, DLRM_Projection
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.streamable import Pipelineable

from dlrm_bench.bench.measure.trace import ITERATION, read_trace, summarize_trace
from dlrm_bench.pipeline.five_stage import FiveStageOptions, FiveStagePipeline, TrimmedEBCSharder, TrimmedECSharder

DIM, DENSE, ROWS, HOT, LONGEST = 64, 13, 100_000, 2, 50
USER, ITEM = [f"u{i}" for i in range(8)], [f"i{i}" for i in range(8)]
WARM_UP, ROUNDS, PROFILED, COMPARED = 12, 5, 5, 10


@dataclass
class Batch(Pipelineable):
    dense: Tensor
    bags: KeyedJaggedTensor
    history: KeyedJaggedTensor
    labels: Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> "Batch":
        moved = {f.name: getattr(self, f.name).to(device=device, non_blocking=non_blocking) for f in fields(self)}
        return Batch(**moved)

    def record_stream(self, stream: torch.Stream) -> None:
        for field in fields(self):
            getattr(self, field.name).record_stream(stream)


def make_batch(size: int, seed: int, fixed: bool) -> dict[str, Tensor]:
    """The tensors of one batch, pinned. fixed: all histories of LONGEST items, not of 10 to LONGEST."""
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(10, LONGEST + 1, (size,), generator=random, dtype=torch.int32)
    lengths = lengths.fill_(LONGEST) if fixed else lengths
    names = len(USER) + len(ITEM)
    made = {
        "dense": torch.rand(size, DENSE, generator=random),
        "bags": torch.randint(0, ROWS, (size * names * HOT,), generator=random),
        "bag_lengths": torch.full((size * names,), HOT, dtype=torch.int32),
        "history": torch.randint(0, ROWS, (int(lengths.sum()),), generator=random),
        "history_lengths": lengths,
        "labels": torch.randint(0, 2, (size,), generator=random).float(),
    }
    return {name: tensor.pin_memory() if torch.cuda.is_available() else tensor for name, tensor in made.items()}


def stream(made: list[dict[str, Tensor]]) -> Iterator[Batch]:
    """Without end, each time with KJTs that nobody has asked anything."""
    while True:
        for of in made:
            size = len(of["labels"])
            bags = KeyedJaggedTensor([*USER, *ITEM], of["bags"], lengths=of["bag_lengths"], stride=size)
            history = KeyedJaggedTensor(["history"], of["history"], lengths=of["history_lengths"], stride=size)
            yield Batch(of["dense"], bags, history, of["labels"])


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


def of_dlrm(kind: Callable[..., nn.Module], **more: Any) -> Callable[[], Loss]:
    layers = {"dense_arch_layer_sizes": [256, DIM], "over_arch_layer_sizes": [256, 128, 1]}
    return lambda: OfTorchRec(
        kind(embedding_bag_collection=bags([*USER, *ITEM]), dense_in_features=DENSE, **layers, **more)
    )


BRANCH = {"interaction_branch1_layer_sizes": [4 * DIM], "interaction_branch2_layer_sizes": [4 * DIM]}
MODELS: dict[str, Callable[[], Loss]] = {
    "DLRM": of_dlrm(DLRM),
    "DLRM_DCN": of_dlrm(DLRM_DCN, dcn_num_layers=3, dcn_low_rank_dim=128),
    "DLRM_Projection": of_dlrm(DLRM_Projection, **BRANCH),
    "DeepFM": lambda: OfTorchRec(SimpleDeepFMNN(DENSE, bags([*USER, *ITEM]), 256, DIM), ends_in_sigmoid=True),
    "two towers": TwoTower,
    "sequence, lengths vary": Sequence,
    "sequence, padded": Sequence,
}

OFF = FiveStageOptions(avoid_record_streams=False, pinned_d2h=False)
PINNED = FiveStageOptions()
GRAPH = FiveStageOptions(cuda_graph="dense")
RUNGS: dict[str, tuple[FiveStageOptions | None, bool]] = {
    "stock": (None, False),
    "five-stage": (OFF, False),
    "+ avoid_record_streams": (replace(OFF, avoid_record_streams=True), False),
    "+ pinned_d2h": (PINNED, False),
    "+ cuda_graph": (GRAPH, False),
    "+ trimmed": (GRAPH, True),
    "+ launch_threads": (replace(GRAPH, launch_threads=2), True),
}
"""Options, and whether collections are sharded by the trimming sharders; each with what the one before has."""
SHORT = ("stock", "+ pinned_d2h", "+ trimmed")
IN_FULL = ("two towers", "sequence, lengths vary")


def build(name: str, device: torch.device, trimmed: bool) -> tuple[DistributedModelParallel, Any]:
    torch.manual_seed(0)
    model = MODELS[name]()
    lengths = {} if "vary" in name else {"history": LONGEST}
    sharders: list[Any] = [EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()]
    if trimmed:
        sharders = [TrimmedEBCSharder(dict.fromkeys([*USER, *ITEM], HOT)), TrimmedECSharder(lengths)]
    by_type, plans, world, count = {s.module_type: s for s in sharders}, {}, dist.get_world_size(), 0
    for path, module in model.named_modules():
        if type(module) in by_type:
            apply_optimizer_in_backward(torch.optim.Adagrad, module.parameters(), {"lr": 0.02, "eps": 1e-8})
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


def slowest(value: float, device: torch.device) -> float:
    of_ranks = torch.tensor(value, device=device, dtype=torch.float64)
    dist.all_reduce(of_ranks, dist.ReduceOp.MAX)
    return float(of_ranks)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure(
    name: str, rung: str, size: int, device: torch.device, iterations: int
) -> tuple[dict[str, Any], list[float]]:
    options, trimmed = RUNGS[rung]
    model, optimizer = build(name, device, trimmed)
    made = [make_batch(size, 100 * dist.get_rank() + i, "padded" in name) for i in range(8)]
    data = stream(made)
    pipeline: Any = (
        TrainPipelineSparseDist(model, optimizer, device)
        if options is None
        else FiveStagePipeline(model, optimizer, device, options)
    )
    losses = [pipeline.progress(data) for _ in range(max(COMPARED, WARM_UP))]
    rounds, cpu = [], time.process_time()
    for _ in range(ROUNDS):
        wait(device)
        dist.barrier()
        start = time.perf_counter()
        for _ in range(iterations):
            pipeline.progress(data)
        wait(device)
        rounds.append(1000 * (time.perf_counter() - start) / iterations)
    cpu = 1000 * (time.process_time() - cpu) / (ROUNDS * iterations)
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    with profile(activities=activities) as profiled:
        for _ in range(PROFILED):
            with record_function(ITERATION):
                pipeline.progress(data)
        wait(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json.gz"
        profiled.export_chrome_trace(str(path))
        summary = summarize_trace(read_trace(path))
    row = {
        "model": name,
        "batch": size,
        "schedule": rung,
        "ms": round(slowest(statistics.median(rounds), device), 4),
        "cpu_ms": round(slowest(cpu, device), 4),
        **{call: round(summary.calls[call], 1) for call in ("kernel_launches", "graph_launches", "stream_syncs")},
        "d2h_copies": round(summary.calls["d2h_copies"], 1),
        "gpu_busy_ms": None if summary.gpu_busy_ms is None else round(summary.gpu_busy_ms, 4),
        "switched_off": getattr(pipeline, "switched_off", {}),
    }
    if row["gpu_busy_ms"] is not None:
        row["gpu_idle"] = round(max(0.0, 1 - row["gpu_busy_ms"] / row["ms"]), 3)
    if hasattr(pipeline, "close"):
        pipeline.close()
    return row, [float(loss) for loss in losses[:COMPARED]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batch", type=int, nargs="+", default=[64, 4096], help="samples of a rank")
    parser.add_argument("--iterations", type=int, default=20, help="of each of the rounds")
    parser.add_argument("--seconds", type=float, default=600, help="start nothing new after so many")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    arguments = parser.parse_args()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    torch.backends.cuda.matmul.allow_tf32 = False
    begin, rows = time.perf_counter(), []
    for name in arguments.models:
        for size in arguments.batch:
            stock: list[float] = []
            for rung in RUNGS if name in IN_FULL else SHORT:
                if slowest(time.perf_counter() - begin, device) > arguments.seconds:
                    continue
                row, losses = measure(name, rung, size, device, arguments.iterations)
                stock = stock or losses
                row["loss_difference"] = max(abs(a - b) / abs(b) for a, b in zip(losses, stock, strict=True))
                rows.append(row)
                if dist.get_rank() == 0:
                    print({k: v for k, v in row.items() if v not in ({}, None)}, flush=True)
                    arguments.out.write_text(json.dumps(rows, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
