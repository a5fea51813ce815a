"""Two launching threads: in any order the same result, no thread left behind, exceptions on the caller's."""

import gc
import signal
import threading
from collections.abc import Callable
from dataclasses import astuple, dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import count, pairwise, product
from typing import Any

import pytest

from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.five_stage.input_dist import Distribution
from dlrm_bench.pipeline.five_stage.options import FiveStageOptions
from dlrm_bench.pipeline.five_stage.pipeline import FiveStagePipeline
from dlrm_bench.pipeline.five_stage.sharded_modules import sharded_modules
from tests.pipeline.five_stage.test_pipeline import (
    TIMEOUT,
    Case,
    assert_equal,
    learning_rate,
    stock,
)
from tests.pipeline.five_stage.torchrec_models import batches, build, drain, state

# The orders of the two threads

CALLER = ("embedding_forward", "dense_forward_backward", "embedding_backward")
"""Stages of an iteration on the caller's thread, each with collectives. The other has the next batch's input dist, and
after it, where the optimizer allows it, the dense update, which waits for gradients from dense_forward_backward."""
PROGRAM = (
    tuple(f"{stage} {edge}" for stage in CALLER for edge in ("begins", "ends")),
    ("dist begins", "splits in flight", "values in flight", "dist waits", "dist ends", "update begins", "update ends"),
)
"""What happens in an iteration, in the order in which the program of each thread has it. The exchange of splits is in
flight from where it is launched; that of the values, once the splits of all ranks are here."""
Edge = tuple[str, str]
"""The second happens after the first."""


@dataclass(frozen=True, order=True)
class Order:
    """Each part of what the second thread does falls between two of the caller's stages: the number is that of stages
    that have ended by then, and the next one has not begun."""

    dist_in_flight: int
    dist_ends: int
    update: int

    def edges(self) -> list[Edge]:
        result = []
        spans = (("dist begins", "splits in flight"), ("dist waits", "dist ends"), ("update begins", "update ends"))
        for number, (first, last) in zip(astuple(self), spans, strict=True):
            result += [(f"{stage} ends", first) for stage in CALLER[:number]]
            result += [(last, f"{stage} begins") for stage in CALLER[number:]]
        return result

    @staticmethod
    def of(log: list[str]) -> "Order | None":
        """The order that was; None if something fell within a stage of the caller, not between two."""

        def ended(by: str) -> int:
            before = log[: log.index(by)]
            begun = sum(f"{stage} begins" in before for stage in CALLER)
            return begun if begun == sum(f"{stage} ends" in before for stage in CALLER) else -1

        first = [ended(by) for by in ("dist begins", "dist waits", "update begins")]
        last = [ended(by) for by in ("splits in flight", "dist ends", "update ends")]
        return Order(*first) if first == last and -1 not in first else None


def can_happen(*of_ranks: Order) -> bool:
    """Whether no event waits for itself: a collective ends on no rank before it has begun on all."""
    after: dict[tuple[int, str], set[tuple[int, str]]] = {}
    for rank, order in enumerate(of_ranks):
        edges = [edge for events in PROGRAM for edge in pairwise(events)]
        edges += [("dense_forward_backward ends", "update begins"), *order.edges()]
        for first, second in edges:
            after.setdefault((rank, second), set()).add((rank, first))
        for other in range(len(of_ranks)):
            for stage in CALLER:
                after[rank, f"{stage} ends"].add((other, f"{stage} begins"))
            after[rank, "values in flight"].add((other, "splits in flight"))
            after[rank, "dist ends"].add((other, "values in flight"))
    try:
        TopologicalSorter(after).prepare()
    except CycleError:
        return False
    return True


ORDERS = [order for order in (Order(*numbers) for numbers in product(range(4), repeat=3)) if can_happen(order)]
PAIRS = [pair for pair in product(ORDERS, repeat=2) if can_happen(*pair)]
"""Orders of two ranks that do not wait for each other."""


class Turns:
    """Holds the stages of a pipeline back until those that shall be first have happened, and logs what happened."""

    def __init__(self, pipeline: FiveStagePipeline, orders: list[Order]) -> None:
        """orders: those of the first iterations; what comes after them is free."""
        events = [event for of_thread in PROGRAM for event in of_thread]
        self.logs: list[list[str]] = [[] for _ in orders]
        self._happened = [{event: threading.Event() for event in events} for _ in orders]
        self._after = [{event: [a for a, b in of.edges() if b == event] for event in events} for of in orders]
        for stage in CALLER:
            setattr(pipeline, f"_{stage}", self._held(stage, getattr(pipeline, f"_{stage}")))
        pipeline._dense_update = self._held("update", pipeline._dense_update)
        pipeline._input_dists.new = self._distributions(pipeline._input_dists.new)

    def _at(self, iteration: int, event: str) -> None:
        if not 0 <= iteration < len(self.logs):
            return
        for first in self._after[iteration][event]:
            assert self._happened[iteration][first].wait(TIMEOUT), f"{iteration}: {event} waited for {first}"
        self.logs[iteration].append(event)
        self._happened[iteration][event].set()

    def _held(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        calls = count()

        def held(*args: Any) -> Any:
            iteration = next(calls)
            self._at(iteration, f"{name} begins")
            result = function(*args)
            self._at(iteration, f"{name} ends")
            return result

        return held

    def _distributions(self, new: Callable[[], Distribution]) -> Callable[[], Distribution]:
        iterations = count(-1)  # a batch is distributed one iteration ahead, the very first one before all

        def with_turns() -> Distribution:
            distribution, iteration = new(), next(iterations)
            advance = distribution.advance

            def in_turns(features: Any, until: str) -> None:
                assert until == "features"
                self._at(iteration, "dist begins")
                advance(features, "splits")
                self._at(iteration, "splits in flight")
                advance(features, "values")
                self._at(iteration, "values in flight")
                self._at(iteration, "dist waits")
                advance(features, "features")
                self._at(iteration, "dist ends")

            distribution.advance = in_turns
            return distribution

        return with_turns


def test_orders_that_ranks_can_have_together():
    """Where the input dists of two ranks are in flight at a time, and nothing else about them, decides."""
    assert len(ORDERS) == 16
    for one, other in product(ORDERS, repeat=2):
        together = max(one.dist_in_flight, other.dist_in_flight) <= min(one.dist_ends, other.dist_ends)
        assert ((one, other) in PAIRS) == together


@pytest.mark.slow
def test_no_order_of_the_threads_hangs_or_changes_the_result(run_ranks):
    ran = run_ranks(2, interleave)
    pairs = {case: list(zip(ran[0][case], ran[1][case], strict=True)) for case in dealt()}
    assert pairs == dealt()
    assert {pair for of_case in pairs.values() for pair in of_case} == set(PAIRS)
    for plan in PLANS:
        for of_rank in zip(*pairs[plan, False], *pairs[plan, True], strict=True):
            assert set(of_rank) == {order for order in ORDERS if may_have(plan, order)}


PLANS = ("TW", "mixed", "RW")


def may_have(plan: str, order: Order) -> bool:
    """The optimizer needs the gradients of data-parallel tables: the caller runs it after the embedding backward."""
    return plan != "mixed" or order.update == len(CALLER)


def dealt() -> dict[tuple[str, bool], list[tuple[Order, Order]]]:
    """PAIRS by plan and pinned_d2h: each once, but those of an order with itself once a plan; about as many to all."""
    result: dict[tuple[str, bool], list[tuple[Order, Order]]] = {case: [] for case in product(PLANS, (False, True))}
    equal, others = ([pair for pair in PAIRS if (pair[0] == pair[1]) == same] for same in (True, False))
    hands = [*product(equal, [[plan] for plan in PLANS]), *((pair, PLANS) for pair in others)]
    for pair, plans in hands:
        cases = [case for case in result if case[0] in plans and all(may_have(case[0], order) for order in pair)]
        if cases:
            result[min(cases, key=lambda case: len(result[case]))].append(pair)
    return result


def interleave(ranks: Ranks) -> dict[tuple[str, bool], list[Order | None]]:
    """The orders that this rank's iterations had."""
    signal.alarm(TIMEOUT)
    steps = 1 + max(map(len, dealt().values()))  # the last iteration has no input dist
    seen = {}
    expected = {plan: stock(ranks, Case(plan, FiveStageOptions()), steps) for plan in PLANS}
    for (plan, pinned), pairs in dealt().items():
        model, optimizer = build(ranks, plan)
        options = FiveStageOptions(launch_threads=2, pinned_d2h=pinned)
        with FiveStagePipeline(model, optimizer, ranks.device, options) as pipeline:
            turns = Turns(pipeline, [pair[ranks.rank] for pair in pairs])
            trained = drain(pipeline, iter(batches(ranks, steps)), learning_rate(optimizer))
            trained.state = state(model, optimizer)
        assert_equal(trained, expected[plan])
        seen[plan, pinned] = [Order.of(log) for log in turns.logs]
    return seen


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
    own.join(timeout=60)
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
    collection = sharded_modules(model)[0].module
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
        thread.join(timeout=60)
    assert set(threading.enumerate()) == before
