import math
import random
from statistics import stdev

import pytest

from dlrm_bench.bench.doctor.samples import Samples, estimate_of, student_t
from tests.bench.doctor.made import USER, rank_file, sampled


def test_samples_stand_for_time_of_an_iteration_without_the_sampler():
    rank = rank_file([], [])
    # Each of 10 iterations of 1 ms has one sample of 400 us; the plain window's take half as long.
    rank["sampled"] = sampled([[USER]], [(1000.0 * i + 500, 0, 400.0, 100.0) for i in range(10)], 10)
    rank["plain"]["ms"] = 0.5
    samples = Samples(rank)
    assert [sample.iteration for sample in samples.samples] == list(range(10))
    estimate = samples.estimate(samples.samples)
    assert estimate.ms == pytest.approx(0.2)
    assert estimate.half_ms == pytest.approx(0.1 / 2 / 10)  # a period, where all iterations are alike
    assert samples.estimate(samples.samples, lambda sample: sample.running_ms).ms == pytest.approx(0.05)
    assert samples.estimate([]).low == 0.0


def test_samples_outside_of_the_iterations_do_not_count():
    rank = rank_file([], [])
    rank["sampled"] = sampled([[USER], []], [(-1.0, 0, 100.0, 0.0), (10_000.0, 0, 100.0, 0.0), (5.0, 1, 9.0, 9.0)], 10)
    assert Samples(rank).samples == []


def test_intervals_hold_the_mean_95_times_of_100():
    """Times of iterations are skewed, over series of 20."""
    draw = random.Random(7)
    held = 0
    for _ in range(1000):
        each = [draw.gammavariate(4, 0.25) + 2 for _ in range(20)]
        estimate = estimate_of(each)
        held += estimate.low <= 3.0 <= estimate.high
    assert 0.91 < held / 1000 < 0.97


@pytest.mark.parametrize(("degrees", "t"), [(2, 4.303), (3, 3.182), (4, 2.776), (9, 2.262), (49, 2.010)])
def test_students_t(degrees, t):
    assert student_t(degrees) == pytest.approx(t, rel=0.01)


def test_one_iteration_tells_no_interval():
    assert math.isinf(estimate_of([1.0]).half_ms)
    assert estimate_of([1.0, 2.0, 4.0]).half_ms == pytest.approx(student_t(2) * stdev([1, 2, 4]) / math.sqrt(3))
