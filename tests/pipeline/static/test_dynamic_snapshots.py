"""Cross-cutting: snapshots in memory of rows that are made when they are first named, whose layout stays the same while
ever more rows are made: training goes on from them to the bit."""

from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.checkpoint import OwnPieces, gathered, own_pieces, write_state
from dlrm_bench.pipeline.checkpoint_index import CheckpointError, Index, write_index
from dlrm_bench.pipeline.checkpoint_memory import PiecesInMemory, Staging, placed
from dlrm_bench.pipeline.dynamic_state import of_all_places
from dlrm_bench.pipeline.static.pipeline import StaticPipeline
from tests.cases import GPU_PLACES
from tests.pipeline.static.test_dynamic_rows import (
    BEFORE,
    EVICTING,
    FITTING,
    PLAIN,
    Found,
    in_full,
    resumes,
    second_half,
)
from tests.pipeline.static.test_tiers import STEPS, batches_of
from tests.pipelines import changed, static_pipeline


class Slot:
    """The memory of a snapshot, as made before the training."""

    def __init__(self, folder: Path, pipeline: StaticPipeline, ranks: Ranks) -> None:
        self._ranks, state = ranks, own_pieces(of_all_places(pipeline.state_blocks(), ranks), ranks.rank)
        pieces = placed(ranks.rank, [place for place, _ in state.pieces])
        index = Index(state.shapes, gathered(pieces, None), {})
        if ranks.rank == 0:
            write_index(folder, index)
        dist.barrier()
        self.shapes, self.memory = state.shapes, PiecesInMemory(folder, pieces, Staging(pieces, ranks.device))

    def take(self, pipeline: StaticPipeline) -> None:
        state = own_pieces(of_all_places(pipeline.state_blocks(), self._ranks), self._ranks.rank)
        assert state.shapes == self.shapes
        self.memory.fill(state.pieces, lambda: None)


def taken(ranks: Ranks, folder: Path, disk: Path, options: dict[str, Any]) -> Found:
    """Trains and takes a snapshot every other iteration into the same memory; writes the last to a disk, and trains
    on."""
    pipeline = static_pipeline(changed(PLAIN, **options), ranks)
    slot, batches = Slot(folder, pipeline, ranks), iter(batches_of(PLAIN, ranks, hot=0)[:STEPS])
    for step in range(BEFORE):
        pipeline.train_step(batches)
        if (BEFORE - step) % 2:
            slot.take(pipeline)
    state = in_full(pipeline, PLAIN)
    losses, described = second_half(pipeline, batches)
    pieces = OwnPieces(slot.shapes, slot.memory.pieces)
    write_state(disk, pieces, ranks.rank, dist.new_group(backend="gloo"), lambda: None)
    return losses, state, described


def takes_and_resumes(ranks: Ranks, folder: Path, disk: Path, options: dict[str, Any]) -> list[Found]:
    return [taken(ranks, folder, disk, options), resumes(ranks, folder, options), resumes(ranks, disk, options)]


GOES_ON = [
    *((2, False, options) for options in (FITTING, EVICTING, EVICTING | {"peer_memory": True})),
    *(pytest.param(*place.values, EVICTING, marks=place.marks) for place in GPU_PLACES),
]


@pytest.fixture
def folders(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """A folder in memory, and one on a disk."""
    with TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder), tmp_path


@pytest.mark.parametrize(("world_size", "gpu", "options"), GOES_ON)
def test_goes_on_to_the_bit(
    run_ranks: Callable[..., list[Any]], folders: tuple[Path, Path], world_size: int, gpu: bool, options: dict[str, Any]
) -> None:
    """While rows lose their places too."""
    of_ranks = run_ranks(world_size, takes_and_resumes, *folders, options, gpu=gpu)
    for whole, *others in of_ranks:
        for losses, state, described in others:
            assert torch.equal(losses, whole[0])
            assert state.keys() == whole[1].keys()
            assert all(torch.equal(value, state[key]) for key, value in whole[1].items())
            assert described["used"] == whole[2]["used"]
    evicted = max(whole[2]["evicted"] for whole, *_ in of_ranks)
    assert evicted > 100 if "evict_rows" in options else evicted == 0


def resumes_with_other_places(ranks: Ranks, folder: Path) -> tuple[Found, str]:
    """What a run with more places goes on with, and the refusal of one with too few."""
    with pytest.raises(CheckpointError, match="this rank owns") as caught:
        resumes(ranks, folder, {"dynamic_rows": 50})
    return resumes(ranks, folder, FITTING | {"dynamic_rows": 2 * FITTING["dynamic_rows"]}), str(caught.value)


def test_other_ranks_with_other_numbers_of_places_go_on(
    run_ranks: Callable[..., list[Any]], folders: tuple[Path, Path]
) -> None:
    """Places without rows are nobody's."""
    found = run_ranks(2, taken, *folders, FITTING)
    ((_, state, described), said), *_ = run_ranks(1, resumes_with_other_places, folders[0])
    assert all(torch.equal(value, state[key]) for key, value in found[0][1].items())
    assert "--dynamic-rows is 50" in said
    assert described["used"] > 0
