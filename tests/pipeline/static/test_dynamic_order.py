"""Cross-cutting: streams alone keep rows that are made when they are first named, and their map, from races."""

from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor

from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.dlrm.tables.dynamic import dynamic_rows
from dlrm_bench.dlrm.tables.dynamic.id_map import IdMap
from dlrm_bench.dlrm.tables.pooled import pooled_exchange, static_ebc
from tests.pipeline.static.test_raw_ids import some_ids, with_ids
from tests.pipeline.static.test_tiers import MODEL, PEERS, STEPS, batches_of
from tests.pipelines import changed, static_pipeline
from tests.races import Access, Event, Recorder, races

MEMORY = 1000
"""Number of the rows' memory among the allocations."""
EVICT = IdMap._evict


def evict_latest(ids: IdMap, wanted: Tensor) -> None:
    """Takes the places of the rows that were named last, as if none was in use."""
    last = ids._last.clone()
    ids._last.copy_(ids._batch - 2 - last)
    EVICT(ids, wanted)
    ids._last.copy_(last)


def launched(ranks: Ranks, careful: bool, raw: bool) -> tuple[list[Event], int]:
    """Returns this rank's events in a training with an evaluation, and how many rows lost their places. careful: only
    rows that no batch in flight names do. raw: ids are."""
    with pytest.MonkeyPatch.context() as patch, Recorder() as recorder:
        if not careful:
            patch.setattr(IdMap, "_evict", evict_latest)
        model = replace(MODEL, raw_ids=raw)
        pipeline = static_pipeline(changed(PEERS, model=model, dynamic_rows=1200, evict_rows=True), ranks)
        dynamic = pipeline.ebc.dynamic
        assert dynamic is not None
        count = len(dynamic._memory[0])

        def touch(operator: str, places: Tensor, writes: bool) -> None:
            touched = torch.zeros(count, dtype=torch.uint8)
            touched[places[places >= 0].long()] = 1
            elements = int("".join(map(str, touched.tolist())), 2)
            recorder.events.append(Access(recorder._streams[-1], operator, (MEMORY, ranks.rank), elements, writes))

        def recorded(function: Callable[..., None], touched: Callable[..., None]) -> Callable[..., None]:
            def run(*arguments: Any, **named: Any) -> None:
                touched(*arguments)
                function(*arguments, **named)

            return run

        for module, name, touched in (
            (pooled_exchange, "pooled_lookup", lambda weights, places, *_: touch("lookup", places, False)),
            (static_ebc, "sorted_adagrad", lambda w, s, g, places, *_: touch("update", places, True)),
            (dynamic_rows, "initial_rows", lambda out, places, *_: touch("make", places, True)),
        ):
            patch.setattr(module, name, recorded(getattr(module, name), touched))
        placed = [slot.ids.placed for slot in (*pipeline._slots, *pipeline._eval.slots)]
        known = [t for of in placed if of is not None for t in (of.lookup, of.sorted, of.lacking) if t is not None]
        for number, tensor in enumerate((*dynamic.map.memory(), *known)):
            recorder._memory[tensor.untyped_storage().data_ptr()] = (MEMORY + 1 + number, ranks.rank)
        batches = batches_of(PEERS, ranks, hot=0)
        if raw:
            batches = with_ids(batches, some_ids)
        training = islice(batches, 8)
        for step in range(8):
            pipeline.train_step(training)
            if step == 3:
                list(pipeline.evaluate(iter(batches[STEPS:])))
        evicted = int(dynamic.map.evicted)
        pipeline.close()
    return recorder.events, evicted


@pytest.mark.parametrize(("careful", "raw"), [(True, False), (True, True), (False, False)])
def test_streams_order_what_touches_a_row_or_its_place(
    run_ranks: Callable[..., list[Any]], careful: bool, raw: bool
) -> None:
    logs, evicted = zip(*run_ranks(2, launched, careful, raw), strict=True)
    assert max(evicted) > 100
    found = races(logs)
    assert bool(found) != careful, [(race.first[1][:3], race.second[1][:3]) for race in found]
    assert all(race.first[1].memory[0] == MEMORY for race in found)
    kinds = {event.operator for log in logs for event in log if isinstance(event, Access) and event.memory[0] == MEMORY}
    assert kinds == {"make", "lookup", "update"}
