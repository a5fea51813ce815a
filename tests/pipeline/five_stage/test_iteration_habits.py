"""Cross-cutting: what people do around a training loop works where a graph holds the whole iteration, or is refused."""

import signal
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingCollection
from torchrec.optim.keyed import CombinedOptimizer, OptimizerWrapper

from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.five_stage.options import FiveStageOptions
from dlrm_bench.pipeline.five_stage.pipeline import FiveStagePipeline
from dlrm_bench.pipeline.five_stage.trimmed.ec_sharder import TrimmedECSharder
from dlrm_bench.pipeline.five_stage.trimmed.sharder import TrimmedEBCSharder
from tests.cases import GPU_PLACES
from tests.pipeline.cpu_graphs import iteration_graph_on_cpu
from tests.pipeline.five_stage.any_models import LONGEST, PLANS, SEQUENCES, Everything, Sequence, batches, build
from tests.pipeline.five_stage.test_habits import HABITS, Prepares, drive
from tests.pipeline.five_stage.torchrec_models import Trained, drain

STEPS, EAGER = 14, 5
BAGS = dict.fromkeys(("u0", "u1", "i0", "i1", "w0", "w1"), 3)
SHARDERS: dict[type, Any] = {
    EmbeddingBagCollection: TrimmedEBCSharder(BAGS),
    EmbeddingCollection: TrimmedECSharder(sequence_lengths=dict.fromkeys(SEQUENCES, LONGEST)),
}
WHOLE = FiveStageOptions(cuda_graph="iteration")
BY_DEVICE_RATE = 1e-6
"""A captured step of SGD multiplies by a rate on the device, and rounds the product."""


class Accumulates(OptimizerWrapper):
    """Steps with the gradients of two batches."""

    batches = 0

    def zero_grad(self, set_to_none: bool = False) -> None:
        if self.batches % 2 == 0:
            self._optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:
        self.batches += 1
        if self.batches % 2 == 0:
            self._optimizer.step()


def accumulating(model: Any, optimizer: CombinedOptimizer) -> Any:
    (fused, dense) = (part for _, part in optimizer.optimizers)
    return CombinedOptimizer([fused, Accumulates(dense)])


def told_to_keep(model: Any, optimizer: CombinedOptimizer) -> Any:
    """Every second call of zero_grad keeps the gradients, as people tell an optimizer of torch's."""
    dense, calls = optimizer.optimizers[1][1], count()
    zero_grad = dense.zero_grad
    dense.zero_grad = lambda set_to_none=True: None if next(calls) % 2 else zero_grad(set_to_none)
    return optimizer


def hooked(model: Any, optimizer: CombinedOptimizer) -> Any:
    """Gradients are clipped by a hook of the step."""
    parameters = [parameter for name, parameter in model.module.named_parameters() if "mlp" in name]

    def clip(*_: Any) -> None:
        nn.utils.clip_grad_norm_(parameters, 0.01)

    optimizer.optimizers[1][1]._optimizer.register_step_pre_hook(clip)
    return optimizer


class Several(Everything):
    """Bags with and without weights and sequences, in modules at several depths; no ids of their tokens."""

    def __init__(self) -> None:
        super().__init__(processed=False)
        self.items = Sequence().items


class Reshapes(Prepares):
    """Changes a field's shape in place."""

    def logits(self, batch: Any) -> Tensor:
        batch.dense.unsqueeze_(1)
        return super().logits(batch).diagonal()


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


CASES: dict[str, Any] = HABITS | {
    "accumulation": (HABITS["clipping"][0], accumulating, None),
    "another zero_grad": (HABITS["clipping"][0], told_to_keep, None),
    "hook of the step": (HABITS["clipping"][0], hooked, None),
    "several modules": (Several, None, None),
    "shape in place": (Reshapes, None, None),
}


NOT_ON_CPU = {"compile"}
"""Replays on the CPU are of PyTorch's operators, not of what torch.compile makes of them."""


def train(ranks: Ranks, case: str, options: FiveStageOptions | None) -> tuple[Trained, dict[str, Any]]:
    model, change, around = CASES[case]
    sharders = SHARDERS if options is not None else None
    sharded, optimizer = build(ranks, model, PLANS["TW"], sgd, sharders)
    optimizer = change(sharded, optimizer) if change is not None else optimizer
    return drive(ranks, sharded, optimizer, around, options, iter(batches(ranks, STEPS, full=True)))


def parity(ranks: Ranks, rtol: float) -> dict[str, dict[str, Any]]:
    signal.alarm(600)
    if ranks.device.type == "cpu":
        iteration_graph_on_cpu()
    described, wrong = {}, []
    for case in (case for case in CASES if ranks.device.type == "cuda" or case not in NOT_ON_CPU):
        theirs, _ = train(ranks, case, None)
        ours, described[case] = train(ranks, case, WHOLE)
        tolerance = max(rtol, BY_DEVICE_RATE) if case == "schedule" else rtol
        try:
            torch.testing.assert_close(ours.outputs, theirs.outputs, rtol=tolerance, atol=tolerance)
            torch.testing.assert_close(ours.state, theirs.state, rtol=10 * tolerance, atol=tolerance)
        except AssertionError as error:
            wrong.append(f"{case}: {error}")
    assert not wrong, "\n".join(wrong)
    return described


@pytest.mark.parametrize(
    ("world_size", "gpu", "rtol"),
    [(2, False, 0.0), *(pytest.param(*place.values, 1e-4, marks=place.marks) for place in GPU_PLACES)],
)
def test_train_as_stock(run_ranks: Callable[..., Any], world_size: int, gpu: bool, rtol: float) -> None:
    for described in run_ranks(world_size, parity, rtol, gpu=gpu):
        replays = {case: of["replays"] for case, of in described.items()}
        assert replays.pop("evaluation") > 0
        assert replays == dict.fromkeys(replays, STEPS - EAGER)
        within = {case for case, of in described.items() if "dense update" in of["in_graph"]}
        outside = {"accumulation", "another zero_grad", "hook of the step", "scaler"}
        assert within == set(CASES) - outside - (set() if gpu else NOT_ON_CPU)


def uneven(ranks: Ranks) -> tuple[int, str, int]:
    """Rank 1 has three batches less."""
    signal.alarm(600)
    iteration_graph_on_cpu()
    data = batches(ranks, STEPS - 3 * ranks.rank, full=True)
    ended: list[Any] = []
    for mode in ("stop", "error"):
        options = FiveStageOptions(cuda_graph="iteration", uneven_end=mode)
        sharded, optimizer = build(ranks, HABITS["clipping"][0], PLANS["TW"], sgd, SHARDERS)
        with FiveStagePipeline(sharded, optimizer, ranks.device, options) as pipeline:
            try:
                ended.append(len(drain(pipeline, iter(data)).outputs))
            except ValueError as error:
                ended.append(str(error))
            replays = pipeline.describe()["replays"]
    return (*ended, replays)


def test_unequal_ends_of_data_end_on_all_ranks(run_ranks: Callable[..., Any]) -> None:
    for stopped, error, replays in run_ranks(2, uneven):
        assert stopped == STEPS - 3
        assert error.startswith(f"the data of rank 1 ended after {STEPS - 3} batches")
        assert replays == STEPS - 3 - EAGER
