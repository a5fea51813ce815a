"""Ranks with more batches than another end with an error on all of them, or with the shortest."""

import signal
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.five_stage.batch_end import EVALUATES, BatchEnd
from dlrm_bench.pipeline.five_stage.iteration_graph import FIRST
from dlrm_bench.pipeline.five_stage.options import FiveStageOptions
from dlrm_bench.pipeline.five_stage.pipeline import FiveStagePipeline
from dlrm_bench.pipeline.five_stage.trimmed.sharder import TrimmedEBCSharder
from tests.pipeline.cpu_graphs import iteration_graph_on_cpu
from tests.pipeline.five_stage.torchrec_models import HOT, batches, build, drain


def ends(ranks: Ranks) -> list[Any]:
    """Batches trained on, and what was raised; of every pair of numbers of batches."""
    signal.alarm(600)
    results: list[Any] = []
    for mode in ("stop", "error"):
        model, optimizer = build(ranks, "TW")
        with FiveStagePipeline(model, optimizer, ranks.device, FiveStageOptions(uneven_end=mode)) as pipeline:
            for of_ranks in ((3, 5), (1, 0), (4, 4), (6, 2)):
                data = iter(batches(ranks, of_ranks[ranks.rank]))
                done: list[int] = []
                try:
                    drain(pipeline, data, done.append)
                    said = None
                except ValueError as error:
                    said = str(error)
                results.append((mode, of_ranks, len(done) - 1, said))
    return results


def test_all_ranks_end_together(run_ranks):
    one, other = run_ranks(2, ends)
    assert one == other
    assert [done for _, _, done, _ in one] == [3, 0, 4, 2] * 2
    said = {of_ranks: message for mode, of_ranks, _, message in one if mode == "error"}
    assert said[(3, 5)].startswith("the data of rank 0 ended after 3 batches, rank 1 had more")
    assert said[(6, 2)].startswith("the data of rank 1 ended after 2 batches, rank 0 had more")
    assert said[(1, 0)] is not None
    assert said[(4, 4)] is None
    assert all(message is None for mode, _, _, message in one if mode == "stop")


def stops_early(ranks: Ranks) -> list[Any]:
    """Calls of `progress` until an error, what it said, and the batches trained on afterwards, of callers that take
    other numbers of batches from the first iterators than these have."""
    signal.alarm(600)
    results: list[Any] = []
    # Of each rank: batches of the first iterator, and how many are taken before the second, which has two.
    for of_ranks, taken in (((3, 4), (3, 3)), ((3, 4), (2, 2)), ((3, 4), (3, 4)), ((4, 4), (3, 3))):
        model, optimizer = build(ranks, "TW")
        with FiveStagePipeline(model, optimizer, ranks.device) as pipeline:
            first, second = (iter(batches(ranks, count)) for count in (of_ranks[ranks.rank], 2))
            done, said = 0, None
            try:
                for _ in range(taken[ranks.rank]):
                    pipeline.progress(first)
                    done += 1
                pipeline.progress(second)
                done += 1
            except ValueError as error:
                said = str(error)
            results.append((done, said, len(drain(pipeline, second).outputs)))
    return results


def test_a_batch_that_was_read_ahead_is_not_dropped_in_silence(run_ranks):
    one, other = run_ranks(2, stops_early)
    assert one == other
    assert [(done, rest) for done, _, rest in one] == [(3, 2), (2, 3), (3, 2), (4, 2)]
    for _, said, _ in one[:3]:
        assert said.startswith("the data of rank 0 ended after 3 batches, rank 1 had more")
    assert one[3][1] is None


def uneven_twice(ranks: Ranks) -> list[tuple[bool, str]]:
    """Whether an error is due, and its words, of two iterators; rank 1's have three batches, rank 0's more."""
    end, found = BatchEnd(dist.group.WORLD, "error"), []
    for _ in range(2):
        end.begin()
        for batch in range(4):
            end.announce(batch < 3 or ranks.rank == 0)
            end.settle()
        due = end.owes_error
        with pytest.raises(ValueError, match="ended after") as raised:
            end.end()
        found.append((due, str(raised.value)))
    return found


def test_every_uneven_end_of_a_pipeline_is_an_error(run_ranks):
    for of_rank in run_ranks(2, uneven_twice):
        for due, said in of_rank:
            assert due
            assert "the data of rank 1 ended after 3 batches, rank 0 had more" in said


def forms(ranks: Ranks) -> list[tuple[bool, bool]]:
    """Whether each batch is trained, and whether ranks have announced one form of it."""
    end = BatchEnd(dist.group.WORLD, "stop")
    end.begin()
    found = []
    for has_batch, form in (
        (True, 0),
        (True, ranks.rank),
        (True, 2),
        (True, None if ranks.rank else 2),
        (True, None),
        (ranks.rank == 0, 1),
    ):
        end.announce(has_batch, form)
        found.append((end.settle(), end.one_form))
    return found


def test_ranks_tell_each_other_the_form(run_ranks):
    one, other = run_ranks(2, forms)
    assert one == other
    assert [trained for trained, _ in one] == [True] * 5 + [False]
    assert [one_form for _, one_form in one] == [True, False, True, False, True, True]


def rooms(ranks: Ranks) -> list[tuple[bool, bool]]:
    """Whether each batch fits on all ranks, and has one form."""
    end = BatchEnd(dist.group.WORLD, "stop")
    end.begin()
    found = []
    for form, fits in ((0, True), (None, ranks.rank == 0), (2, ranks.rank == 1), (2, False), (2, True)):
        end.announce(True, form, fits)
        assert end.settle()
        found.append((end.fits, end.one_form))
    return found


def test_a_rank_without_room_tells_the_others(run_ranks):
    one, other = run_ranks(2, rooms)
    assert one == other == [(True, True), (False, True), (False, True), (False, True), (True, True)]
    assert [fits for fits, _ in run_ranks(1, rooms)[0]] == [True, True, False, False, True]


def alone(ranks: Ranks) -> tuple[list[str | None], str]:
    """What keeps each iteration from the graph, and the error where rank 1 says of the eighth one that it was kept. Its
    collectives are as before: others would not end on a CPU."""
    iteration_graph_on_cpu()
    why_not: list[str | None] = []
    runs = BatchEnd.runs

    def told(end: BatchEnd, why: str | None) -> str | None:
        if why != EVALUATES:
            why_not.append(why)
        runs(end, "another value is p" if ranks.rank == 1 and len(why_not) == 8 else why)
        return why

    model, optimizer = build(ranks, "TW", sharder=TrimmedEBCSharder(HOT))
    data = iter(batches(ranks, 14, fixed=True))
    pipeline = FiveStagePipeline(model, optimizer, ranks.device, FiveStageOptions(cuda_graph="iteration"))
    with patch.object(BatchEnd, "runs", told):
        for _ in range(8):
            pipeline.progress(data)
        with pytest.raises(ValueError, match="without the graph") as raised:
            pipeline.progress(data)
    return why_not, str(raised.value)


def test_a_rank_that_alone_leaves_the_graph_is_an_error_on_all(run_ranks):
    """Otherwise their collectives would wait for one another on the device, and nobody would say why."""
    said = "rank 1 ran an iteration without the graph that the other ranks took{}: change the model, the optimizer"
    for (why_not, error), here in zip(run_ranks(2, alone), ("", " (here: another value is p)"), strict=True):
        assert why_not == [FIRST] * 3 + [None] * 5
        assert error.startswith(said.format(here))


def evaluates(ranks: Ranks) -> list[str | None]:
    """What was kept from the graph last, after training, two batches of evaluation, and training again."""
    iteration_graph_on_cpu()
    model, optimizer = build(ranks, "TW", sharder=TrimmedEBCSharder(HOT))
    kept = []
    with FiveStagePipeline(model, optimizer, ranks.device, FiveStageOptions(cuda_graph="iteration")) as pipeline:
        drain(pipeline, iter(batches(ranks, 8, fixed=True)))
        kept.append(pipeline._end._why_not)
        model.eval()
        held_out = iter(batches(ranks, 2, fixed=True))
        for _ in range(2):
            with torch.no_grad():
                pipeline.progress(held_out)
            kept.append(pipeline._end._why_not)
        model.train()
        drain(pipeline, iter(batches(ranks, 2, fixed=True)))
        kept.append(pipeline._end._why_not)
    return kept


def test_what_evaluates_is_in_no_graph(run_ranks):
    for kept in run_ranks(2, evaluates):
        assert kept == [None, EVALUATES, EVALUATES, None]
