"""Cross-cutting: streams alone keep rows on two tiers of memory, and what is known of their places, from races."""

from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor

from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.dlrm.tables.pooled import pooled_exchange, static_ebc
from dlrm_bench.dlrm.tables.pooled.static_ebc import StaticEBC
from dlrm_bench.dlrm.tables.tiers import tiered_rows
from dlrm_bench.dlrm.tables.tiers.placement import Pool
from dlrm_bench.pipeline.static import pipeline as static
from tests.pipeline.static.test_barriers import halves
from tests.pipeline.static.test_tiers import PEERS, STEPS, batches_of
from tests.pipelines import changed, static_pipeline
from tests.races import Access, Event, Recorder, races

ROWS = 1000
"""Number of the rows' memory among the allocations."""
EARLY, LATE = StaticEBC.bring_rows, StaticEBC.bring_late_rows


def too_early(ebc: StaticEBC, ids: Any, is_new: Tensor) -> None:
    """Brings all rows at once, as if no update of the batch before had to come first."""
    EARLY(ebc, ids, is_new)
    LATE(ebc, ids)


def launched(ranks: Ranks, waits: bool, in_halves: bool) -> tuple[list[Event], int]:
    """Returns this rank's events in a training with an evaluation, and how many rows came late. waits: for the update
    of the batch before, where a row has to. in_halves: each rank has half of the columns of all tables."""
    with pytest.MonkeyPatch.context() as patch, Recorder() as recorder:
        pool = Pool.of_batches
        # So few rows come with a batch that many wait for the next one, which names them too.
        few = staticmethod(lambda *of: replace(pool(*of), guests=60, window=20))
        patch.setattr(Pool, "of_batches", few)
        if not waits:
            patch.setattr(StaticEBC, "bring_rows", too_early)
            patch.setattr(StaticEBC, "bring_late_rows", lambda ebc, ids: None)
        config = changed(PEERS, table_memory="0.3")
        if in_halves:
            config = changed(config, model=replace(config.model, embedding_dim=32, bottom_mlp=(32,)))
            patch.setattr(static, "plan_for", halves)
        pipeline = static_pipeline(config, ranks)
        tiers, late = pipeline.ebc._tiers, 0
        assert tiers is not None
        assert pipeline.ebc._shared_sort is None, "what ranks sort for one another is read after the next barrier"
        rows, on_device = tiers.placement.rows, tiers.placement.device_rows

        def touch(operator: str, places: Tensor, writes: bool) -> None:
            touched = torch.zeros(rows, dtype=torch.uint8)
            touched[places.long()] = 1
            elements = int("".join(map(str, touched.tolist())) or "0", 2)
            recorder.events.append(Access(recorder._streams[-1], operator, (ROWS, ranks.rank), elements, writes))

        def recorded(function: Callable[..., None], touched: Callable[..., None]) -> Callable[..., None]:
            def run(*arguments: Any) -> None:
                touched(*arguments)
                function(*arguments)

            return run

        def exchanged(_: Any, device: Tensor, host: Tensor, bounds: Tensor) -> None:
            nonlocal late
            first, last = bounds.tolist()
            late += last - first if bounds.data_ptr() == tiers._moves[0].late.data_ptr() else 0
            touch("exchange", torch.cat([device[first:last], on_device + host[first:last]]), writes=True)

        for module, name, touched in (
            (pooled_exchange, "pooled_lookup", lambda weights, places, *_: touch("lookup", places, False)),
            (static_ebc, "sorted_adagrad", lambda w, s, g, places, *_: touch("update", places, True)),
            (tiered_rows, "exchange_rows", exchanged),
        ):
            patch.setattr(module, name, recorded(getattr(module, name), touched))
        state = tiers.placement.state
        placed = [slot.ids.placed for slot in (*pipeline._slots, *pipeline._eval.slots)]
        known = [t for of in placed if of is not None for t in (of.lookup, of.sorted) if t is not None]
        known += tiers.placement._moves[0]
        for number, tensor in enumerate((*state[:-1], *state.pools[0][2:], *known)):
            recorder._memory[tensor.untyped_storage().data_ptr()] = (ROWS + 1 + number, ranks.rank)
        batches = batches_of(PEERS, ranks, hot=40)
        training = islice(batches, 4)
        for step in range(4):
            pipeline.train_step(training)
            if step == 1:
                list(pipeline.evaluate(iter(batches[STEPS:])))
        pipeline.close()
    return recorder.events, late


@pytest.mark.parametrize(("waits", "in_halves"), [(True, False), (True, True), (False, False)])
def test_streams_order_what_touches_a_row_or_its_place(
    run_ranks: Callable[..., list[Any]], waits: bool, in_halves: bool
) -> None:
    logs, late = zip(*run_ranks(2, launched, waits, in_halves), strict=True)
    assert min(late) > 0
    found = races(logs)
    assert bool(found) != waits, [(race.first[1][:3], race.second[1][:3]) for race in found]
    assert all(ROWS in (race.first[1].memory[0], race.second[1].memory[0]) for race in found)
    updated = {
        event.memory for log in logs for event in log if isinstance(event, Access) and event.operator == "update"
    }
    assert updated == {(ROWS, 0), (ROWS, 1)}
