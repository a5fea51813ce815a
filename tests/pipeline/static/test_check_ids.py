"""Ids that are checked on the device."""

from collections.abc import Callable
from typing import Any

import pytest

from dlrm_bench.dlrm.data.batch import feature_blocks
from dlrm_bench.dlrm.runtime.ranks import Ranks
from tests.cases import GPU_PLACES, SMALL_MODEL
from tests.pipeline.small_runs import batches_of, small
from tests.pipelines import static_pipeline


def train(ranks: Ranks, bad: int | None, variable_lengths: bool) -> tuple[int, str]:
    """The iterations trained, and the error."""
    config = small(variable_lengths=variable_lengths, check_ids=True)
    batches = list(batches_of(config, ranks, 4))
    if bad is not None:
        feature_blocks(batches[2].ids, SMALL_MODEL.multi_hot_sizes)[3][7, 5] = bad
    trained, prepared = static_pipeline(config, ranks), iter(batches)
    for step in range(4):
        try:
            trained.train_step(prepared)
        except ValueError as error:
            return step, str(error)
    return 4, ""


def train_all(ranks: Ranks) -> list[tuple[int, str]]:
    return [train(ranks, *case) for case in [(None, False), (None, True), (-1, False), (90000, True)]]


@pytest.mark.parametrize(("world_size", "gpu"), [(1, False), GPU_PLACES[0]])
def test_the_first_bad_id_is_named(run_ranks: Callable[..., list[Any]], world_size: int, gpu: bool) -> None:
    ((good, padded, negative, large),) = run_ranks(world_size, train_all, gpu=gpu)
    assert good == padded == (4, "")
    for (steps, error), value in ((negative, -1), (large, 90000)):
        assert steps == 2
        assert error.startswith(
            f"--check-ids: iteration 3, rank 0: id {value} of local sample 7 (cat_3) is outside its table of 90000 rows"
        )
