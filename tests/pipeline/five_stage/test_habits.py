"""Cross-cutting: what people do around a training loop works as under TrainPipelineSparseDist."""

import copy
import signal
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor
from torchrec.distributed import TrainPipelineSparseDist
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.keyed import CombinedOptimizer, OptimizerWrapper

from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.five_stage.options import FiveStageOptions
from dlrm_bench.pipeline.five_stage.pipeline import FiveStagePipeline
from tests.cases import GPU_PLACES
from tests.pipeline.cpu_graphs import dense_graph_on_cpu
from tests.pipeline.five_stage.any_models import (
    DENSE,
    DIM,
    PLANS,
    AnyBatch,
    Loss,
    Optimizer,
    Sequence,
    TwoTower,
    adam,
    bags,
    batches,
    build,
)
from tests.pipeline.five_stage.torchrec_models import Trained, state

STEPS = 8
Around = Callable[[Any, Any, int], None]
"""Called with the model, the optimizer and the step before each step."""


def clipped(model: Any, optimizer: CombinedOptimizer) -> Any:
    (fused, dense) = (part for _, part in optimizer.optimizers)
    return CombinedOptimizer([fused, GradientClippingOptimizer(dense, GradientClipping.NORM, max_gradient=0.01)])


def scheduled(model: Any, optimizer: CombinedOptimizer) -> Any:
    inner = optimizer.optimizers[1][1]._optimizer
    optimizer.scheduler = torch.optim.lr_scheduler.ExponentialLR(inner, 0.8)  # type: ignore[attr-defined]
    return optimizer


def next_rate(model: Any, optimizer: Any, step: int) -> None:
    if step:
        optimizer.scheduler.step()


def averaged(model: Any, optimizer: Any, step: int) -> None:
    """An exponential moving average of the dense weights, kept beside."""
    for name, parameter in model.module.named_parameters():
        if "mlp" in name:
            kept = vars(model).setdefault("average", {})
            kept[name] = parameter.detach().clone() if step == 0 else kept[name].lerp(parameter.detach(), 0.1)


def checkpointed(model: Any, optimizer: Any, step: int) -> None:
    """Saves at one step and loads what was saved later: three steps are undone."""
    if step == 3:
        model.saved = [copy.deepcopy(of.state_dict()) for of in (model, optimizer)]
    if step == 6:
        model.load_state_dict(model.saved[0])
        optimizer.load_state_dict(model.saved[1])


def evaluated(model: Any, optimizer: Any, step: int) -> None:
    model.train(step % 4 != 3)


class Autocast(TwoTower):
    def logits(self, batch: AnyBatch) -> Tensor:
        with torch.autocast("cuda" if torch.cuda.is_available() else "cpu", torch.bfloat16):
            return super().logits(batch).float()


class Scaled(Autocast):
    """Its loss is scaled, by a factor that changes."""

    def forward(self, batch: AnyBatch) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        loss, output = super().forward(batch)
        return scale(loss), output


@torch.fx.wrap
def scale(loss: Tensor) -> Tensor:
    """Stands in a function, because TorchRec's trace hands a GradScaler what is no tensor."""
    return SCALERS[-1].scale(loss)


SCALERS: list[torch.amp.GradScaler] = []


class Unscales(OptimizerWrapper):
    """Its fifth step meets a gradient that has overflowed, and is left out."""

    steps = 0

    def step(self, closure: Any = None) -> None:
        self.steps += 1
        if self.steps == 5:
            next(parameter.grad for parameter in self.params.values()).view(-1)[0] = float("inf")
        before = SCALERS[-1].get_scale()
        SCALERS[-1].step(self._optimizer)
        SCALERS[-1].update()
        assert (SCALERS[-1].get_scale() < before) == (self.steps == 5)


def unscaled(model: Any, optimizer: CombinedOptimizer) -> Any:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    SCALERS.append(torch.amp.GradScaler(device, init_scale=4.0, growth_interval=2))
    (fused, dense) = (part for _, part in optimizer.optimizers)
    return CombinedOptimizer([fused, Unscales(dense)])


class Compiled(TwoTower):
    def __init__(self) -> None:
        super().__init__()
        self.user.mlp.compile(backend="inductor" if torch.cuda.is_available() else "eager")


class Prepares(TwoTower):
    """Puts a transformed field in the place of the batch's own."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(DENSE, 1)

    def logits(self, batch: AnyBatch) -> Tensor:
        batch.dense = (batch.dense + 1).log()
        return super().logits(batch) + self.dense(batch.dense).squeeze(-1)


class Halves(Loss):
    """Halves the gradients of looked-up vectors by a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = bags(("u0", "u1"))
        self.mlp = nn.Linear(2 * DIM, 1)

    def logits(self, batch: AnyBatch) -> Tensor:
        return self.mlp(halved(self.tables(batch.bags).values())).squeeze(-1)


@torch.fx.wrap
def halved(vectors: Tensor) -> Tensor:
    """Stands in a function, because TorchRec's trace takes no hook."""
    if vectors.requires_grad:
        vectors.register_hook(lambda gradient: gradient * 0.5)
    return vectors


HABITS: dict[str, tuple[Callable[[], Loss], Callable[[Any, CombinedOptimizer], Any] | None, Around | None]] = {
    "clipping": (TwoTower, clipped, None),
    "schedule": (TwoTower, scheduled, next_rate),
    "average": (TwoTower, None, averaged),
    "checkpoint": (TwoTower, None, checkpointed),
    "evaluation": (Sequence, None, evaluated),
    "autocast": (Autocast, None, None),
    "scaler": (Scaled, unscaled, None),
    "compile": (Compiled, None, None),
    "field set": (Prepares, None, None),
    "hook on vectors": (Halves, None, None),
}


def train(ranks: Ranks, habit: str, options: FiveStageOptions | None, dense: Optimizer = adam) -> Trained:
    model, change, around = HABITS[habit]
    sharded, optimizer = build(ranks, model, PLANS["TW"], dense)
    optimizer = change(sharded, optimizer) if change is not None else optimizer
    return drive(ranks, sharded, optimizer, around, options, iter(batches(ranks, STEPS)))[0]


def drive(
    ranks: Ranks,
    sharded: Any,
    optimizer: Any,
    around: Around | None,
    options: FiveStageOptions | None,
    data: Iterator[Any],
) -> tuple[Trained, dict[str, Any]]:
    """Trains on all of `data` with a habit, by stock TorchRec or by the drop-in; returns what was trained, and the
    drop-in's description."""
    pipeline: Any = (
        TrainPipelineSparseDist(sharded, optimizer, ranks.device)
        if options is None
        else FiveStagePipeline(sharded, optimizer, ranks.device, options)
    )
    outputs, described = [], {}
    for step in count():
        if around is not None:
            around(sharded, optimizer, step)
        try:
            outputs.append(tuple(of.detach().clone() for of in pipeline.progress(data)))
        except StopIteration:
            break
    if options is not None:
        described = pipeline.describe()
        pipeline.close()
    of_model = {k: v for k, v in state(sharded, optimizer).items() if "future" not in k}
    average = {f"average {k}": v for k, v in vars(sharded).get("average", {}).items()}
    return Trained(outputs, of_model | average), described


GRAPH = FiveStageOptions(cuda_graph="dense")
# What a captured step of Adam computes: stock's own with `capturable` rounds as it does.
capturable = partial(torch.optim.Adam, lr=0.01, capturable=True)
HALF = ("autocast", "scaler")
"""Compute in bf16: a captured step of Adam rounds its bias corrections to fp32, up to 3e-5 of them in the first steps,
so that now and then a weight is rounded to its other neighbour in bf16, 0.4 % away."""


def parity(ranks: Ranks) -> None:
    """Bit by bit as stock; beside a dense graph, too, where both have the optimizer that a graph can capture. Its plain
    twin counts steps on the host: losses in fp32 are within rounding then. On the CPU replays are operators."""
    signal.alarm(600)
    on_cpu, wrong = ranks.device.type == "cpu", []
    captured = [habit for habit in HABITS if habit not in ("average", "autocast", "compile")] if on_cpu else [*HABITS]
    in_fp32 = [habit for habit in captured if on_cpu or habit not in HALF]
    runs: list[tuple[FiveStageOptions, list[str], Optimizer, bool]] = [(FiveStageOptions(), [*HABITS], adam, True)]
    runs.append((GRAPH, in_fp32, adam, False))
    if not on_cpu:
        runs.append((GRAPH, captured, capturable, True))
    of_stock: dict[tuple[str, Optimizer], Trained] = {}
    for options, habits, dense, exact in runs:
        for habit in habits:
            if (habit, dense) not in of_stock:
                of_stock[habit, dense] = train(ranks, habit, None, dense)
        if options is GRAPH and on_cpu:
            dense_graph_on_cpu()
        for habit in habits:
            theirs, ours = of_stock[habit, dense], train(ranks, habit, options, dense)
            tolerance = 0.0 if exact else 1e-5
            try:
                torch.testing.assert_close(ours.outputs, theirs.outputs, rtol=tolerance, atol=tolerance)
                if not tolerance:
                    torch.testing.assert_close(ours.state, theirs.state, rtol=0, atol=0)
            except AssertionError as error:
                wrong.append(f"{habit}, {options.cuda_graph}, {dense}: {error}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(("world_size", "gpu"), [(2, False), *GPU_PLACES])
def test_train_as_stock(run_ranks, world_size, gpu):
    run_ranks(world_size, parity, gpu=gpu)


class Distinct(Loss):
    """A tower over bags of another number of samples, which inverse indices spread over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.model = TwoTower()
        self.out = nn.Linear(1, 1)

    def logits(self, batch: AnyBatch) -> Tensor:
        return self.out(self.model.logits(batch).unsqueeze(-1)).squeeze(-1)


def vbe(ranks: Ranks) -> str:
    """Features of different batch sizes in one KJT."""
    signal.alarm(600)
    dense_graph_on_cpu()
    data = []
    for batch in batches(ranks, 8):
        size, keys = len(batch.labels), batch.bags.keys()
        strides = [size - 2, size - 2, size, size]
        random = torch.Generator().manual_seed(ranks.rank)
        lengths = torch.randint(0, 4, (sum(strides),), generator=random, dtype=torch.int32)
        inverse = torch.stack([torch.randint(0, stride, (size,), generator=random) for stride in strides])
        batch.bags = KeyedJaggedTensor(
            keys, torch.randint(0, 7, (int(lengths.sum()),), generator=random), lengths=lengths,
            stride_per_key_per_rank=[[stride] for stride in strides], inverse_indices=(keys, inverse),
        )  # fmt: skip
        data.append(batch)
    results = []
    for options in (None, FiveStageOptions(), GRAPH):
        model, optimizer = build(ranks, Distinct, PLANS["TW"], tables=RowWiseAdagrad)
        pipeline: Any = (
            TrainPipelineSparseDist(model, optimizer, ranks.device)
            if options is None
            else FiveStagePipeline(model, optimizer, ranks.device, options)
        )
        source = iter(copy.deepcopy(data))
        results.append([pipeline.progress(source)[1].detach().clone() for _ in data])
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)
    torch.testing.assert_close(results[2], results[0], rtol=1e-5, atol=1e-5)
    assert pipeline._graph.captured
    pipeline.close()
    return str(pipeline.switched_off["pinned_d2h"])


def test_variable_batch_sizes_train_as_stock(run_ranks):
    for why in run_ranks(2, vbe):
        assert "pinned" in why or "batch sizes differ" in why
