"""Cross-cutting: ranks that write into each other's memory train the same whoever is late, wherever delays come."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta
from itertools import count
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from dlrm_bench.bench.config import RunConfig
from dlrm_bench.dlrm.dcnv2.explicit_dense import ExplicitDense
from dlrm_bench.dlrm.runtime.peer_memory import Barrier, PeerMemory
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.dlrm.tables.pooled.static_ebc import StaticEBC
from dlrm_bench.pipeline.static.concurrency import IDS, embedding_barriers
from tests.pipeline.static.test_pipeline import EVALUATE_EVERY, LARGE_BATCH, Trained, assert_bitwise_equal, small, train
from tests.pipelines import changed

STEPS = 2 * EVALUATE_EVERY + 1
SMALL = small("tiny tables", STEPS, presort_ids=True, peer_memory=True)
GRAPH = changed(SMALL, cuda_graph="iteration", overlap=True)
CONFIGS = {"eager": SMALL, "graph": GRAPH, "large": replace(GRAPH, local_batch_size=LARGE_BATCH)}
PLACES = [
    pytest.param("eager", False),
    *[pytest.param(name, True, marks=pytest.mark.multi_gpu) for name in CONFIGS],
]
"""Names of CONFIGS, and whether on GPUs."""
DELAY = 1_000_000
"""GPU clock cycles, half a millisecond: longer than an iteration of such models."""
LIMIT = timedelta(minutes=5)
# Last readers, and writers, of what other ranks write.
LATE = [
    (ExplicitDense, "cross_forward"),
    (ExplicitDense, "cross_weight_gradients"),
    (ExplicitDense, "top_weight_gradients"),
    (ExplicitDense, "bottom_backward"),
    (StaticEBC, "input_dist"),
    (StaticEBC, "sort"),
    (StaticEBC, "lookup"),
    (StaticEBC, "update"),
]
WITHOUT = (embedding_barriers(parts=1, nodes=1).pooled[0], IDS)
"""Barriers after what other ranks write."""
COLLECTIVES = (
    "barrier",
    "all_reduce",
    "all_to_all_single",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "broadcast",
    "broadcast_object_list",
    "all_gather_object",
)
_trials = count()


class Lateness:
    """Delays of one rank, on the CPU: until each other rank has done all it can without this one, and waits for it.

    On every rank: they count the collectives that they come to, and say so in the process group's store.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._store = dist.PrefixStore(f"lateness {next(_trials)}", _get_default_store())
        self._ranks = ranks
        self._begun = 0

    def delay(self) -> None:
        others = [rank for rank in range(self._ranks.world_size) if rank != self._ranks.rank]
        self._store.wait([f"{rank} {self._begun + 1}" for rank in others], LIMIT)

    def counted(self, collective: Callable[..., Any]) -> Callable[..., Any]:
        def begin(*args: Any, **kwargs: Any) -> Any:
            self._begun += 1
            self._store.set(f"{self._ranks.rank} {self._begun}", "")
            return collective(*args, **kwargs)

        return begin


def delay_of_gpu() -> None:
    torch.cuda._sleep(DELAY)


def late(function: Callable[..., Any], delay: Callable[[], None], after: bool) -> Callable[..., Any]:
    """Returns the function after a delay, with another delay after it."""

    def delayed(*args: Any, **kwargs: Any) -> Any:
        delay()
        result = function(*args, **kwargs)
        if after:
            delay()
        return result

    return delayed


@contextmanager
def delays(ranks: Ranks, on: bool) -> Iterator[None]:
    """Delays this rank, if `on`: on the current stream of a GPU, else by Lateness."""
    with ExitStack() as stack:
        delay = delay_of_gpu
        if ranks.device.type != "cuda":
            lateness = Lateness(ranks)
            delay = lateness.delay
            for name in COLLECTIVES:
                stack.enter_context(patch.object(dist, name, lateness.counted(getattr(dist, name))))
        if on:
            stack.enter_context(patch.object(PeerMemory, "barrier", late(PeerMemory.barrier, delay, after=True)))
            for kind, name in LATE:
                stack.enter_context(patch.object(kind, name, late(getattr(kind, name), delay, after=False)))
        yield
        dist.barrier()  # which a late rank may wait for


def without(left_out: Barrier) -> Any:
    """Returns all barriers but this one."""
    barrier = PeerMemory.barrier

    def barriers(self: PeerMemory, which: Barrier) -> None:
        if which != left_out:
            barrier(self, which)

    return patch.object(PeerMemory, "barrier", barriers)


def assert_equal(got: Trained, expected: Trained) -> None:
    assert_bitwise_equal(got, expected)
    assert len(expected.logits) == 2
    assert all(map(torch.equal, got.logits, expected.logits))


def train_with_delays(ranks: Ranks, config: RunConfig) -> list[bool]:
    """Trains undisturbed, with each rank late in turn, then with rank 1 late and nobody waiting for the others' writes;
    returns for each barrier in WITHOUT whether its absence shows on this rank."""
    undisturbed = train(ranks, config, STEPS, evaluates=True)
    for slow in range(ranks.world_size):
        with delays(ranks, ranks.rank == slow):
            assert_equal(train(ranks, config, STEPS, evaluates=True), undisturbed)
    shows = []
    for barrier in WITHOUT:
        with delays(ranks, ranks.rank == 1), without(barrier):
            shows.append(train(ranks, config, STEPS).losses != undisturbed.losses)
    return shows


@pytest.mark.parametrize(("name", "gpu"), PLACES)
def test_delays_change_nothing(run_ranks: Callable[..., list[Any]], name: str, gpu: bool) -> None:
    per_rank = run_ranks(2, train_with_delays, CONFIGS[name], gpu=gpu)
    shows = dict(zip((barrier.name for barrier in WITHOUT), map(any, zip(*per_rank, strict=True)), strict=True))
    assert all(shows.values()), shows
