"""Cross-cutting: models of all kinds, with several sharded modules, train bit by bit as by TrainPipelineSparseDist."""

import signal
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torchrec.distributed import TrainPipelineSparseDist

from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.five_stage.options import FiveStageOptions
from dlrm_bench.pipeline.five_stage.pipeline import FiveStagePipeline
from tests.cases import GPU_PLACES
from tests.pipeline.five_stage.any_models import MODELS, PLANS, Optimizer, adam, batches, build
from tests.pipeline.five_stage.torchrec_models import Trained, drain, state

STEPS = 6
TIMEOUT = 600  # seconds, after which a rank that hangs is killed
OPTIONS = {
    "none": FiveStageOptions(avoid_record_streams=False, pinned_d2h=False),
    "all": FiveStageOptions(cuda_graph="dense", launch_threads=2),
}


@dataclass(frozen=True)
class Case:
    model: str
    plan: str


def assert_equal(ours: Trained, theirs: Trained, rtol: float, what: str) -> None:
    assert len(ours.outputs) == len(theirs.outputs) > 0
    said = lambda message: f"{what}: {message}"  # noqa: E731
    for mine, other in zip(ours.outputs, theirs.outputs, strict=True):
        torch.testing.assert_close(mine, other, rtol=rtol, atol=rtol, msg=said)
    torch.testing.assert_close(ours.state, theirs.state, rtol=10 * rtol, atol=rtol, msg=said)


def adam_of(ranks: Ranks) -> Optimizer:
    """Adam; on a GPU the fused one, whose captured step rounds as its eager one."""
    return partial(torch.optim.Adam, lr=0.01, fused=True) if ranks.device.type == "cuda" else adam


def train(ranks: Ranks, case: Case, options: FiveStageOptions | None, steps: int) -> tuple[Trained, Any]:
    model, optimizer = build(ranks, MODELS[case.model], PLANS[case.plan], adam_of(ranks))
    data = iter(batches(ranks, steps))
    if options is None:
        pipeline: Any = TrainPipelineSparseDist(model, optimizer, ranks.device)
        trained = drain(pipeline, data)
    else:
        with FiveStagePipeline(model, optimizer, ranks.device, options) as pipeline:
            trained = drain(pipeline, data)
            trained.captured = pipeline._graph is not None and pipeline._graph.captured
    trained.state = state(model, optimizer)
    return trained, pipeline


def parity(ranks: Ranks, cases: list[Case], rtol: float, steps: int) -> dict[str, dict[str, str]]:
    """What was off with all switches on, by model. rtol: of sequences that a graph has padded."""
    signal.alarm(TIMEOUT)
    torch.backends.cuda.matmul.allow_tf32 = False
    off, wrong = {}, []
    for case in cases:
        theirs, _ = train(ranks, case, None, steps)
        for name, options in OPTIONS.items():
            ours, pipeline = train(ranks, case, options, steps)
            padded = ours.captured and case.model == "sequence"
            try:
                assert_equal(ours, theirs, rtol if padded else 0, f"{case}, {name}")
            except AssertionError as error:
                wrong.append(str(error))
        off[case.model] = dict(pipeline.switched_off)
    assert not wrong, "\n".join(wrong)
    return off


CASES = [Case(model, "mixed") for model in MODELS] + [
    Case(model, plan) for model, plan in product(("sequence", "everything"), PLANS) if plan not in ("mixed", "DP")
]
# TorchRec's own pipeline cannot look up data-parallel tables of an EmbeddingCollection on the CPU.
ON_GPU = [*CASES, Case("sequence", "DP"), Case("everything, unprocessed", "DP")]


@pytest.mark.parametrize("world_size", [1, 2])
def test_trains_bit_by_bit_as_torchrec(run_ranks, world_size):
    for off in run_ranks(world_size, parity, CASES, 0, STEPS):
        assert set(off) == set(MODELS)


@pytest.mark.parametrize("models", ["dlrm, dcn, projection, deepfm, two towers", "sequence", "everything"])
@pytest.mark.parametrize(("world_size", "gpu"), GPU_PLACES)
def test_trains_as_torchrec_gpu(run_ranks, world_size, gpu, models):
    kinds = models.split(", ")
    run_ranks(world_size, parity, [case for case in ON_GPU if case.model.split(", ")[0] in kinds], 1e-5, 12, gpu=gpu)
