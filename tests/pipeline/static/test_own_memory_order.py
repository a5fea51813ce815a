"""Cross-cutting: streams alone keep a rank's own memory from races, that is all tensors that a pipeline is made with:
tables, dense weights, batches in flight, activations, gradients and the guard's flags. Without one of the waits in
NEEDED there are races. Collectives that may overlap have groups of their own."""

import gc
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dlrm_bench.bench.config import RunConfig
from dlrm_bench.dlrm.dcnv2 import static_schedule
from dlrm_bench.dlrm.dcnv2.concurrency import BOTTOM_UPDATE, GUARD, cross_update, top_update
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.dlrm.runtime.streams import MAIN, Stream
from dlrm_bench.pipeline.static import pipeline as static
from dlrm_bench.pipeline.static.concurrency import (
    AGREEMENT,
    INPUT_DIST,
    LOCAL,
    REPLICATED,
    SECOND_HALF,
    SECOND_LOOKUP,
    SORT,
    TABLES,
)
from tests.pipeline.static.test_pipeline import batches_of, small
from tests.pipeline.static.test_row_parts import plan_of
from tests.pipelines import static_pipeline
from tests.races import Access, Event, Recorder, Wait, races

STEPS = 2
"""Steps before an evaluation, and after it."""
OWN = 1000
"""Number of the first tensor that is no peer memory, among the allocations."""
CONFIGS = {
    "fbgemm": small("tiny tables", 2 * STEPS),
    "replicated": small("tiny tables", 2 * STEPS, presort_ids=True),
    "row parts": small("sharded", 2 * STEPS, presort_ids=True),
    "peer memory": small("sharded", 2 * STEPS, presort_ids=True, peer_memory=True),
}
Waits = set[tuple[Stream, Stream]]
DENSE: Waits = {(update, GUARD) for update in (BOTTOM_UPDATE, cross_update(0), top_update(0))} | {(MAIN, LOCAL)}
SORTED: Waits = {(SORT, INPUT_DIST)}
SUMMED: Waits = {(REPLICATED, GUARD)}
HALVES: Waits = {(TABLES, MAIN), (TABLES, SECOND_HALF), (SECOND_HALF, GUARD), (SECOND_HALF, SECOND_LOOKUP)}
WHOLE: Waits = {(TABLES, MAIN)}
NEEDED: dict[tuple[str, int], Waits] = {
    ("fbgemm", 1): DENSE | WHOLE | SUMMED | {(REPLICATED, MAIN)},
    ("replicated", 1): DENSE | WHOLE | SORTED | SUMMED | {(REPLICATED, MAIN)},
    ("replicated", 2): DENSE | HALVES | SORTED | SUMMED | {(REPLICATED, SECOND_HALF)},
    ("row parts", 1): DENSE | WHOLE | SORTED | {(AGREEMENT, INPUT_DIST)},
    ("row parts", 2): DENSE | HALVES | SORTED | {(AGREEMENT, INPUT_DIST)},
    ("peer memory", 1): WHOLE | SORTED,
    ("peer memory", 2): HALVES | SORTED,
}
"""By the run and the parts of its batch: the streams that wait, and those that they wait for. In peer memory barriers
order more: test_barriers.py."""
COLLECTIVES = (INPUT_DIST, AGREEMENT, SECOND_HALF, GUARD, REPLICATED, BOTTOM_UPDATE, cross_update(0), top_update(0))
"""The streams that launch collectives of one group, each of another one: those of a group never overlap."""
EVERYTHING_ELSE = "default"
"""What stands for the stream of the default group."""


class OwnRecorder(Recorder):
    """Also notes the process groups of the collectives that each stream launches."""

    def __init__(self) -> None:
        super().__init__()
        self.groups: defaultdict[str, set[str]] = defaultdict(set)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for group in args if func.namespace == "c10d" else ():
            if isinstance(group, torch.ScriptObject) and "ProcessGroup" in str(group._type()):
                self.groups[self._streams[-1]].add(dist.ProcessGroup.unbox(group).group_name)
        return super().__torch_dispatch__(func, types, args, kwargs)


def tensors() -> list[Tensor]:
    return [of for of in gc.get_objects() if issubclass(type(of), Tensor)]


def record(ranks: Ranks, config: RunConfig, in_row_parts: bool, parts: int) -> tuple[list[Event], dict[str, set[str]]]:
    """Returns this rank's accesses and waits in a training with an evaluation, and the groups of its collectives, by
    stream. parts: of the batch."""
    with pytest.MonkeyPatch.context() as patch, OwnRecorder() as recorder:
        if in_row_parts:
            patch.setattr(static, "plan_for", lambda *_, **__: plan_of(ranks.world_size))
        if parts == 2:
            patch.setattr(static_schedule, "_FILLING_BATCH", 1)
        pipeline = static_pipeline(config, ranks)
        held = tensors()  # which stay, so that no other memory gets their addresses
        for number, of in enumerate(held):
            recorder._memory.setdefault(of.untyped_storage().data_ptr(), (OWN + number, ranks.rank))
        # Updates write nothing but 1 to these counts, in any order; the next iteration reads them.
        del recorder._memory[pipeline.tallies().counts.untyped_storage().data_ptr()]
        batches = batches_of(config, ranks.rank, ranks.world_size)
        training = islice(batches, 2 * STEPS)
        for _ in range(2):
            for _ in range(STEPS):
                pipeline.train_step(training)
            list(pipeline.evaluate(iter(batches[-3:])))
        pipeline.close()
    assert dist.group.WORLD is not None
    return recorder.events, recorder.groups | {EVERYTHING_ELSE: {dist.group.WORLD.group_name}}


def without(events: Sequence[Event], stream: Stream, other: Stream) -> list[Event]:
    """Returns the events as if `stream` did not wait for `other`."""
    kept = [
        Wait(event.stream, tuple(name for name in event.others if name != other.name))
        if isinstance(event, Wait) and event.stream == stream.name
        else event
        for event in events
    ]
    assert kept != list(events), f"{stream.name} does not wait for {other.name}"
    return kept


@pytest.mark.parametrize(("case", "parts"), NEEDED)
def test_waits_order_all_accesses_to_own_memory(run_ranks: Callable[..., list[Any]], case: str, parts: int) -> None:
    logs, groups = zip(*run_ranks(2, record, CONFIGS[case], case == "row parts", parts), strict=True)
    found = races(logs)
    assert found == [], [(race.first[1][:3], race.second[1][:3]) for race in found]
    for stream, other in NEEDED[case, parts]:
        assert races([without(log, stream, other) for log in logs]), f"{stream.name} waits for {other.name} to no end"
    accessing = {event.stream for log in logs for event in log if isinstance(event, Access) and event.memory[0] >= OWN}
    assert {stream.name for pair in NEEDED[case, parts] for stream in pair} <= accessing
    for own in groups if case != "peer memory" else ():
        unused = {REPLICATED if case == "row parts" else AGREEMENT, *([SECOND_HALF] if parts == 1 else [])}
        names = {stream.name for stream in {*COLLECTIVES} - unused}
        assert names < set(own)
        assert all(len(own[name]) == 1 for name in names)
        assert len(set().union(own[EVERYTHING_ELSE], *(own[name] for name in names))) == 1 + len(names)
