"""Orders of runs that allow a verdict, and those in which the machine alone would make a difference."""

from dataclasses import replace

import numpy as np
import pytest

from dlrm_bench.bench.compare.order import are_pairs, compare_in_order, confounded, notes_on_order
from dlrm_bench.bench.stats.statistics import NO_VERDICT
from tests.bench.compare.two_sides import compare_sides
from tests.bench.stats.rates import of_a_reference, of_an_order, side


def sides(order: str):
    """A and B of equal runs in this order."""
    return [side(name, np.zeros(order.count(name)), np.flatnonzero([each == name for each in order])) for name in "AB"]


@pytest.mark.parametrize("order", ["ABBA", "BAAB", "ABBAAB", "ABAB", "ABABAB", "AABBAABB", "AABBBA", "AB" * 10])
def test_runs_in_turn_allow_a_verdict(order: str) -> None:
    assert list(confounded(*sides(order))) == []


@pytest.mark.parametrize("order", ["AB", "AABB", "BBAA", "AAABBB", "AAAAAB", "ABBBBB"])
def test_blocks_do_not(order: str) -> None:
    (why,) = confounded(*sides(order))
    assert why.startswith(f"all runs of {order[0]} came before those of the other side")


@pytest.mark.parametrize("order", ["AAAABBBBAB", "AAAAABABBBBB", "BABBBAAAA"])
def test_neither_do_orders_in_which_a_drift_or_a_step_alone_would_pass(order: str) -> None:
    (why,) = confounded(*sides(order))
    assert why.endswith("a drift or one step alone would look like a difference")


def test_machines_must_be_shared() -> None:
    a, b = sides("ABBA")
    assert list(confounded(replace(a, machines=["x", "y"]), replace(b, machines=["y", "x"]))) == []
    (why,) = confounded(a, replace(b, machines=["y", "z"]))
    assert "on different machines" in why
    assert list(confounded(a, replace(b, machines=["", ""]))) == []  # not known


@pytest.mark.parametrize("order", ["AB" * 8, "ABBA" * 4])
def test_machines_must_be_shared_alike(order: str) -> None:
    """A on one machine seven times of eight, and B on another one: pairs or not, that is what differs."""
    a, b = sides(order)
    a, b = replace(a, machines=["x"] * 7 + ["y"]), replace(b, machines=["y"] * 7 + ["x"])
    (why,) = confounded(a, b)
    assert why == (
        "the runs of A and those of B are not spread alike over 2 machines (7 of A and 1 of B on one, 1 of A and 7 of "
        "B on one)"
    )
    assert compare_sides(a, b).verdict == NO_VERDICT
    half = ["x", "y"] * 4
    assert list(confounded(replace(a, machines=half), replace(b, machines=half))) == []


def test_twice_as_many_runs_on_each_machine_are_spread_alike() -> None:
    a, b = sides("ABBABB")
    assert list(confounded(replace(a, machines=["x", "y"]), replace(b, machines=["x", "y", "y", "x"]))) == []


def test_unknown_times_are_a_reason_and_the_same_runs_are_none() -> None:
    a, b = sides("AABB")
    (why,) = confounded(a, replace(b, finished=[]))
    assert why == "B states neither when its runs ran nor on which machine"
    same = replace(a, keys=[("1", "2", "3")])
    assert list(confounded(same, same)) == []


def test_one_side_first_in_most_pairs_is_noted() -> None:
    assert not are_pairs(*sides("ABABAB"))
    (note,) = notes_on_order(*sides("ABABAB"))
    assert "A came first in most pairs" in note
    assert are_pairs(*sides("ABBAAB"))
    assert list(notes_on_order(*sides("ABBAAB"))) == []


_BLOCKS = ["AAABBBBBBAAA", "AAABBBAAABBB", "AAAABBBBBBBBAAAA"]


@pytest.mark.slow
@pytest.mark.parametrize("order", ["ABBAABBA", "ABABABAB", "AAABBB", "AAAABBBBAB", "AABBAABB", *_BLOCKS])
@pytest.mark.parametrize("drift", ["none", "2 % a run", "step", "walk"])
def test_no_change_of_the_machine_is_called_a_difference(order: str, drift: str) -> None:
    """At most 5 % of 100 comparisons of a program with itself, and two standard errors."""
    wrong = float(of_an_order(order, drift, 100)[2].removesuffix("%"))
    assert wrong <= 9.5


def test_blocks_have_few_degrees_of_freedom_and_say_so() -> None:
    a, b = (replace(each, series=[np.exp([0.01 * i]) for i in range(6)]) for each in sides("AAABBBBBBAAA"))
    assert compare_in_order(a, b).estimates["p50"].freedom == 2
    (note,) = notes_on_order(a, b)
    assert "the runs are 3 blocks" in note
    assert "2 degrees of freedom at most; run in turn" in note
    in_turn = [replace(each, series=a.series) for each in sides("AABBABABBAAB")]
    assert compare_in_order(in_turn[0], in_turn[1]).estimates["p50"].freedom == 10


def test_a_reference_gives_a_verdict_across_sittings() -> None:
    _, wrong, _, found = of_a_reference(5, 100)
    assert float(wrong.removesuffix("%")) <= 9.5
    assert float(found.removesuffix("%")) >= 80
