"""Ranks that write into each other's memory train the same whoever is late: delays at every place change no bit."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from dlrm.config import RunConfig
from dlrm.embedding.static_ebc import StaticEBC
from dlrm.explicit_dense import ExplicitDense
from dlrm.peer_memory import PeerMemory
from dlrm.ranks import Ranks
from tests.pipeline.test_static import EVALUATE_EVERY, LARGE_BATCH, Trained, assert_bitwise_equal, small, train

STEPS = 2 * EVALUATE_EVERY + 1
SMALL = small("replicated", STEPS, presort_ids=True, peer_memory=True)
GRAPH = replace(SMALL, cuda_graph="iteration", overlap=True)
CONFIGS = {"eager": SMALL, "graph": GRAPH, "large": replace(GRAPH, local_batch_size=LARGE_BATCH)}
DELAY = 1_000_000
"""GPU clock cycles, half a millisecond: longer than an iteration of such models."""
# Last readers, and writers, of what other ranks write.
LATE = [
    (ExplicitDense, "cross_forward"),
    (ExplicitDense, "cross_weight_gradients"),
    (ExplicitDense, "top_weight_gradients"),
    (ExplicitDense, "bottom_backward"),
    (StaticEBC, "lookup"),
    (StaticEBC, "update"),
]


def late(function: Callable[..., Any], behind: bool) -> Callable[..., Any]:
    """The function behind a delay on the current stream, and another one behind it."""

    def delayed(*args: Any, **kwargs: Any) -> Any:
        torch.cuda._sleep(DELAY)
        result = function(*args, **kwargs)
        if behind:
            torch.cuda._sleep(DELAY)
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


def train_with_delays(ranks: Ranks, config: RunConfig) -> bool:
    """Undisturbed, with each rank late in turn, then with rank 1 late and nobody waiting for pooled vectors: whether
    that shows, on any rank."""
    undisturbed = train(ranks, config, STEPS, evaluates=True)
    for slow in range(ranks.world_size):
        with delays(ranks.rank == slow):
            assert_equal(train(ranks, config, STEPS, evaluates=True), undisturbed)
    with delays(ranks.rank == 1), without("pooled 0"):
        return train(ranks, config, STEPS).losses != undisturbed.losses


@pytest.mark.multi_gpu
@pytest.mark.parametrize("name", CONFIGS)
def test_delays_change_nothing(run_ranks: Callable[..., list[Any]], name: str) -> None:
    assert any(run_ranks(2, train_with_delays, CONFIGS[name], gpu=True))
