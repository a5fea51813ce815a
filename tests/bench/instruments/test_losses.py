"""Losses of all ranks, in order, whatever the interval; a non-finite one stops every rank."""

import math
from collections.abc import Callable

import pytest
import torch

from dlrm_bench.bench.instruments.losses import LossHistory, NonFiniteError
from dlrm_bench.dlrm.dense.tallies import Tallies
from dlrm_bench.dlrm.runtime.ranks import Ranks

ITERATIONS = 23


def loss(rank: int, iteration: int) -> float:
    return (rank + 1) * iteration / 8  # exact in fp32, also when averaged


def mean(world_size: int, iterations: int) -> list[float]:
    return [sum(loss(r, i) for r in range(world_size)) / world_size for i in range(1, iterations + 1)]


def history(ranks: Ranks, interval: int, finish_after: tuple[int, ...] = ()) -> list[float]:
    losses = LossHistory(ranks.device, interval)
    for iteration in range(1, ITERATIONS + 1):
        losses.add(torch.tensor(loss(ranks.rank, iteration), device=ranks.device))
        if iteration in finish_after:
            assert losses.finish() == mean(ranks.world_size, iteration)
    return list(losses.finish())


def stopped(ranks: Ranks, interval: int, bad: int, value: float) -> tuple[int | None, str]:
    """The call of `add` that raised, None for finish(), and the error."""
    losses = LossHistory(ranks.device, interval)
    iteration: int | None = None
    try:
        for iteration in range(1, ITERATIONS + 1):
            only_one_rank = iteration == bad and ranks.rank == ranks.world_size - 1
            losses.add(torch.tensor(value if only_one_rank else 0.5, device=ranks.device))
        iteration = None
        losses.finish()
    except ValueError as error:
        return iteration, str(error)
    return None, "no error"


def tallied(ranks: Ranks, large: int, not_finite: str, loss: float) -> tuple[str, int | None, dict[str, int]]:
    """The error, the whole iterations before it and the large numbers, of a rank that tallies so at iteration 7."""
    tallies = Tallies(("x", "y"), ranks.device)
    losses = LossHistory(ranks.device, 5, before=100, tallies=lambda: tallies)
    try:
        for iteration in range(1, ITERATIONS + 1):
            if iteration == 7 and ranks.rank == 0:
                tallies.of("y")[0] += large
                if not_finite:
                    tallies.of(not_finite)[1] += 3
            losses.add(torch.tensor(loss if iteration == 8 else 0.5, device=ranks.device))
        losses.finish()
    except NonFiniteError as error:
        return str(error), error.whole, losses.too_large
    return "", -1, losses.too_large


INTERVALS = [1, 2, 7, ITERATIONS - 1, ITERATIONS, ITERATIONS + 1, 100]


def everything(ranks: Ranks) -> dict[str, object]:
    return {
        "histories": [history(ranks, interval) for interval in INTERVALS],
        "after an evaluation": history(ranks, 5, finish_after=(3, 4, 10, 15, 23)),
        "nan": stopped(ranks, 5, bad=7, value=math.nan),
        "inf at the edge": stopped(ranks, 5, bad=10, value=-math.inf),
        "in the remainder": stopped(ranks, 5, bad=22, value=math.nan),
        "large": tallied(ranks, 5, "", 0.5),
        "x": tallied(ranks, 5, "x", 0.5),
        "x and loss": tallied(ranks, 5, "x", math.nan),
        "gradients and loss": tallied(ranks, 0, "gradients", math.nan),
        "nothing": LossHistory(ranks.device, 5).finish(),
    }


@pytest.mark.parametrize(("world_size", "gpu"), [(1, False), (3, False), pytest.param(1, True, marks=pytest.mark.gpu)])
def test_every_rank_sees_the_same_means_and_stops_alike(run_ranks: Callable[..., list[dict]], world_size, gpu):
    first, *others = run_ranks(world_size, everything, gpu=gpu)
    assert all(found == first for found in others)
    expected = mean(world_size, ITERATIONS)
    assert first["histories"] == [expected] * len(INTERVALS)
    assert first["after an evaluation"] == expected
    assert first["nothing"] == []
    # Looked at one interval later, so that nothing waits for the GPU: at 15 for iterations 6 to 10.
    at, error = first["nan"]
    assert at == 15
    assert error.startswith("the loss of iteration 7 is nan: the run stops, with the weights as iteration 6 left them")
    at, error = first["inf at the edge"]
    assert at == 15
    assert error.startswith("the loss of iteration 10 is -inf")
    at, error = first["in the remainder"]
    assert at is None
    assert error.startswith("the loss of iteration 22 is nan")
    assert first["large"] == ("", -1, {"y": 5})
    error, whole, large = first["x"]
    assert error.startswith("not finite in iteration 106 to 110, with finite losses: x. The run stops")
    assert (whole, large) == (None, {"y": 5})
    error, whole, _ = first["x and loss"]
    assert error == "the loss of iteration 108 is nan: the run stops, with the weights as iteration 107 left them"
    assert whole == 107
    error, whole, _ = first["gradients and loss"]
    assert error == "the loss of iteration 108 is nan: the run stops, with a part of an update"
    assert whole is None
