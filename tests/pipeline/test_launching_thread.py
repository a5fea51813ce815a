"""Two launching threads: in any order the same result, no thread left behind, exceptions on the caller's."""

import gc
import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest

from dlrm.ranks import Ranks
from pipeline.five_stage import FiveStageOptions, FiveStagePipeline, _collection
from tests.pipeline.test_five_stage import (
    TIMEOUT,
    Case,
    assert_equal,
    learning_rate,
    stock,
)
from tests.pipeline.torchrec_models import batches, build, drain, state


@dataclass
class Delays:
    """Before and after each stage, drawn for this rank and this stage alone; and when stages began and ended."""

    seed: int
    times: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        draw = random.Random(f"{self.seed} {name}")
        times = self.times.setdefault(name, [])

        def delayed(*args: Any) -> Any:
            time.sleep(draw.choice((0, 0.004)))
            begun = time.monotonic()
            result = function(*args)
            times.append((begun, time.monotonic()))
            time.sleep(draw.choice((0, 0.004)))
            return result

        return delayed


def test_no_order_of_the_threads_hangs_or_changes_the_result(run_ranks):
    for orders in run_ranks(2, interleave):
        assert orders["input_dist first"] > 3
        assert orders["dense first"] > 3
        assert orders["update first"] > 3
        assert orders["backward first"] > 3


def interleave(ranks: Ranks) -> dict[str, int]:
    signal.alarm(TIMEOUT)
    orders = dict.fromkeys(("input_dist first", "dense first", "update first", "backward first"), 0)
    for plan in ("TW", "mixed", "RW"):
        expected = stock(ranks, Case(plan, FiveStageOptions()), steps=25)
        for pinned in (False, True):
            delays = Delays(seed=10 * ranks.rank + pinned)
            model, optimizer = build(ranks, plan)
            options = FiveStageOptions(launch_threads=2, pinned_d2h=pinned)
            with FiveStagePipeline(model, optimizer, ranks.device, options) as pipeline:
                for name in ("input_dist", "embedding_forward", "dense_forward_backward", "embedding_backward"):
                    setattr(pipeline, f"_{name}", delays.wrap(name, getattr(pipeline, f"_{name}")))
                pipeline._dense_update = delays.wrap("dense_update", pipeline._dense_update)
                trained = drain(pipeline, iter(batches(ranks, 25)), learning_rate(optimizer))
                trained.state = state(model, optimizer)
            assert_equal(trained, expected)
            count_orders(delays, orders)
    return orders


def count_orders(delays: Delays, orders: dict[str, int]) -> None:
    times = delays.times
    # The input dist of batch i+1 is call i+1 on the second thread where there are no others: one at the very start.
    launched = [span for span in times["input_dist"] if span[1] - span[0] > 1e-5]
    for (_, dist_end), (dense_begin, _) in zip(launched[1:], times["dense_forward_backward"], strict=False):
        orders["input_dist first" if dist_end < dense_begin else "dense first"] += 1
    for (_, update_end), (_, backward_end) in zip(times["dense_update"], times["embedding_backward"], strict=True):
        orders["update first" if update_end < backward_end else "backward first"] += 1


def test_no_thread_stays_behind(run_ranks):
    run_ranks(2, leak)


def leak(ranks: Ranks) -> None:
    signal.alarm(TIMEOUT)
    model, optimizer = build(ranks, "TW")
    before = set(threading.enumerate())
    with FiveStagePipeline(model, optimizer, ranks.device, FiveStageOptions(launch_threads=2)) as pipeline:
        assert len(drain(pipeline, iter(batches(ranks, 200))).outputs) == 200
        (own,) = set(threading.enumerate()) - before
        assert own.name.startswith("five-stage")
    assert set(threading.enumerate()) == before
    with pytest.raises(RuntimeError, match="was closed"):
        pipeline.progress(iter([]))
    pipeline.close()  # again
    forgotten = FiveStagePipeline(model, optimizer, ranks.device, FiveStageOptions(launch_threads=2))
    drain(forgotten, iter(batches(ranks, 3)))
    (own,) = set(threading.enumerate()) - before
    del forgotten
    gc.collect()
    own.join(timeout=10)
    assert set(threading.enumerate()) == before


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("where", ["input_dist", "model", "data", "optimizer"])
def test_exceptions_reach_the_caller(run_ranks, threads, where):
    run_ranks(2, fail, threads, where)


class PlantedError(ValueError):
    pass


def fail(ranks: Ranks, threads: int, where: str) -> None:
    signal.alarm(TIMEOUT)

    def planted(function: Callable[..., Any]) -> Callable[..., Any]:
        calls = count()

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if next(calls) == 5:
                raise PlantedError("planted")
            return function(*args, **kwargs)

        return wrapped

    before = set(threading.enumerate())
    model, optimizer = build(ranks, "TW")
    data: Any = iter(batches(ranks, 20))
    collection = _collection(model)
    if where == "input_dist":
        collection.input_dist = planted(collection.input_dist)
    elif where == "model":
        model.module.model.over_arch.register_forward_pre_hook(planted(lambda *_: None))
    elif where == "data":
        data = map(planted(lambda batch: batch), data)
    else:
        optimizer.step = planted(optimizer.step)
    pipeline = FiveStagePipeline(model, optimizer, ranks.device, FiveStageOptions(launch_threads=threads))
    with pytest.raises(PlantedError) as raised:
        drain(pipeline, data)
    assert any(entry.name == "wrapped" for entry in raised.traceback)
    with pytest.raises(RuntimeError, match="failed in an iteration"):
        pipeline.progress(data)
    pipeline.close()
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=10)
    assert set(threading.enumerate()) == before
