import random

import pytest

from dlrm_bench.bench.doctor.periodic import find, recurring_work
from dlrm_bench.bench.doctor.rank_file import SETTLING
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


def test_the_line_that_takes_longer_in_these_iterations():
    """The training loop's line is named, not the one below it that the sample fell on."""
    rank = rank_file([], [])
    plain, later = times(50, n5=2.0), times(50, 2)
    inner = frame("/home/me/train.py", 12, "evaluate", "model(x)")
    calls = frame("/home/me/train.py", 61, "main", "evaluate()")
    first = (-50 - SETTLING) % 5
    later = [time + (2.0 if i % 5 == first else 0.0) for i, time in enumerate(later)]
    starts = [0.0]
    for time in later:
        starts.append(starts[-1] + time * 1000)
    samples = [(at + 500, 0, 900.0, 900.0) for at in starts[:-1]]
    samples += [(starts[i] + 2000, 1, 2000.0, 2000.0) for i in range(first, 50, 5)]
    rank["plain"]["times_ms"] = plain
    rank["sampled"] = sampled([[USER], [inner, calls]], sorted(samples)) | {"starts_us": starts, "ms": 1.4}
    rank["plain"]["ms"] = 1.4
    (work,) = recurring_work(rank)
    assert (work.periodic["period"], work.periodic["times"]) == (5, 20)
    assert work.periodic["line"] == calls
    assert work.periodic["ms"] == pytest.approx(0.4, rel=0.1)
    assert work.periodic["without_ms"] == pytest.approx(1.0, rel=0.05)
    assert work.works_itself == 1.0
    assert work.recurring.iterations == frozenset(range(first, 50, 5))
