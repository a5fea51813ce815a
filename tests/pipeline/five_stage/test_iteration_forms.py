"""Cross-cutting: batches of several declared numbers of ids train bit by bit as stock trains them, in a graph for each
pair of forms that come one after the other."""

import random
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torchrec import EmbeddingBagCollection, EmbeddingCollection, KeyedJaggedTensor
from torchrec.distributed import TrainPipelineSparseDist

import dlrm_bench.pipeline.five_stage.iteration_graph
import dlrm_bench.pipeline.five_stage.iteration_pairs
import dlrm_bench.pipeline.five_stage.trimmed.capacity_dist
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.five_stage import reasons
from dlrm_bench.pipeline.five_stage.iteration_slots import TURNS
from dlrm_bench.pipeline.five_stage.options import FiveStageOptions
from dlrm_bench.pipeline.five_stage.pipeline import FiveStagePipeline
from dlrm_bench.pipeline.five_stage.trimmed.ec_sharder import TrimmedECSharder
from dlrm_bench.pipeline.five_stage.trimmed.sharder import TrimmedEBCSharder
from tests.cases import GPU_PLACES
from tests.pipeline.cpu_graphs import iteration_graph_on_cpu
from tests.pipeline.five_stage.any_models import (
    BATCH,
    CW,
    DP,
    LONGEST,
    PLANS,
    ROWS,
    RW,
    SEQUENCES,
    Plan,
    batches,
    build,
)
from tests.pipeline.five_stage.test_iteration_habits import BAGS, Several, sgd
from tests.pipeline.five_stage.torchrec_models import Trained, drain, state

EAGER = 3
IDS = (12, 20, 30)
"""Ids of a feature in a batch; the forms are their places here."""
SHARDERS: dict[type, Any] = {
    EmbeddingBagCollection: TrimmedEBCSharder(BAGS),
    EmbeddingCollection: TrimmedECSharder(batch_ids=[dict.fromkeys(SEQUENCES, ids) for ids in IDS]),
}
WHOLE = FiveStageOptions(cuda_graph="iteration")
ALWAYS = [0] * 12
"""One form, as far as the graphs of one form go."""
CHANGING = random.Random(5).choices(range(len(IDS)), k=40)


@dataclass
class Run:
    trained: Trained
    described: dict[str, Any]
    off: dict[str, str]


def data_of(ranks: Ranks, forms: Sequence[int], seed: int = 1) -> list[Any]:
    """Batches of these forms, the same on all ranks; lengths and ids differ between ranks."""
    of_ids = torch.Generator().manual_seed(7 * seed + 100 * ranks.rank)
    made = []
    for batch, form in zip(batches(ranks, len(forms), seed, full=True), forms, strict=True):
        lengths = torch.full((len(SEQUENCES), BATCH), LONGEST, dtype=torch.int32)
        for of_feature in lengths:
            while of_feature.sum() > IDS[form]:
                of_feature[torch.randint(BATCH, (), generator=of_ids)].sub_(1).clamp_(0)
        ids = [torch.randint(ROWS[key], (IDS[form],), generator=of_ids) for key in SEQUENCES]
        sequences = KeyedJaggedTensor(list(SEQUENCES), torch.cat(ids), lengths=lengths.view(-1), stride=BATCH)
        batch = replace(batch, sequences=sequences)
        made.append(batch.pin_memory() if ranks.device.type == "cuda" else batch)
    return made


def train(
    ranks: Ranks,
    parts: Sequence[list[Any]],
    ours: bool,
    each: Callable[[int, Any, Any], None] = lambda *_: None,
    plan: Plan = PLANS["TW"],
    options: FiveStageOptions = WHOLE,
) -> Run:
    """parts: batches of one iterator after the other. each(step, optimizer, model): before every step."""
    model, optimizer = build(ranks, Several, plan, sgd, SHARDERS if ours else None)
    trained, described, off = Trained(), {}, {}
    pipeline: Any = (
        FiveStagePipeline(model, optimizer, ranks.device, options)
        if ours
        else TrainPipelineSparseDist(model, optimizer, ranks.device)
    )
    for part in parts:
        trained.outputs += drain(pipeline, iter(part), lambda step: each(step, optimizer, model)).outputs
    trained.state = state(model, optimizer)
    if ours:
        described, off = pipeline.describe(), pipeline.switched_off
        pipeline.close()
    return Run(trained, described, off)


def compared(ranks: Ranks, parts: Sequence[list[Any]], rtol: float = 0.0, **how: Any) -> dict[str, Any]:
    """Returns what our pipeline says of its graphs, after it has trained what stock trains."""
    ours, theirs = train(ranks, parts, True, **how), train(ranks, parts, False, **how)
    assert len(ours.trained.outputs) == sum(map(len, parts))
    torch.testing.assert_close(ours.trained.outputs, theirs.trained.outputs, rtol=rtol, atol=rtol)
    torch.testing.assert_close(ours.trained.state, theirs.trained.state, rtol=10 * rtol, atol=rtol)
    return ours.described


def prepare(ranks: Ranks) -> None:
    signal.alarm(600)
    torch.backends.cuda.matmul.allow_tf32 = False
    if ranks.device.type == "cpu":
        iteration_graph_on_cpu()


def parity(ranks: Ranks, rtol: float) -> list[dict[str, Any]]:
    prepare(ranks)
    forms = (ALWAYS, CHANGING, [0, 1] * 8)
    return [compared(ranks, [data_of(ranks, of)], rtol) for of in forms]


@pytest.mark.parametrize(
    ("world_size", "gpu", "rtol"),
    [(1, False, 0.0), (2, False, 0.0), *(pytest.param(*place.values, 1e-4, marks=place.marks) for place in GPU_PLACES)],
)
def test_changing_forms_train_as_stock(run_ranks: Any, world_size: int, gpu: bool, rtol: float) -> None:
    for always, changing, alternating in run_ranks(world_size, parity, rtol, gpu=gpu):
        assert always["captures"] == 1
        assert always["replays"] == len(ALWAYS) - EAGER - 2
        assert changing["forms"] == 3
        assert changing["captures"] == 9  # all pairs
        assert alternating["captures"] == 2
        for described, steps in ((always, len(ALWAYS)), (changing, len(CHANGING)), (alternating, 16)):
            assert described["eager"] == {}
            assert described["replays"] + described["rehearsals"] == steps - EAGER
            # Each form is rehearsed as a batch's and as the next one's, and the first ones at both turns.
            assert described["rehearsals"] <= 2 * described["forms"]


def bounded(ranks: Ranks) -> list[dict[str, Any]]:
    """With fewer pairs and forms than come."""
    prepare(ranks)
    data, described = data_of(ranks, CHANGING), []
    with patch.object(dlrm_bench.pipeline.five_stage.iteration_pairs, "MOST_CHANGES", 2):
        described.append(compared(ranks, [data]))
    with patch.object(dlrm_bench.pipeline.five_stage.iteration_graph, "MOST_FORMS", 2):
        described.append(compared(ranks, [data]))
    return described


def test_pairs_and_forms_are_bounded(run_ranks: Any) -> None:
    for few_pairs, few_forms in run_ranks(2, bounded):
        assert few_pairs["captures"] <= 3 + 2
        assert few_pairs["eager"] == {}
        assert few_pairs["replays"] + few_pairs["rehearsals"] == len(CHANGING) - EAGER
        assert few_forms["forms"] == 2
        ((why, count),) = few_forms["eager"].items()
        assert "2 other numbers of ids (batch_ids) had come before" in why
        assert 0 < count < len(CHANGING) - few_forms["replays"]


def moves(step: int, optimizer: Any, model: Any) -> None:
    """Other memory of a weight."""
    if step == 24:
        model.module.out.weight.data = model.module.out.weight.data.clone()


def rates(step: int, optimizer: Any, model: Any) -> None:
    """Another rate of the tables, which on CPUs takes new captures."""
    if step in (22, 30):
        for group in next(part for _, part in optimizer.optimizers).param_groups:
            group["lr"] = 0.05 / step


def around(ranks: Ranks) -> list[dict[str, Any]]:
    """Changes on the way; several iterators; another form on one rank alone."""
    prepare(ranks)
    data = data_of(ranks, CHANGING)
    described = [compared(ranks, [data], each=each) for each in (moves, rates)]
    described.append(compared(ranks, [data[:9], data[9:10], [], data[10:]]))
    if ranks.rank == 1:
        data[25] = replace(data[25], labels=data[25].labels.double())
    described.append(compared(ranks, [data]))
    return described


@pytest.mark.slow
def test_what_happens_on_the_way(run_ranks: Any) -> None:
    for moved, rated, parted, other in run_ranks(2, around):
        ((why, _),) = moved["eager"].items()
        assert "lies in other memory" in why
        assert moved["captures"] > 9
        assert rated["eager"] == {}
        assert rated["captures"] > 9
        assert parted["eager"] == {}
        ((why, count),) = other["eager"].items()
        assert "another form" in why
        assert count == 2


def mixed(index: int, sequence: bool) -> str:
    """The two weighted tables by rows, others by columns or replicated."""
    if index < 2:
        return RW
    return CW if sequence or index % 2 else DP


def by_rows(ranks: Ranks) -> dict[str, Any]:
    """With room for few of the ids that name one rank's rows: some batches have more."""
    prepare(ranks)
    with (
        patch.object(dlrm_bench.pipeline.five_stage.trimmed.capacity_dist, "OVERFLOWS", 0.9),
        patch.dict(SHARDERS, {EmbeddingBagCollection: TrimmedEBCSharder(BAGS, row_capacity=1.0)}),
    ):
        return compared(ranks, [data_of(ranks, CHANGING)], plan=mixed)


def test_rows_by_capacity_columns_and_replicas(run_ranks: Any) -> None:
    for described in run_ranks(2, by_rows):
        ((why, count),) = described["eager"].items()
        assert why == reasons.OVERFLOW()
        assert 0 < count < 10
        assert described["captures"] > 4
        assert described["replays"] + described["rehearsals"] + count == len(CHANGING) - EAGER


def fails_later(ranks: Ranks) -> tuple[str, dict[str, str]]:
    """Rank 1 cannot capture the third pair."""
    prepare(ranks)
    data, record, captures = data_of(ranks, CHANGING), dlrm_bench.pipeline.five_stage.iteration_graph.record, []

    def failing(work: Any, **how: Any) -> Any:
        captures.append(work)
        if ranks.rank == 1 and len(captures) > 2 * TURNS:
            raise RuntimeError("no memory is left for it")
        return record(work, **how)

    with patch.object(dlrm_bench.pipeline.five_stage.iteration_graph, "record", failing):
        with pytest.raises(ValueError, match="cuda_graph='iteration'") as caught:
            train(ranks, [data], True)
        captures.clear()
        ours = train(ranks, [data], True, options=FiveStageOptions(cuda_graph="iteration-or-dense"))
    theirs = train(ranks, [data], False)
    torch.testing.assert_close(ours.trained.outputs, theirs.trained.outputs, rtol=0, atol=0)
    torch.testing.assert_close(ours.trained.state, theirs.trained.state, rtol=0, atol=0)
    return str(caught.value), ours.off


def test_a_later_pair_that_a_rank_cannot_capture_is_an_error_or_leaves_the_dense_part(run_ranks: Any) -> None:
    for said, off in run_ranks(2, fails_later):
        assert "rank 1: " in said
        assert "no memory is left for it" in said
        assert "for whole iterations, and on for the dense part: rank 1: " in off["cuda_graph"]
