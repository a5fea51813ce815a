import random
from statistics import fmean

import pytest

from dlrm_bench.bench.doctor.periodic import find, recurring_work
from dlrm_bench.bench.doctor.rank_file import SETTLING, RankFile
from tests.bench.doctor.made import USER, frame, rank_file, sampled


def times(count: int, seed: int = 1, **extra: float) -> list[float | None]:
    """Iterations of 1 ms with noise, and now and then a slow one; extra: milliseconds by period, as n7=2.0."""
    draw = random.Random(seed)
    series = []
    for i in range(count):
        time = 1 + draw.gauss(0, 0.02) + (draw.random() < 0.03) * draw.expovariate(1.0)
        series.append(time + sum(ms for name, ms in extra.items() if i % int(name[1:]) == 0))
    return series


def test_periods_are_found():
    assert [comb.period for comb in find(times(200, n7=2.0))] == [7]
    both = find(times(200, n10=0.5, n50=4.0))
    assert [(comb.period, comb.first) for comb in both] == [(10, 0), (50, 0)]
    assert both[1].extra_ms == pytest.approx(4.0, rel=0.1)
    assert [comb.period for comb in find(times(200, n2=0.5))] == [2]


def test_noise_has_no_period():
    """Heavy tails included: at most one of 40 series."""
    assert sum(bool(find(times(200, seed))) for seed in range(40)) <= 1


def test_what_comes_twice_is_no_period():
    assert find(times(100, n60=5.0)) == []


def test_iterations_that_were_not_measured_are_left_out():
    series = times(200, n7=2.0)
    series[98] = series[99] = None
    assert [comb.period for comb in find(series)] == [7]


INNER = frame("/home/me/train.py", 12, "evaluate", "model(x)")
CALLS = frame("/home/me/train.py", 61, "main", "evaluate()")


def evaluating(plain: list[float], later: list[float], every: int) -> RankFile:
    """A rank that evaluates in every n-th iteration from its first; plain, later: milliseconds of its iterations
    without and with the sampler. An evaluation has samples in its last 2 ms."""
    rank = rank_file([], [])
    starts = [0.0]
    for time in later:
        starts.append(starts[-1] + time * 1000)
    samples = [(at + 500, 0, 900.0, 900.0) for at in starts[:-1]]
    samples += [(starts[i] + 2000, 1, 2000.0, 2000.0) for i in evaluations(len(plain), len(later), every)]
    rank["plain"] |= {"times_ms": plain, "ms": fmean(plain)}
    stacks = sampled([[USER], [INNER, CALLS]], sorted(samples), len(later))
    rank["sampled"] = stacks | {"starts_us": starts, "ms": fmean(later)}
    return rank


def evaluations(plain: int, later: int, every: int) -> range:
    """Numbers of the later iterations that evaluate."""
    return range((-plain - SETTLING) % every, later, every)


def test_the_line_that_takes_longer_in_these_iterations():
    """The training loop's line is named, not the one below it that the sample fell on."""
    plain, later = times(50, n5=2.0), times(50, 2)
    own = evaluations(50, 50, 5)
    later = [time + 2.0 * (i in own) for i, time in enumerate(later)]
    (work,) = recurring_work(evaluating(plain, later, 5))
    assert (work.periodic["period"], work.periodic["times"]) == (5, 20)
    assert work.periodic["line"] == CALLS
    assert work.periodic["ms"] == pytest.approx(0.4, rel=0.1)
    assert work.periodic["without_ms"] == pytest.approx(1.0, rel=0.05)
    assert work.works_itself == 1.0
    assert work.recurring.iterations == frozenset(own)


def test_a_window_in_which_most_iterations_are_disturbed_hides_no_period():
    """Three of five sampled iterations wait for a core, for a time that is as long as the evaluation."""
    own, draw = evaluations(50, 50, 7), random.Random(3)
    later = [1.0 + 15.0 * (i in own) + 15.0 * (draw.random() < 0.6) for i in range(50)]
    (work,) = recurring_work(evaluating([1.0 + 15.0 * (i % 7 == 0) for i in range(50)], later, 7))
    assert (work.periodic["period"], work.periodic["with_ms"]) == (7, 16.0)


def test_a_stall_of_the_machine_is_not_taken_for_the_line():
    """It comes at another line of one iteration that evaluates, and is longer than all evaluations together."""
    own = evaluations(50, 50, 5)
    later = [1.0 + 2.0 * (i in own) + 100.0 * (i == own[3]) for i in range(50)]
    rank = evaluating([1.0 + 2.0 * (i % 5 == 0) for i in range(50)], later, 5)
    stalled = rank["sampled"]["starts_us"][own[3]] + 50_000
    rank["sampled"]["samples"].append((stalled, 0, 100_000.0, 100_000.0, 0.0))
    (work,) = recurring_work(rank)
    assert work.periodic["line"] == CALLS


def test_work_that_the_sampler_does_not_slow_costs_what_it_takes():
    """An evaluation that waits takes as long under the sampler, which doubles the other iterations."""
    plain, later = [1.0] * 50, [2.0] * 50
    for i in range(0, 50, 7):
        plain[i] = 16.0
    for i in evaluations(50, 50, 7):
        later[i] = 16.0
    (work,) = recurring_work(evaluating(plain, later, 7))
    assert (work.periodic["period"], work.periodic["times"]) == (7, 15)
    assert (work.periodic["with_ms"], work.periodic["without_ms"]) == (16.0, 1.0)
    assert work.periodic["ms"] == pytest.approx(15.0 * 8 / 50)
    assert work.periodic["half_ms"] == 0.0


def test_work_that_comes_rarely_has_its_cost_from_both_windows():
    """Twice without the sampler, and twice with it, which doubles all times."""
    plain = [1.0 + 4.0 * (i % 30 == 0) for i in range(50)]
    later = [2.0 + 8.0 * (i in evaluations(50, 50, 30)) for i in range(50)]
    (work,) = recurring_work(evaluating(plain, later, 30))
    assert (work.periodic["period"], work.periodic["times"]) == (30, 4)
    assert (work.periodic["with_ms"], work.periodic["without_ms"]) == (5.0, 1.0)


def test_works_of_two_periods_have_their_own_costs():
    plain = [1.0 + 0.5 * (i % 10 == 0) + 4.0 * (i % 50 == 0) for i in range(150)]
    later = [1.0 + 0.5 * ((i + 2) % 10 == 0) + 4.0 * ((i + 2) % 50 == 0) for i in range(150)]
    works = {work.periodic["period"]: work.periodic for work in recurring_work(evaluating(plain, later, 50))}
    assert works.keys() == {10, 50}
    assert works[10]["ms"] == pytest.approx(0.5 / 10)
    assert works[50]["ms"] == pytest.approx(4.0 / 50)
    assert works[50]["with_ms"] == 5.5
    assert works[50]["without_ms"] == works[10]["without_ms"] == 1.0
