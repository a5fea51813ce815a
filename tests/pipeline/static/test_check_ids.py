"""Ids that are checked on the device."""

from collections.abc import Callable
from typing import Any

import pytest

from dlrm_bench.dlrm.data.batch import feature_blocks
from dlrm_bench.dlrm.runtime.ranks import Ranks
from tests.cases import GPU_PLACES, SMALL_MODEL
from tests.pipeline.small_runs import batches_of, small
from tests.pipelines import static_pipeline


def train(ranks: Ranks, bad: int | None, of: int = 2, **options: Any) -> tuple[int, str]:
    """The iterations trained, and the error. bad: an id of batch `of`."""
    config = small(check_ids=True, **options)
    batches = list(batches_of(config, ranks, 4))
    if bad is not None:
        feature_blocks(batches[of].ids, SMALL_MODEL.multi_hot_sizes)[3][7, 5] = bad
    trained, prepared = static_pipeline(config, ranks), iter(batches)
    for step in range(4):
        try:
            trained.train_step(prepared)
        except ValueError as error:
            return step, str(error)
    return 4, ""


def train_all(ranks: Ranks) -> list[tuple[int, str]]:
    return [train(ranks, bad) for bad in (None, -1, 90000)]


@pytest.mark.parametrize(("world_size", "gpu"), [(1, False), GPU_PLACES[0]])
def test_the_first_bad_id_is_named(run_ranks: Callable[..., list[Any]], world_size: int, gpu: bool) -> None:
    ((good, negative, large),) = run_ranks(world_size, train_all, gpu=gpu)
    assert good == (4, "")
    for (steps, error), value in ((negative, -1), (large, 90000)):
        assert steps == 2
        assert error.startswith(
            f"--check-ids: iteration 3, rank 0: id {value} of local sample 7 (cat_3) is outside its table of 90000 rows"
        )


FAR = 1 << 30
"""Beyond the rows of all tables together."""


def train_in_tiers(ranks: Ranks) -> list[tuple[int, str]]:
    tiers = {"presort_ids": True, "table_memory": "0.5"}
    return [train(ranks, None, **tiers), *(train(ranks, FAR, of, **tiers) for of in (0, 1, 3))]


@pytest.mark.parametrize(("world_size", "gpu"), [(1, False), GPU_PLACES[0]])
def test_an_id_is_checked_before_its_row_has_a_place(
    run_ranks: Callable[..., list[Any]], world_size: int, gpu: bool
) -> None:
    ((good, *bad),) = run_ranks(world_size, train_in_tiers, gpu=gpu)
    assert good == (4, "")
    for of, (steps, error) in zip((0, 1, 3), bad, strict=True):
        assert steps == max(0, of - 1), "batches are placed an iteration ahead"
        assert error.startswith(f"--check-ids: iteration {of + 1}, rank 0: id {FAR} of local sample 7 (cat_3) is outs")
