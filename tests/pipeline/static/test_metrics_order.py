"""Cross-cutting: the stream of the metrics reads what this iteration's losses have written, and the next writes it
after that; without its waits there are races."""

from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest

from dlrm_bench.bench.instruments.train_metrics import TrainMetrics
from dlrm_bench.dlrm.dcnv2 import static_schedule
from dlrm_bench.dlrm.dcnv2.concurrency import GUARD
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.dlrm.runtime.streams import MAIN
from dlrm_bench.pipeline.static.concurrency import METRICS
from tests.pipeline.static.test_pipeline import batches_of, small
from tests.pipelines import dense_of, static_pipeline
from tests.races import Access, Event, Recorder, Wait, races

INTERVAL, STEPS = 2, 3
"""Steps of each value of the metrics, before an evaluation and after it."""
CONFIG = small("sharded", 2 * STEPS, presort_ids=True)
AFTER_LOSSES, BEFORE_NEXT = Wait(METRICS.name, (MAIN.name, GUARD.name)), Wait(MAIN.name, (METRICS.name,))


def record(ranks: Ranks, parts: int) -> list[Event]:
    """Returns the accesses to labels, predictions and sums in a training with an evaluation, and the waits. parts: of
    the batch."""
    with pytest.MonkeyPatch.context() as patch, Recorder() as recorder:
        if parts == 2:
            patch.setattr(static_schedule, "_FILLING_BATCH", 1)
        pipeline = static_pipeline(CONFIG, ranks)
        metrics = TrainMetrics(ranks.device, INTERVAL, CONFIG.local_batch_size)
        pipeline.measure(metrics)
        predictions = dense_of(pipeline).predictions
        assert predictions is not None
        held = [predictions, *metrics._metrics.buffers(), *(slot.batch.storage for slot in pipeline._slots)]
        recorder._memory |= {of.untyped_storage().data_ptr(): (number, 0) for number, of in enumerate(held)}
        batches = batches_of(CONFIG, ranks.rank, ranks.world_size)
        training = islice(batches, 2 * STEPS)
        for _ in range(2):
            for _ in range(STEPS):
                pipeline.train_step(training)
                metrics.end_step()
            list(pipeline.evaluate(iter(batches[-3:])))
        pipeline.close()
    return recorder.events


def without(events: list[Event], wait: Wait, instead: Wait | None = None) -> list[Event]:
    assert wait in events
    kept = [instead if event == wait else event for event in events]
    return [event for event in kept if event is not None]


@pytest.mark.parametrize("parts", [1, 2])
def test_the_metrics_come_after_all_losses_and_before_the_next(run_ranks: Callable[..., list[Any]], parts: int) -> None:
    (events,) = run_ranks(1, record, parts)
    assert {event.memory for event in events if isinstance(event, Access) and event.stream == METRICS.name}
    assert races([events]) == []
    assert races([without(events, AFTER_LOSSES)])
    assert races([without(events, BEFORE_NEXT)])
    # The chain of the first part comes to the end of its own loss only.
    after_first = races([without(events, AFTER_LOSSES, Wait(METRICS.name, (MAIN.name,)))])
    assert (after_first != []) == (parts == 2)
