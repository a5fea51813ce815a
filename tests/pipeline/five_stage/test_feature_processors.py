"""Parameters of feature processors train beside a dense graph bit by bit as by TrainPipelineSparseDist."""

import signal
from typing import Any

import pytest
import torch
from torchrec import EmbeddingBagCollection
from torchrec.distributed import TrainPipelineSparseDist
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.five_stage.options import FiveStageOptions
from dlrm_bench.pipeline.five_stage.pipeline import FiveStagePipeline
from dlrm_bench.pipeline.five_stage.trimmed.sharder import TrimmedEBCSharder
from tests.cases import GPU_PLACES
from tests.pipeline.cpu_graphs import dense_graph_on_cpu
from tests.pipeline.five_stage.any_models import PLANS, Everything, batches, build
from tests.pipeline.five_stage.test_any_model import adam_of, assert_equal
from tests.pipeline.five_stage.torchrec_models import Trained, drain, state

STEPS = 8


def train(ranks: Ranks, plan: str, options: FiveStageOptions | None, trimmed: bool = False) -> Trained:
    """trimmed: all bags, plain, weighted and processed ones, none of a declared size."""
    sharders: dict[type, Any] = {}
    if trimmed:
        sharder = TrimmedEBCSharder({})
        sharders[EmbeddingBagCollection] = sharder
        sharders[FeatureProcessedEmbeddingBagCollection] = FeatureProcessedEmbeddingBagCollectionSharder(sharder)
    model, optimizer = build(ranks, Everything, PLANS[plan], adam_of(ranks), sharders)
    before = _processors(model)
    data = iter(batches(ranks, STEPS))
    if options is None:
        trained = drain(TrainPipelineSparseDist(model, optimizer, ranks.device), data)
    else:
        with FiveStagePipeline(model, optimizer, ranks.device, options) as pipeline:
            trained = drain(pipeline, data)
            assert pipeline._graph is not None
            assert pipeline._graph.captured, pipeline.switched_off
    trained.state = state(model, optimizer)
    assert not any(torch.equal(*pair) for pair in zip(before, _processors(model), strict=True))
    return trained


def _processors(model: Any) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.module.processed._feature_processors.parameters()]


def parity(ranks: Ranks) -> None:
    signal.alarm(600)
    torch.backends.cuda.matmul.allow_tf32 = False
    if ranks.device.type == "cpu":
        dense_graph_on_cpu()
    for plan in ("TW", "RW", "mixed"):
        theirs = train(ranks, plan, None)
        for threads, trimmed in ((1, True), (2, False)):
            options = FiveStageOptions(cuda_graph="dense", launch_threads=threads)
            ours = train(ranks, plan, options, trimmed and plan == "TW")
            assert_equal(ours, theirs, 0, f"{plan}, {threads}, {trimmed}")


@pytest.mark.parametrize(("world_size", "gpu"), [(2, False), *GPU_PLACES])
def test_trains_bit_by_bit_beside_a_graph(run_ranks, world_size, gpu):
    run_ranks(world_size, parity, gpu=gpu)


def frozen(ranks: Ranks) -> None:
    signal.alarm(600)
    dense_graph_on_cpu()
    model, optimizer = build(ranks, Everything, PLANS["TW"], adam_of(ranks))
    data = iter(batches(ranks, STEPS + 1))
    with FiveStagePipeline(model, optimizer, ranks.device, FiveStageOptions(cuda_graph="dense")) as pipeline:
        for _ in range(STEPS):
            pipeline.progress(data)
        next(model.module.processed._feature_processors.parameters()).requires_grad_(False)
        with pytest.raises(ValueError, match=r"a sharded module's parameter of shape .* was frozen"):
            pipeline.progress(data)


def test_freezing_one_is_refused(run_ranks):
    run_ranks(1, frozen)
