"""Cross-cutting: feature processors within the graph of an iteration train bit by bit as stock trains them."""

import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, JaggedTensor
from torchrec.distributed import TrainPipelineSparseDist
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.modules.feature_processor_ import PositionWeightedModule, PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.five_stage import reasons
from dlrm_bench.pipeline.five_stage.options import FiveStageOptions
from dlrm_bench.pipeline.five_stage.pipeline import FiveStagePipeline
from dlrm_bench.pipeline.five_stage.trimmed.sharder import TrimmedEBCSharder
from tests.cases import GPU_PLACES
from tests.pipeline.cpu_graphs import iteration_graph_on_cpu
from tests.pipeline.five_stage.any_models import (
    CW,
    DENSE,
    DIM,
    DP,
    LONGEST,
    PLANS,
    TW,
    AnyBatch,
    Everything,
    Plan,
    bags,
    batches,
    build,
    sequences,
)
from tests.pipeline.five_stage.test_iteration_forms import CHANGING, data_of
from tests.pipeline.five_stage.test_iteration_forms import SHARDERS as OF_FORMS
from tests.pipeline.five_stage.test_iteration_habits import BAGS, SHARDERS, sgd
from tests.pipeline.five_stage.torchrec_models import Trained, drain, state

STEPS, EAGER = 24, 5
CPU = torch.device("cpu")
PROCESSED: dict[type, Any] = {
    FeatureProcessedEmbeddingBagCollection: FeatureProcessedEmbeddingBagCollectionSharder(TrimmedEBCSharder(BAGS))
}


class Processed(Everything):
    """Bags with and without weights, sequences, and features whose ids have weights of processors."""

    def __init__(self, processors: Callable[[], Any]) -> None:
        super().__init__(processed=False)
        self.items = sequences()
        tables = bags(("u1", "i0", "i1"), weighted=True)
        for config in tables.embedding_bag_configs():
            config.name = f"processed_{config.name}"
        tables = EmbeddingBagCollection(tables=tables.embedding_bag_configs(), is_weighted=True, device=CPU)
        self.processed = FeatureProcessedEmbeddingBagCollection(tables, processors())
        self.out = nn.Linear(8 * DIM + DENSE, 1)

    def logits(self, batch: AnyBatch) -> Tensor:
        found = self.items(batch.sequences)
        pooled = [self.tower["deep"](batch.bags), self.weighted(batch.weighted).values()]
        pooled += [self.processed(batch.bags).values(), found["history"].to_padded_dense(LONGEST).sum(dim=1)]
        pooled.append(found["context"].to_padded_dense(LONGEST).sum(dim=1))
        return self.out(torch.cat([batch.dense, *pooled], dim=1)).squeeze(-1)


class Past(nn.Module):
    """Reads its parameter from a list."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.read = [self.weight]

    def forward(self, features: JaggedTensor) -> JaggedTensor:
        places = torch.ops.fbgemm.offsets_range(features.offsets().long(), features.values().numel())
        weights = torch.gather(self.read[0], 0, places)
        return JaggedTensor(features.values(), lengths=features.lengths(), weights=weights)


def collection() -> PositionWeightedModuleCollection:
    """With parameters in a dict too; none for i0, and one for a feature that this module does not have."""
    return PositionWeightedModuleCollection({"i1": 4, "u1": 3, "u0": 2}, device=CPU)


def by_feature() -> dict[str, nn.Module]:
    return {key: PositionWeightedModule(4, device=CPU) for key in ("i1", "u1", "i0")}


def past() -> dict[str, nn.Module]:
    return by_feature() | {"i1": Past()}


def split(index: int, sequence: bool) -> str:
    """Columns, replicas and whole tables."""
    return TW if sequence else (TW, CW, DP)[index % 3]


def moves(step: int, optimizer: Any, model: Any) -> None:
    """Other memory of a processor's parameter."""
    if step == 12:
        parameter = next(model.module.processed._feature_processors.parameters())
        parameter.data = parameter.data.clone()


def train(
    ranks: Ranks,
    data: list[Any],
    processors: Callable[[], Any],
    plan: Plan = PLANS["TW"],
    options: FiveStageOptions | None = None,
    sharders: dict[type, Any] | None = None,
    each: Callable[[int, Any, Any], None] = lambda *_: None,
) -> tuple[Trained, dict[str, Any], dict[str, str]]:
    """options: ours; stock's without."""
    all_of = None if options is None else (sharders or SHARDERS) | PROCESSED
    model, optimizer = build(ranks, lambda: Processed(processors), plan, sgd, all_of)
    of_processors = list(model.module.processed._feature_processors.parameters())
    before = [of.detach().clone() for of in of_processors]
    pipeline: Any = (
        TrainPipelineSparseDist(model, optimizer, ranks.device)
        if options is None
        else FiveStagePipeline(model, optimizer, ranks.device, options)
    )
    trained = drain(pipeline, iter(data), lambda step: each(step, optimizer, model))
    trained.state = state(model, optimizer)
    moved = [not torch.equal(*pair) for pair in zip(before, of_processors, strict=True)]
    assert sum(moved) == (2 if processors is collection else 3)
    if options is None:
        return trained, {}, {}
    described, off = pipeline.describe(), pipeline.switched_off
    pipeline.close()
    return trained, described, off


def parity(ranks: Ranks, rtol: float) -> list[dict[str, Any]]:
    signal.alarm(600)
    torch.backends.cuda.matmul.allow_tf32 = False
    if ranks.device.type == "cpu":
        iteration_graph_on_cpu()
    described = []
    full = batches(ranks, STEPS, full=True)
    cases: list[dict[str, Any]] = [
        {"data": full, "processors": collection},
        {"data": full, "processors": by_feature, "plan": split},
        {"data": full, "processors": collection, "each": moves},
        {"data": data_of(ranks, CHANGING[:STEPS]), "processors": collection, "sharders": OF_FORMS},
        {"data": data_of(ranks, CHANGING[:STEPS]), "processors": by_feature, "sharders": OF_FORMS},
    ]
    for case in cases:
        ours, of_ours, _ = train(ranks, **case, options=FiveStageOptions(cuda_graph="iteration"))
        theirs, _, _ = train(ranks, **(case | {"sharders": None}))
        assert len(ours.outputs) == STEPS
        torch.testing.assert_close(ours.outputs, theirs.outputs, rtol=rtol, atol=rtol)
        torch.testing.assert_close(ours.state, theirs.state, rtol=10 * rtol, atol=rtol)
        described.append(of_ours)
    return described


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "gpu", "rtol"),
    [(1, False, 0.0), (2, False, 0.0), *(pytest.param(*place.values, 1e-4, marks=place.marks) for place in GPU_PLACES)],
)
def test_processors_train_as_stock(run_ranks: Any, world_size: int, gpu: bool, rtol: float) -> None:
    for plain, of_features, moved, *of_forms in run_ranks(world_size, parity, rtol, gpu=gpu):
        for described in (plain, of_features):
            assert described["captures"] == 1
            assert described["replays"] == STEPS - EAGER
            assert described["eager"] == {}
            assert len(described["in_graph"]) == 6
        assert moved["captures"] == 2
        ((why, _),) = moved["eager"].items()
        assert "processed._feature_processors" in why
        assert "lies in other memory" in why
        for forms in of_forms:
            assert forms["captures"] > 4
            assert forms["eager"] == {}


def read_past(ranks: Ranks) -> tuple[str, str]:
    signal.alarm(600)
    iteration_graph_on_cpu()
    data = batches(ranks, STEPS, full=True)
    with pytest.raises(ValueError, match="cuda_graph='iteration'") as caught:
        train(ranks, data, past, options=FiveStageOptions(cuda_graph="iteration"))
    ours, _, off = train(ranks, data, past, options=FiveStageOptions(cuda_graph="iteration-or-dense"))
    theirs, _, _ = train(ranks, data, past)
    torch.testing.assert_close(ours.outputs, theirs.outputs, rtol=0, atol=0)
    torch.testing.assert_close(ours.state, theirs.state, rtol=0, atol=0)
    return str(caught.value), off["cuda_graph"]


def test_parameters_that_are_read_past_their_module_are_named(run_ranks: Any) -> None:
    for said in run_ranks(2, read_past):
        for why in said:
            assert reasons.READ_PAST(parameter="processed: i1.weight") in why
