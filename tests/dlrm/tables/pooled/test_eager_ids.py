"""Cross-cutting: `expect` and `eager_ids` of the static EBC, between lists of picked ids, places of rows and the ranks'
agreement: each batch waits for its own numbers, however late they arrive."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dlrm_bench.dlrm.batch_shape import BatchShape
from dlrm_bench.dlrm.dcnv2.config import OptimizerConfig
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.dlrm.tables.dynamic.memory import RowPlaces
from dlrm_bench.dlrm.tables.overflows import NOT_YET
from dlrm_bench.dlrm.tables.plan.plan import Plan, Shard
from dlrm_bench.dlrm.tables.pooled import row_parts
from dlrm_bench.dlrm.tables.pooled.distributed_ids import DistributedIds
from dlrm_bench.dlrm.tables.pooled.static_ebc import StaticEBC, TableUpdates
from dlrm_bench.dlrm.tables.pooled.ways import Collectives, Layout
from dlrm_bench.dlrm.tables.tables import Tables
from tests.late_device import LateDevice

COLUMNS, HOT, SAMPLES = 16, 4, 6
IDS = 2 * SAMPLES * HOT
"""Number of ids of a batch, over both ranks."""
CAPACITY = 19
"""Of each rank's list: three quarters of its 24 expected ids, and one."""
COUNTS = ((19, 19), (20, 3), (3, 4), (19, 20), (20, 19), (0, 0), (0, 48), (7, 8), (20, 20), (19, 0))
"""Number of ids of each rank's rows, by batch: each of two slots has batches that fit after others that do not."""
IN_ROWS = tuple(Shard(rank, 0, 0, COLUMNS, rank, 2) for rank in range(2))
"""Of one table."""
WHOLE = tuple(Shard(rank, rank, 0, COLUMNS) for rank in range(2))
"""Of two tables."""
PLACES = RowPlaces(9, False)


def ebc_of(ranks: Ranks, shards: tuple[Shard, ...], places: RowPlaces | None = None) -> StaticEBC:
    count = len({shard.table for shard in shards})
    tables = Tables(names=("a", "b")[:count], rows=(1000, 50)[:count], columns=COLUMNS, hot=(HOT,) * count)
    layout = Layout(tables, Plan(2, shards), ranks, BatchShape(samples=SAMPLES, dtype=torch.float32))
    optimizer = OptimizerConfig()
    updates = TableUpdates(optimizer.tables, torch.tensor([optimizer.learning_rate]), presort=True)
    return StaticEBC(layout, updates, Collectives(), seed=3, memory=places)


def ids_of(counts: tuple[int, int], rank: int) -> Tensor:
    """This rank's part of a batch with even rows, of rank 0, then odd ones, of rank 1, then padding."""
    even, odd = counts
    rows = [2 * row for row in range(even)] + [2 * row + 1 for row in range(odd)]
    return torch.tensor(rows + [-1] * (IDS - len(rows)), dtype=torch.int32).chunk(2)[rank]


def launch(ebc: StaticEBC, ids: Tensor, out: DistributedIds) -> None:
    """Launches what the pipeline does before a batch trains."""
    ebc.expect(out)
    ebc.input_dist(ids, out)
    ebc.bring_rows(out, torch.ones(1, dtype=torch.int32))
    ebc.agree(out)
    ebc.sort(out)


def run_with(ebc: StaticEBC, ids: DistributedIds) -> tuple[str, int]:
    """Returns how the batch runs, and the number of ids in the list that it runs with."""
    eager = ebc.eager_ids(ids)
    used = ids if eager is None else eager
    assert used.picked is not None
    how = "as captured" if eager is None else "eagerly" if eager is ids else "eagerly, picked again"
    return how, int(used.picked.offsets[-1])


def run_batches(ranks: Ranks, latest_first: bool) -> list[tuple[str, int]]:
    """Returns for each batch the result of `run_with`, the same twice: also after the next batch is expected."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_parts, "_SLACK", 0.75)
        patch.setattr(row_parts, "_LEAST_SLACK", 1)
        ebc = ebc_of(ranks, IN_ROWS)
    assert ebc.agrees
    slots, found = [ebc.empty_ids() for _ in range(2)], []
    assert all(slot.picked is not None and slot.picked.capacity == CAPACITY for slot in slots)
    with LateDevice(latest_first) as device:
        for step, counts in enumerate(COUNTS):
            now, before, polls = slots[step % 2], slots[1 - step % 2], device.polls
            launch(ebc, ids_of(counts, ranks.rank), now)
            assert step == 0 or run_with(ebc, before) == found[-1], "what is expected next leaves a batch as it was"
            assert device.polls == polls, "its numbers are known"
            found.append(run_with(ebc, now))
            assert device.polls > polls, "and those of a new batch are not"
        evaluated = ebc.empty_ids(sorts=False)
        launch(ebc, ids_of((IDS, 0), ranks.rank), evaluated)
        assert run_with(ebc, evaluated) == ("as captured", (IDS, 0)[ranks.rank]), "lists for evaluations hold any batch"
    return found


@pytest.mark.parametrize("latest_first", [False, True])
def test_each_batch_waits_for_its_own_numbers(run_ranks: Callable[..., list[Any]], latest_first: bool) -> None:
    for rank, found in enumerate(run_ranks(2, run_batches, latest_first)):
        own = [counts[rank] for counts in COUNTS]
        again = ["eagerly, picked again" if count > CAPACITY else "eagerly" for count in own]
        fits = [max(counts) <= CAPACITY for counts in COUNTS]
        expected = ["as captured" if fit else how for fit, how in zip(fits, again, strict=True)]
        assert found == list(zip(expected, own, strict=True))


def numbers_of(ids: DistributedIds) -> list[Tensor]:
    """Returns the numbers on the host that the device writes."""
    return [of for of in (ids.overflow, None if ids.picked is None else ids.picked.count) if of is not None]


def expect_all(ranks: Ranks) -> None:
    """Of slots for training and for evaluation, with and without anything to wait for."""
    for shards, places in ((IN_ROWS, None), (WHOLE, PLACES), (WHOLE, None)):
        ebc = ebc_of(ranks, shards, places)
        assert ebc.agrees == (shards is IN_ROWS or places is not None)
        for sorts in (True, False):
            ids, other = ebc.empty_ids(sorts), ebc.empty_ids(sorts)
            awaited, others = numbers_of(ids), numbers_of(other)
            assert len(awaited) == (sorts and ebc.agrees) + (shards is IN_ROWS)
            for number in (*awaited, *others):
                number.fill_(5)
            ebc.expect(ids)
            assert all(int(number) == NOT_YET for number in awaited)
            assert all(int(number) == 5 for number in others)


def test_a_batch_is_expected_where_it_is_to_arrive_and_nowhere_else(run_ranks: Callable[..., list[Any]]) -> None:
    run_ranks(2, expect_all)


def run_out_of_places(ranks: Ranks) -> list[str]:
    """Returns what is said of each batch where rank 1 has no place for the third batch's last row."""
    ebc = ebc_of(ranks, WHOLE, PLACES)
    slots, said = [ebc.empty_ids() for _ in range(2)], []
    block = torch.arange(SAMPLES * HOT, dtype=torch.int32)
    with LateDevice():
        for step, (first, second) in enumerate(((4, 8), (9, 9), (9, 10))):  # rows of the first table, of the second
            launch(ebc, torch.cat([block % first, block % second]), slots[step % 2])
            try:
                assert ebc.eager_ids(slots[step % 2]) is None
                said.append("")
            except ValueError as error:
                said.append(str(error))
    return said


def test_the_batch_whose_rows_have_no_places_is_the_one_that_is_refused(run_ranks: Callable[..., list[Any]]) -> None:
    for fits, fills, lacks in run_ranks(2, run_out_of_places):
        assert fits == fills == ""
        assert "--dynamic-rows" in lacks
