"""Cross-cutting: HSTU trains bit by bit as by TrainPipelineSparseDist, with the drop-in's switches off and on."""

from functools import partial
from itertools import islice
from typing import Any

import pytest
import torch
from torchrec import EmbeddingCollection
from torchrec.distributed import TrainPipelineSparseDist
from torchrec.optim import RowWiseAdagrad

from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.dlrm.zoo.hstu.batch import HstuBatch, batch_ids, random_batches
from dlrm_bench.dlrm.zoo.hstu.config import TINY
from dlrm_bench.dlrm.zoo.hstu.model import HstuRanker, HstuTrain
from dlrm_bench.pipeline.five_stage import FiveStageOptions, FiveStagePipeline, TrimmedECSharder
from tests.cases import GPU_PLACES
from tests.pipeline.five_stage.any_models import PLANS, build
from tests.pipeline.five_stage.test_any_model import adam_of, assert_equal
from tests.pipeline.five_stage.torchrec_models import Trained, drain, state

OPTIONS = {
    "none": FiveStageOptions(avoid_record_streams=False, pinned_d2h=False),
    "all": FiveStageOptions(cuda_graph="dense", launch_threads=2),
}


def plain(bf16: bool) -> HstuTrain:
    return HstuTrain(HstuRanker(TINY, torch.device("cpu"), torch.device("cpu"), bf16))


def train(
    ranks: Ranks,
    plan: str,
    options: FiveStageOptions | None,
    batches: list[HstuBatch],
    padded: bool = False,
    bf16: bool = False,
) -> Trained:
    """padded: batches are, and the input dist is trimmed."""
    sharders = {EmbeddingCollection: TrimmedECSharder(batch_ids=batch_ids(TINY, 5))} if padded else None
    model, optimizer = build(ranks, partial(plain, bf16), PLANS[plan], adam_of(ranks), sharders, RowWiseAdagrad)
    if options is None:
        pipeline: Any = TrainPipelineSparseDist(model, optimizer, ranks.device)
        trained = drain(pipeline, iter(batches))
    else:
        with FiveStagePipeline(model, optimizer, ranks.device, options) as pipeline:
            trained = drain(pipeline, iter(batches))
            trained.captured = pipeline._graph is not None and pipeline._graph.captured
        assert not padded or model.module.model.tables.why_not_trimmed is None
    trained.state = state(model, optimizer)
    return trained


def parity(ranks: Ranks, rtol: float, steps: int) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    batches, padded = (
        list(islice(random_batches(TINY, 5, seed=7, rank=ranks.rank, padded=padded, ranks=ranks.world_size), steps))
        for padded in (False, True)
    )
    assert len({batch.actions.numel() for batch in padded}) > 1
    if ranks.device.type == "cuda":
        batches, padded = ([batch.pin_memory() for batch in of] for of in (batches, padded))
    for plan, bf16 in (("TW", True), ("RW", False), ("TW", False)):
        theirs = train(ranks, plan, None, batches, bf16=bf16)
        assert len(theirs.outputs) == steps
        for name, options in OPTIONS.items():
            ours = train(ranks, plan, options, batches, bf16=bf16)
            assert_equal(ours, theirs, rtol, f"{plan}, {name}, {bf16}")
    ours = train(ranks, "TW", OPTIONS["all"], padded, padded=True)
    assert ours.captured == (ranks.device.type == "cuda")
    assert_equal(ours, theirs, 1e-5, "padded")  # sums over more rows are made in another order


@pytest.mark.parametrize("world_size", [1, 2])
def test_trains_bit_by_bit_as_torchrec(run_ranks: Any, world_size: int) -> None:
    run_ranks(world_size, parity, 0, 5)


@pytest.mark.parametrize(("world_size", "gpu"), GPU_PLACES)
def test_trains_as_torchrec_gpu(run_ranks: Any, world_size: int, gpu: bool) -> None:
    run_ranks(world_size, parity, 0, 20, gpu=gpu)
