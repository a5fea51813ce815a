"""Event simulation: resources one at a time, dependencies kept, and steady iterations as long as they must be."""

import pytest

from dlrm_bench.bench.scale.simulation import Task, simulate


def test_a_chain_takes_its_sum_and_waits_for_the_iteration_before():
    chain = [
        Task(name="a", resource="gpu", us=3, after_last=("c",)),
        Task(name="b", resource="network", us=5, after=("a",)),
        Task(name="c", resource="gpu", us=2, after=("b",)),
    ]
    steady = simulate(chain)
    assert steady.iteration_us == pytest.approx(10)
    assert steady.busy_us == {"gpu": 5, "network": 5}
    assert steady.bound_by == "dependencies"


def test_what_needs_nothing_runs_beside_it_and_a_full_resource_bounds():
    tasks = [
        Task(name="a", resource="gpu", us=3, after_last=("b",)),
        Task(name="b", resource="gpu", us=4, after=("a",)),
        Task(name="ids", resource="network", us=6, after_last=("a",)),
    ]
    assert simulate(tasks).iteration_us == pytest.approx(7)
    assert simulate(tasks).bound_by == "gpu"
    slow = [*tasks[:2], Task(name="ids", resource="network", us=20, after_last=("a",))]
    assert simulate(slow).iteration_us == pytest.approx(20)
    assert simulate(slow).bound_by == "network"


def test_of_two_that_are_ready_the_first_of_the_list_goes_first():
    """Both wait for a; where the long one comes first, the chain waits for it."""
    first, long, b, d = [
        Task(name="a", resource="gpu", us=1, after_last=("d",)),
        Task(name="long", resource="gpu", us=10, after=("a",)),
        Task(name="b", resource="gpu", us=1, after=("a",)),
        Task(name="d", resource="network", us=5, after=("b",)),
    ]
    assert simulate([first, long, b, d]).iteration_us == pytest.approx(17)
    assert simulate([first, b, long, d]).iteration_us == pytest.approx(12)
