"""Cross-cutting: HSTU trains bit by bit as by TrainPipelineSparseDist, with the drop-in's switches off and on."""

from itertools import islice
from typing import Any

import pytest
import torch
from torchrec.distributed import TrainPipelineSparseDist

from dlrm_bench.dlrm.ranks import Ranks
from dlrm_bench.hstu.batch import HstuBatch, random_batches
from dlrm_bench.hstu.config import PRESETS
from dlrm_bench.hstu.model import HstuRanker, HstuTrain
from dlrm_bench.pipeline.five_stage import FiveStageOptions, FiveStagePipeline
from tests.cases import GPU_PLACES
from tests.pipeline.five_stage.any_models import PLANS, build
from tests.pipeline.five_stage.torchrec_models import Trained, drain, state

TINY = PRESETS["hstu-tiny"]
OPTIONS = {
    "none": FiveStageOptions(avoid_record_streams=False, pinned_d2h=False),
    "all": FiveStageOptions(cuda_graph="dense", launch_threads=2),
}


def plain() -> HstuTrain:
    return HstuTrain(HstuRanker(TINY, torch.device("cpu"), torch.device("cpu")))


def train(ranks: Ranks, plan: str, options: FiveStageOptions | None, batches: list[HstuBatch]) -> Trained:
    model, optimizer = build(ranks, plain, PLANS[plan])
    if options is None:
        pipeline: Any = TrainPipelineSparseDist(model, optimizer, ranks.device)
        trained = drain(pipeline, iter(batches))
    else:
        with FiveStagePipeline(model, optimizer, ranks.device, options) as pipeline:
            trained = drain(pipeline, iter(batches))
    trained.state = state(model, optimizer)
    return trained


def parity(ranks: Ranks, rtol: float, steps: int) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    batches = list(islice(random_batches(TINY, 5, seed=7, rank=ranks.rank), steps))
    if ranks.device.type == "cuda":
        batches = [batch.pin_memory() for batch in batches]
    for plan in ("TW", "RW"):
        theirs = train(ranks, plan, None, batches)
        assert len(theirs.outputs) == steps
        for name, options in OPTIONS.items():
            ours = train(ranks, plan, options, batches)
            torch.testing.assert_close(ours.outputs, theirs.outputs, rtol=rtol, atol=rtol, msg=lambda m: f"{name}: {m}")  # noqa: B023
            torch.testing.assert_close(ours.state, theirs.state, rtol=10 * rtol, atol=rtol)


@pytest.mark.parametrize("world_size", [1, 2])
def test_trains_bit_by_bit_as_torchrec(run_ranks: Any, world_size: int) -> None:
    run_ranks(world_size, parity, 0, 5)


@pytest.mark.parametrize(("world_size", "gpu"), GPU_PLACES)
def test_trains_as_torchrec_gpu(run_ranks: Any, world_size: int, gpu: bool) -> None:
    run_ranks(world_size, parity, 0, 20, gpu=gpu)
