"""Rows made when they are first named, against tables in full: to the bit, whatever ranks and lists."""

from typing import Any

import pytest
import torch
from torch import Tensor

from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.dlrm.tables.dynamic.dynamic_rows import DynamicRows
from dlrm_bench.dlrm.tables.dynamic.memory import RowPlaces
from dlrm_bench.dlrm.tables.initial_weights import fill_initial_weights
from dlrm_bench.dlrm.tables.sequence.sequence_tables import SequenceTables
from dlrm_bench.kernels.embedding.id_map import Keys
from tests.dlrm.tables.sequence.test_sequence_tables import (
    ROOMY,
    SEED,
    TABLES,
    TIGHT,
    distributed,
    draw,
    gradient_of,
    gradients_in_places,
    in_places,
    new_tables,
    one_rank,
    state_of,
)
from tests.late_device import LateDevice

STEPS = 30


def dynamic_tables(ranks: Ranks, places: int, evicts: bool = False, capacity: Any = ROOMY) -> SequenceTables:
    return new_tables(ranks, capacity, dynamic=DynamicRows.in_parts(TABLES, ranks, SEED, RowPlaces(places, evicts)))


def in_full(tables: SequenceTables) -> list[tuple[Tensor, Tensor]]:
    """This rank's part of each table, with the rows that were not made as they would be."""
    dynamic = tables.dynamic
    assert dynamic is not None
    entries = dynamic.entries().cpu()
    parts = []
    for table, rows in enumerate(TABLES.rows):
        part, of = dynamic.numbers.part, dynamic.numbers.parts
        weights = torch.empty(len(range(part, rows, of)), TABLES.columns)
        fill_initial_weights(weights, seed=SEED, table=table, num_embeddings=rows, row_offset=part, row_step=of)
        state = torch.zeros(len(weights), 1)
        held = (entries[:, 2] == table).nonzero().flatten()
        ids = entries[held, 0].long()  # below 2^31
        assert (ids % of == part).all()
        weights[ids // of], state[ids // of] = dynamic.weights[held].cpu(), dynamic.state[held].cpu()
        parts.append((weights, state))
    return parts


def step_of(tables: SequenceTables, ids: list[Tensor], step: int, rank: int, rows: Any, unseen: Any) -> list[Tensor]:
    """Trains a step; returns lookups of it, and of an evaluation's ids before it."""
    outs = []
    for into, of in ((unseen, draw(rank, step + 1000)), (rows, ids)):
        out = torch.full((ROOMY.count, TABLES.columns), 7.0, device=tables._device)
        asked, _ = distributed(tables, in_places(of).to(out.device), into)
        tables.forward(asked, out)
        outs.append(out)
    tables.backward(asked, gradients_in_places(gradient_of(ids, rank, step)).to(out.device))
    return outs


def beside_static(ranks: Ranks, capacity: Any) -> dict[str, Any]:
    static, dynamic = new_tables(ranks, capacity), dynamic_tables(ranks, 3000, capacity=capacity)
    slots = [(tables.empty_ids(), tables.empty_ids(updates=False)) for tables in (static, dynamic)]
    alike = True
    for step in range(STEPS):
        ids = [] if step == 3 and ranks.rank == 0 else draw(ranks.rank, step)
        ids = ids or [of[:0] for of in draw(ranks.rank, step)]  # a rank without ids
        of_static, of_dynamic = (
            step_of(tables, ids, step, ranks.rank, *of) for tables, of in zip((static, dynamic), slots, strict=True)
        )
        alike &= all(torch.equal(*of) for of in zip(of_static, of_dynamic, strict=True))
    assert dynamic.dynamic is not None
    return {
        "lookups": alike,
        "rows": equal(state_of(static), in_full(dynamic)),
        "described": dynamic.dynamic.map.describe(),
    }


@pytest.mark.parametrize(("world_size", "capacity"), [(1, ROOMY), (2, ROOMY), (2, TIGHT), (3, TIGHT)])
def test_equals_tables_in_full_to_the_bit(run_ranks: Any, world_size: int, capacity: Any) -> None:
    for found in run_ranks(world_size, beside_static, capacity):
        assert found["lookups"]
        assert found["rows"]
        described = found["described"]
        assert 100 < described["used"] == described["made"] < sum(TABLES.rows) / world_size
        assert described["evicted"] == 0


@pytest.mark.gpu
def test_equals_tables_in_full_on_a_gpu(run_ranks: Any) -> None:
    for found in run_ranks(1, beside_static, ROOMY, gpu=True):
        assert found["lookups"]
        assert found["rows"]


def full(ranks: Ranks) -> tuple[int, bool, str]:
    """The first batch for which a rank has no place, whether its refusal leaves all rows, and its words."""
    tables = dynamic_tables(ranks, 260 if ranks.rank == ranks.world_size - 1 else 3000)
    rows = tables.empty_ids()
    for step in range(STEPS):
        ids, before = draw(ranks.rank, step), in_full(tables)
        tables.expect(rows)
        tables.input_dist(in_places(ids), rows)
        try:
            tables.eager_rows(rows)
        except ValueError as error:
            return step, equal(before, in_full(tables)), str(error)
        tables.backward(rows, gradients_in_places(gradient_of(ids, ranks.rank, step)))
    return STEPS, True, "none"


def equal(some: list[tuple[Tensor, Tensor]], others: list[tuple[Tensor, Tensor]]) -> bool:
    return all(torch.equal(a, b) for pair in zip(some, others, strict=True) for a, b in zip(*pair, strict=True))


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_batch_without_places_is_refused_on_every_rank(run_ranks: Any, world_size: int) -> None:
    found = run_ranks(world_size, full)
    assert 0 < found[0][0] < STEPS
    for step, unchanged, text in found:
        assert step == found[0][0]
        assert unchanged
        assert "names new rows, and a rank has no place left" in text
    assert "--dynamic-rows 260" in found[-1][2]


def full_in_longer_lists(ranks: Ranks) -> list[str]:
    """What is said of two batches whose rows are more than a list takes, the second also more than there are places
    for."""
    entries, said = TIGHT.list_entries(ranks.world_size), []
    tables = dynamic_tables(ranks, entries + 4, capacity=TIGHT)
    rows, nobody = tables.empty_ids(), torch.zeros(0, dtype=torch.int32)
    with LateDevice():
        for count in (entries + 4, entries + 5):
            ids = [ranks.world_size * torch.arange(count, dtype=torch.int32), nobody, nobody]  # all of the first rank
            try:
                said.append("fits" if distributed(tables, in_places(ids, TIGHT), rows)[1] else "fits a list")
            except ValueError as error:
                said.append(str(error))
    return said


def test_a_batch_without_places_for_its_longer_lists_is_refused(run_ranks: Any) -> None:
    """Also where the device is late: ranks agree on lists, and then on places, by the same number on the host."""
    for fits, lacks in run_ranks(2, full_in_longer_lists):
        assert fits == "fits"
        assert "a rank has no place left for 1 of them" in lacks


def refusal(evicts: bool) -> str:
    rows = DynamicRows.in_parts(TABLES, one_rank(), SEED, RowPlaces(8, evicts))
    lacking = rows.place(Keys(torch.arange(11, dtype=torch.int32)), torch.zeros(11, dtype=torch.int32))
    with pytest.raises(ValueError, match="--dynamic-rows 8: a batch names new rows, and a rank has no") as raised:
        rows.check_places(int(lacking))
    return str(raised.value)


@pytest.mark.parametrize("evicts", [False, True])
def test_a_refusal_says_how_many_places_the_batch_needs(evicts: bool) -> None:
    said = refusal(evicts)
    assert "a rank has no place left for 3 of them; " in said
    assert "choose at least 11 for this batch, and more for later ones, use more GPUs" in said


def test_a_refusal_advises_what_is_not_done_yet() -> None:
    assert "(add --evict-rows)" in refusal(evicts=False)
    assert "--evict-rows frees at most 8 places with a batch" in refusal(evicts=True)


def test_a_warm_up_leaves_all() -> None:
    """Of rows that are there and of rows that are not."""
    tables = dynamic_tables(one_rank(), 3000)
    rows, unseen = tables.empty_ids(), tables.empty_ids(updates=False)
    step_of(
        tables, [torch.tensor([5, 900]).int(), torch.tensor([1]).int(), torch.tensor([0]).int()], 0, 0, rows, unseen
    )
    before, described = in_full(tables), tables.dynamic.map.describe()  # type: ignore[union-attr]
    assert described["used"] == 4
    with tables.unchanged(16):
        ids = [torch.arange(14).int(), torch.arange(3).int(), torch.arange(16).int()]
        for step in range(3):
            step_of(tables, ids, step, 0, rows, unseen)
        assert not torch.equal(in_full(tables)[0][0], before[0][0])
    assert tables.dynamic.map.describe() == described  # type: ignore[union-attr]
    assert equal(before, in_full(tables))


def test_a_warm_up_has_places_where_all_are_taken() -> None:
    """Of a run that resumes with them, and whose rows keep them."""
    tables, nobody = dynamic_tables(one_rank(), 48), torch.zeros(0, dtype=torch.int32)
    rows, unseen = tables.empty_ids(), tables.empty_ids(updates=False)
    step_of(tables, [torch.arange(48, dtype=torch.int32) + 100, nobody, nobody], 0, 0, rows, unseen)
    before, described = in_full(tables), tables.dynamic.map.describe()  # type: ignore[union-attr]
    assert described["used"] == 48
    with tables.unchanged(16):
        ids = [torch.arange(14).int(), torch.arange(3).int(), torch.arange(16).int()]
        step_of(tables, ids, 0, 0, rows, unseen)
    assert tables.dynamic.map.describe() == described  # type: ignore[union-attr]
    assert equal(before, in_full(tables))


def test_a_row_that_comes_back_begins_anew() -> None:
    """Of three batches in turn, which have places for two."""
    tables, fresh = dynamic_tables(one_rank(), 40, evicts=True), new_tables(one_rank())
    rows, seen = tables.empty_ids(), []
    nobody = torch.zeros(0, dtype=torch.int32)
    for step in range(4):
        ids = [torch.arange(20, dtype=torch.int32) + 20 * (step % 3), nobody, nobody]
        out = torch.empty(ROOMY.count, TABLES.columns)
        for of, into in ((tables, rows), (fresh, fresh.empty_ids())):
            if of is tables or step == 3:
                asked, _ = distributed(of, in_places(ids), into)
                of.forward(asked, out)
                seen.append(out.clone())
                of.backward(asked, gradients_in_places(gradient_of(ids, 0, step)))
    assert torch.equal(seen[0], seen[3])
    assert torch.equal(seen[3], seen[4])
    again, once = in_full(tables)[0], state_of(fresh)[0]
    assert torch.equal(again[0][:20], once[0][:20])
    assert torch.equal(again[1][:20], once[1][:20])
    assert not again[1][20:40].any()  # the batch after it lost its places
    assert tables.dynamic.map.describe() == {"places": 40, "used": 40, "made": 80, "evicted": 40, "returned": 20}  # type: ignore[union-attr]
