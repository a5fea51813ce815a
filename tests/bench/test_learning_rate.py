"""The training loop sets the learning rate of each iteration where the benchmark has a schedule, and nothing else."""

from dataclasses import dataclass, replace
from typing import Any

import pytest

from dlrm_bench.bench.run import Run
from dlrm_bench.dlrm.dcnv2.config import OptimizerConfig
from dlrm_bench.dlrm.runtime.ranks import Ranks
from tests.bench.profile.test_profiled_run import CPU, Nothing, loop

ITERATIONS = 12
ALONE = Ranks(rank=0, local_rank=0, world_size=1, local_world_size=1, device=CPU)


@dataclass(kw_only=True, slots=True, frozen=True)
class WarmingUp(OptimizerConfig):
    """Rises over four iterations."""

    def rate(self, iteration: int) -> float:  # type: ignore[override]
        return self.learning_rate * min(1.0, iteration / 4)


class Noting(Nothing):
    """Notes before which step the rate became what."""

    def __init__(self) -> None:
        super().__init__()
        self.rates: list[tuple[int, float]] = []

    def set_learning_rate(self, value: float) -> None:
        self.rates.append((self.steps, value))


def trained(optimizer: OptimizerConfig, first: int = 0) -> list[tuple[int, float]]:
    pipeline: Any = Noting()
    run: Run = loop(ITERATIONS, pipeline, ALONE)
    run.config, run.first = replace(run.config, optimizer=optimizer), first
    run.train()
    assert pipeline.steps == ITERATIONS - first
    return pipeline.rates


def test_a_constant_rate_is_never_set() -> None:
    optimizer = OptimizerConfig(learning_rate=0.8)
    assert [optimizer.rate(iteration) for iteration in (1, 2, 100)] == [None] * 3
    assert trained(optimizer) == []


@pytest.mark.parametrize("first", [0, 3])
def test_a_schedule_is_set_before_each_step_and_goes_on_where_a_run_resumes(first: int) -> None:
    rates = [0.2, 0.4, 0.6, *[0.8] * (ITERATIONS - 3)]
    expected = [(step, pytest.approx(rate)) for step, rate in enumerate(rates[first:])]
    assert trained(WarmingUp(learning_rate=0.8), first) == expected
