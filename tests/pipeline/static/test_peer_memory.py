"""Ranks that write into each other's memory train the same whoever is late: delays at every place change no bit."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from dlrm_bench.bench.config import RunConfig
from dlrm_bench.dlrm.embedding.static_ebc import StaticEBC
from dlrm_bench.dlrm.explicit_dense import ExplicitDense
from dlrm_bench.dlrm.peer_memory import PeerMemory
from dlrm_bench.dlrm.ranks import Ranks
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
"""Of CONFIGS, and whether on GPUs."""
DELAY, CPU_DELAY = 1_000_000, 2e-3
"""GPU clock cycles, half a millisecond, and seconds: on a GPU longer than an iteration of such models."""
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
WITHOUT = ("pooled 0", "ids")
"""Barriers behind what other ranks write."""


def delay() -> None:
    """On the current stream, on a rank with a GPU."""
    if torch.cuda.is_initialized():
        torch.cuda._sleep(DELAY)
    else:
        time.sleep(CPU_DELAY)


def late(function: Callable[..., Any], behind: bool) -> Callable[..., Any]:
    """The function behind a delay, and another one behind it."""

    def delayed(*args: Any, **kwargs: Any) -> Any:
        delay()
        result = function(*args, **kwargs)
        if behind:
            delay()
        return result

    return delayed


@contextmanager
def delays(on: bool) -> Iterator[None]:
    """On this rank, if so."""
    patches = [patch.object(PeerMemory, "barrier", late(PeerMemory.barrier, behind=True))]
    patches += [patch.object(kind, name, late(getattr(kind, name), behind=False)) for kind, name in LATE]
    for each in patches if on else ():
        each.start()
    try:
        yield
    finally:
        for each in patches if on else ():
            each.stop()


def without(name: str) -> Any:
    """No barrier of this name."""
    barrier = PeerMemory.barrier

    def barriers(self: PeerMemory, which: str) -> None:
        if which != name:
            barrier(self, which)

    return patch.object(PeerMemory, "barrier", barriers)


def assert_equal(got: Trained, expected: Trained) -> None:
    assert_bitwise_equal(got, expected)
    assert len(expected.logits) == 2
    assert all(map(torch.equal, got.logits, expected.logits))


def train_with_delays(ranks: Ranks, config: RunConfig) -> list[bool]:
    """Undisturbed, with each rank late in turn, then with rank 1 late and nobody waiting for what the others write:
    of each barrier in WITHOUT whether that shows on this rank."""
    undisturbed = train(ranks, config, STEPS, evaluates=True)
    for slow in range(ranks.world_size):
        with delays(ranks.rank == slow):
            assert_equal(train(ranks, config, STEPS, evaluates=True), undisturbed)
    shows = []
    for name in WITHOUT:
        with delays(ranks.rank == 1), without(name):
            shows.append(train(ranks, config, STEPS).losses != undisturbed.losses)
    return shows


@pytest.mark.parametrize(("name", "gpu"), PLACES)
def test_delays_change_nothing(run_ranks: Callable[..., list[Any]], name: str, gpu: bool) -> None:
    per_rank = run_ranks(2, train_with_delays, CONFIGS[name], gpu=gpu)
    shows = dict(zip(WITHOUT, map(any, zip(*per_rank, strict=True)), strict=True))
    assert all(shows.values()), shows
