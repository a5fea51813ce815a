"""Variance by level, on runs whose levels are known."""

import math

import numpy as np
import pytest

from dlrm_bench.bench.stats.variance import Levels, agree_by_luck, levels


def drawn(machines: int, runs: int, sds: tuple[float, float, float], seed: int) -> tuple[list[np.ndarray], list[str]]:
    """Runs of 200 iterations each; sds: of iterations, processes and machines, in logarithms."""
    random = np.random.default_rng(seed)
    of_iterations, of_processes, of_machines = sds
    found, names = [], []
    for machine in range(machines):
        shift = random.normal(0, of_machines)
        for _ in range(runs):
            center = shift + random.normal(0, of_processes)
            found.append(np.exp(center + random.normal(0, of_iterations, 200)))
            names.append(f"host{machine}")
    return found, names


def test_each_level_is_found() -> None:
    """The mean's error by 200 independent iterations of 14 % is 1 %; means over 60 drawn experiments."""
    experiments = [drawn(4, 5, (0.1414, 0.03, 0.08), seed) for seed in range(60)]
    found = [levels(runs, "mean", machines) for runs, machines in experiments]
    squares = [np.mean([getattr(each, name) ** 2 for each in found]) for name in ("iteration", "process", "machine")]
    assert np.sqrt(squares) == pytest.approx([0.01, 0.03, 0.08], rel=0.15)


def test_a_level_that_adds_nothing_is_not_negative() -> None:
    runs, machines = drawn(2, 6, (0.1, 0.0, 0.0), seed=1)
    found = levels(runs, "p50", machines)
    assert found.process is not None
    assert 0 <= found.process < 0.01
    assert found.machine is not None
    assert 0 <= found.machine < 0.01


def test_what_cannot_be_known_is_unknown() -> None:
    runs, _ = drawn(1, 3, (0.1, 0.01, 0), seed=0)
    assert levels(runs, "p50", ["x"] * 3).machine is None
    one = levels(runs[:1], "p50", ["x"])
    assert one.iteration is not None
    assert (one.process, one.machine) == (None, None)
    assert levels(runs, "p50", ["x", "y", "z"]).process is None  # one run of each machine
    means = levels([np.array([1.0]), np.array([1.1])], "mean", ["x", "x"])
    assert means.iteration is None
    assert means.process == pytest.approx(math.log(1.1) / math.sqrt(2))


def test_no_spread_between_runs_is_luck_whatever_their_iterations_say() -> None:
    assert agree_by_luck(0.0, 0.0, 3.0)
    assert agree_by_luck(1e-17, 0.0, 3.0)
    assert agree_by_luck(0.0, 0.01, 3.0)
    assert not agree_by_luck(0.01, 0.0, 3.0)


def test_in_words() -> None:
    assert Levels(0.004, 0.0312, None).in_words() == "iterations 0.40%, processes 3.12%, machines unknown"
