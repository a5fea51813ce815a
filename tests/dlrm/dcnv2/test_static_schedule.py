"""Small and large batches get the schedules that were measured for them."""

import pytest

from dlrm_bench.dlrm.benchmark import StaticDenseOptions
from dlrm_bench.dlrm.dcnv2.static_schedule import StaticSchedule, static_schedule
from dlrm_bench.pipeline.static.options import StaticOptions

FBGEMM = StaticOptions().dense
COLLECTIVES = StaticOptions(presort_ids=True).dense
PEER_MEMORY = StaticOptions(presort_ids=True, peer_memory=True).dense


@pytest.mark.parametrize("options", [FBGEMM, COLLECTIVES, PEER_MEMORY])
@pytest.mark.parametrize("batch_size", [1, 24, 2047])
def test_small_batches_go_whole_and_updates_start_early(batch_size: int, options: StaticDenseOptions) -> None:
    assert static_schedule(batch_size, options) == StaticSchedule(
        parts=1,
        top_update_within_chain=True,
        cross_updates_within_chain=options.peer_memory,
        cross_gradients_apart=True,
        tables_after_weight_gradients=True,
        tables_after_bottom_update=not options.peer_memory,
    )


@pytest.mark.parametrize("options", [COLLECTIVES, PEER_MEMORY])
def test_large_batches_go_in_halves_and_updates_come_last(options: StaticDenseOptions) -> None:
    assert static_schedule(2048, options) == StaticSchedule(
        parts=2,
        top_update_within_chain=False,
        cross_updates_within_chain=False,
        cross_gradients_apart=False,
        tables_after_weight_gradients=False,
        tables_after_bottom_update=False,
    )


@pytest.mark.parametrize(("batch_size", "options"), [(2049, PEER_MEMORY), (2048, FBGEMM)])
def test_large_batches_without_equal_halves_or_sorted_ids_go_whole(
    batch_size: int, options: StaticDenseOptions
) -> None:
    schedule = static_schedule(batch_size, options)
    assert schedule.parts == 1
    assert not schedule.top_update_within_chain
