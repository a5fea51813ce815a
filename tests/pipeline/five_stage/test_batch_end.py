"""Ranks with more batches than another end with an error on all of them, or with the shortest."""

import signal
from typing import Any

import torch.distributed as dist

from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.five_stage.batch_end import BatchEnd
from dlrm_bench.pipeline.five_stage.options import FiveStageOptions
from dlrm_bench.pipeline.five_stage.pipeline import FiveStagePipeline
from tests.pipeline.five_stage.torchrec_models import batches, build, drain


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
