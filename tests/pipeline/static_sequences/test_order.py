"""Cross-cutting: the streams of an iteration over unpooled rows keep its memory from races, and each wait is needed."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from dlrm_bench.bench.instruments.train_metrics import TrainMetrics
from dlrm_bench.dlrm.dlrmv4.data.generate import generate, smoke_config
from dlrm_bench.dlrm.dlrmv4.static_stage import GUARD
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.dlrm.runtime.streams import MAIN
from dlrm_bench.pipeline.build import build_pipeline
from dlrm_bench.pipeline.static.concurrency import METRICS
from dlrm_bench.pipeline.static_sequences.iteration import DENSE_UPDATE, INPUT_DIST
from dlrm_bench.pipeline.static_sequences.lane import EAGER
from tests.pipeline.cpu_graphs import capture_on_cpu
from tests.pipeline.static_sequences.test_pipeline import drawn, evaluated, small
from tests.races import Event, Recorder, Wait, races

STEPS = (EAGER + 2, 2)
"""Steps before an evaluation, and after it: each of the two slots is used again, and so are their graphs."""
INTERVAL = 3
"""Steps of each value of the metrics, two of which are computed."""
SIDES = (INPUT_DIST.name, GUARD.name, DENSE_UPDATE.name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("days")
    generate(replace(smoke_config(folder), users=300, days=5))
    return folder


def memory(held: Any, seen: dict[int, Any]) -> Iterator[Tensor]:
    """Yields all tensors that an object of this project holds, at any depth. seen: objects by their ids."""
    if id(held) in seen:
        return
    seen[id(held)] = held
    if isinstance(held, Tensor):
        yield held
    elif isinstance(held, dict | list | tuple):
        for one in held.values() if isinstance(held, dict) else held:
            yield from memory(one, seen)
    elif type(held).__module__.startswith("dlrm_bench") and not isinstance(held, nn.Module):
        slots = (name for kind in type(held).__mro__ for name in getattr(kind, "__slots__", ()))
        yield from memory({**getattr(held, "__dict__", {}), **{name: getattr(held, name) for name in slots}}, seen)


def launched(ranks: Ranks, folder: Path, cuda_graph: str, measures: bool) -> list[Event]:
    """Returns this rank's events in a training with an evaluation: accesses to what the pipeline and its metrics hold,
    and waits."""
    capture_on_cpu()
    config = small(folder, "static", cuda_graph=cuda_graph, overlap=True)
    with Recorder() as recorder:
        pipeline: Any = build_pipeline(config, config.pipeline, ranks)
        held = list(memory(pipeline, {}))
        if measures:
            metrics = TrainMetrics(ranks.device, INTERVAL, config.local_batch_size)
            pipeline.measure(metrics)
            held = [*memory(pipeline, {}), *metrics._metrics.buffers()]
        # All updates may write the same 1 to a count of gradients that are not finite.
        counts = pipeline.tallies().counts.untyped_storage().data_ptr()
        addresses = {tensor.untyped_storage().data_ptr() for tensor in held} - {counts}
        recorder._memory |= {address: (number, ranks.rank) for number, address in enumerate(sorted(addresses))}
        training = map(pipeline.prepare, drawn(config, ranks))
        for steps in STEPS:
            for _ in range(steps):
                pipeline.train_step(training)
                if measures:
                    metrics.end_step()
            assert len(list(pipeline.evaluate(map(pipeline.prepare, evaluated(config, ranks))))) == 3
        if cuda_graph != "none":
            assert pipeline.describe()["cuda_graphs"]["iteration"]["captures"] >= 1
        pipeline.close()
    return recorder.events


@pytest.mark.parametrize(("cuda_graph", "measures"), [("none", False), ("iteration", False), ("iteration", True)])
def test_each_wait_orders_what_nothing_else_does(
    run_ranks: Callable[..., list[Any]], folder: Path, cuda_graph: str, measures: bool
) -> None:
    logs = run_ranks(2, launched, folder, cuda_graph, measures)
    sides = (*SIDES, METRICS.name) if measures else SIDES
    assert races(logs) == []
    waits = {event for log in logs for event in log if isinstance(event, Wait)}
    needed = {Wait(side, (MAIN.name,)) for side in sides} | {Wait(MAIN.name, (side,)) for side in sides}
    assert waits == needed | {Wait(MAIN.name, (MAIN.name,))}
    missed = [wait for wait in needed if not races([[event for event in log if event != wait] for log in logs])]
    assert missed == []
