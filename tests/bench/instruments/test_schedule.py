"""MLPerf's evaluation cadence, and refusals of iterations that a data set lacks."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrm_bench.bench.config import RunConfig
from dlrm_bench.bench.instruments.schedule import Schedule, plan_schedule
from dlrm_bench.bench.presets import preset
from dlrm_bench.dlrm.dcnv2.config import DataConfig
from dlrm_bench.dlrm.dlrmv4.config import DataConfig as WindowsConfig

MLPERF_TRAIN_SAMPLES = 4_195_197_692


def config(**changes: object) -> RunConfig:
    return replace(preset("smoke"), warmup_iterations=0, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("local_batch", "world_size", "cadence"), [(6912, 8, 3793), (512, 128, 3200), (4096, 8, 6401), (8448, 16, 1551)]
)
def test_mlperfs_cadence(local_batch, world_size, cadence):
    schedule = plan_schedule(config(local_batch_size=local_batch), MLPERF_TRAIN_SAMPLES, world_size)
    gbs = local_batch * world_size
    assert schedule.evaluate_every == cadence == MLPERF_TRAIN_SAMPLES // (20 * gbs)
    assert schedule.global_batch_size == gbs
    assert schedule.iterations == MLPERF_TRAIN_SAMPLES // gbs
    assert schedule.epoch_num(cadence) == pytest.approx(cadence * gbs / MLPERF_TRAIN_SAMPLES, rel=1e-12)


@given(st.integers(1, 10_000), st.integers(1, 64), st.integers(1, 4), st.integers(1, 40), st.booleans())
def test_evaluations_follow_the_cadence_and_the_last_iteration(samples, batch, world_size, per_epoch, has_target):
    gbs = batch * world_size
    this = config(local_batch_size=batch, evaluations_per_epoch=per_epoch, target_auc=0.8 if has_target else None)
    if samples < gbs:
        with pytest.raises(ValueError, match="--local-batch-size"):
            plan_schedule(this, samples, world_size)
        return
    schedule = plan_schedule(this, samples, world_size)
    evaluated = [i for i in range(1, schedule.iterations + 1) if schedule.evaluates_after(i)]
    if not has_target:
        assert evaluated == []
        return
    every = max(1, samples // (per_epoch * gbs))
    assert evaluated == sorted({*range(every, schedule.iterations + 1, every), schedule.iterations})
    fractions = [schedule.epoch_num(i) for i in evaluated]
    assert fractions == pytest.approx([i * gbs / samples for i in evaluated])
    assert 0 < fractions[0] <= fractions[-1] <= 1


def test_fewer_iterations_than_an_epoch():
    schedule = plan_schedule(config(iterations=17, local_batch_size=10), 2000, 2)
    assert schedule.iterations == 17
    assert schedule.evaluate_every == 5
    assert [i for i in range(1, 18) if schedule.evaluates_after(i)] == [5, 10, 15, 17]
    assert schedule.epoch_num(17) == 0.17


def test_random_batches_have_no_epoch():
    this = config(data=DataConfig(), iterations=10**6, target_auc=None)
    schedule = plan_schedule(this, None, 2)
    assert (schedule.iterations, schedule.evaluate_every) == (10**6, None)
    assert [schedule.epoch_num(i) for i in (0, 250_000, 10**6)] == [0, 0.25, 1]  # of what is planned
    assert not schedule.evaluates_after(10**6)


def test_errors_name_the_flag():
    with pytest.raises(ValueError, match=r"--local-batch-size 512 on 4 rank.*exceeds the 2047 training samples"):
        plan_schedule(config(), 2047, 4)
    with pytest.raises(ValueError, match=r"--iterations 4 exceeds one epoch, 3 global batches of 1024"):
        plan_schedule(config(iterations=4), 3 * 1024 + 1023, 2)
    plan_schedule(config(iterations=3), 3 * 1024, 2)
    with pytest.raises(ValueError, match=r"--warmup-iterations 3 leaves nothing to time of 3 iterations"):
        plan_schedule(replace(preset("smoke"), warmup_iterations=3), 3 * 1024, 2)


def test_a_run_by_time_looks_at_the_clock_in_its_warm_up_and_then_knows() -> None:
    """25 iterations of 10 ms after slow ones: 10 s are 1000 more, after 25 of warm-up, and 5 % for luck."""
    timed_alone = replace(preset("launch-bound"), warmup_iterations=50, warmup_time=None)
    this = plan_schedule(timed_alone, None, world_size=2)
    assert (this.iterations, this.min_time_s) == (25, 10.0)
    warming = np.r_[np.full(12, 900.0), np.full(13, 10.0)]
    assert this.lacking(warming, warmup=50) == 25 + 1050
    timed = np.full(1075 + 25, 10.0)
    assert this.lacking(timed, warmup=50) == 0
    slower = np.r_[np.full(50, 10.0), np.full(500, 12.0)]  # than it looked: 4 s lack
    assert this.lacking(slower, warmup=50) == 350


def test_a_warm_up_by_time_ends_at_the_first_iteration_behind_it() -> None:
    """2 s of 10 ms are 200 iterations, and as many as are configured at least; of these alone, no time is taken off."""
    this = plan_schedule(replace(preset("launch-bound"), warmup_iterations=50), None, world_size=2)
    assert this.warmup_time_s == 2.0
    assert this.warmup_of(np.full(1000, 10.0), 50) == 200
    assert this.warmup_of(np.full(1000, 100.0), 50) == 50
    assert this.warmup_of(np.full(30, 10.0), 50) > 30
    assert this.lacking(np.full(25, 10.0), warmup=50) == 175 + 1050
    assert this.lacking(np.full(25 + 1225, 10.0), warmup=50) == 0
    assert this.lacking(np.full(1150, 10.0), warmup=50) == math.ceil(1.05 * 50)  # 9.5 s of it are timed
    assert this.lacking(np.full(25, 100.0), warmup=50) == 25 + 105  # 50 iterations take longer than 2 s
    in_iterations = plan_schedule(replace(preset("launch-bound"), iterations=300), None, world_size=2)
    assert in_iterations.warmup_of(np.full(300, 1.0), 50) == 50


def test_a_run_that_is_not_steady_goes_on_for_half_as_long_again() -> None:
    changes = {"target_auc": None, "data": DataConfig(), "min_time": 1.0}
    this = plan_schedule(config(**changes, max_time=2.0), None, world_size=2)
    settles = np.r_[np.full(50, 12.0), np.full(50, 10.0)]  # 1.1 s, of which the first half is slower
    assert this.lacking(settles, warmup=0) == math.ceil(1.05 * 55)
    assert this.lacking(np.r_[settles, np.full(58, 10.0)], warmup=0) == math.ceil(1.05 * 32)  # 1.68 s: 0.32 to the most
    assert this.lacking(np.r_[settles, np.full(92, 10.0)], warmup=0) == 0  # not steady, but 2 s have passed
    assert this.lacking(np.full(100, 10.0), warmup=0) == 0
    assert this.lacking(np.full(20, 50.0), warmup=0) == 11  # too short to know
    assert plan_schedule(config(**changes), None, world_size=2).lacking(settles, warmup=0) == 0


def test_a_run_by_time_ends_with_its_data() -> None:
    timed = config(target_auc=None, min_time=1e6, local_batch_size=10)
    this = plan_schedule(timed, 1000, world_size=2)
    assert this.iterations == 1
    assert this.lacking(np.ones(10), warmup=0) == 40
    assert this.lacking(np.ones(50), warmup=0) == 0
    assert this.epoch_num(50) == 1


def test_a_resumed_run_by_time_takes_its_time_again_within_the_data() -> None:
    timed = replace(config(target_auc=None, min_time=1e6, local_batch_size=10), warmup_iterations=4)
    this = plan_schedule(timed, 1000, world_size=2)
    resumed = this.resumed(30)
    assert (resumed.iterations, resumed.last) == (30 + 2, 50)
    assert resumed.lacking(np.ones(2), warmup=4) == 18
    assert this.resumed(49).iterations == 50
    whole = plan_schedule(config(iterations=10), 1_000_000, world_size=2)
    assert (whole.last, whole.resumed(4).iterations) == (10, 10)


@pytest.mark.parametrize("changes", [{"target_auc": 0.8}, {"target_auc": None, "iterations": 10}])
def test_a_target_and_a_number_of_iterations_come_before_time(changes: dict[str, float | None]) -> None:
    this = plan_schedule(config(min_time=5.0, **changes), 1_000_000, world_size=2)
    assert this.min_time_s is None
    assert this.lacking(np.ones(10), warmup=0) == 0
    assert this.iterations == (changes.get("iterations") or 1_000_000 // this.global_batch_size)


def dlrmv4(**changes: object) -> RunConfig:
    return replace(preset("mlperf-dlrmv4"), **changes)  # type: ignore[arg-type]


def test_dlrmv4_evaluates_on_its_own_grid():
    schedule = plan_schedule(dlrmv4(), 2_290_835_423, 8, epoch_iterations=279_000)
    evaluated = [i for i in range(1, 8000) if schedule.evaluates_after(i)]
    assert evaluated == list(range(7000, 8000, 280))
    assert schedule.iterations == 279_000  # as many as its windows have, and not as many as its samples fill
    assert not schedule.evaluates_after(279_000)  # which is not on the grid
    assert not schedule.evaluates_after(278_999 // 280 * 280 + 1)
    assert schedule.epoch_num(7000) * 2_290_835_423 == pytest.approx(57_344_000)


def test_a_run_that_would_end_before_its_first_evaluation_is_refused():
    with pytest.raises(ValueError, match="the first evaluation is after 7000 iterations, and the run has 6999"):
        plan_schedule(dlrmv4(iterations=6999), 2_290_835_423, 8)
    assert plan_schedule(dlrmv4(iterations=6999, target_auc=None), 2_290_835_423, 8).evaluate_every is None
    assert plan_schedule(dlrmv4(iterations=7000), 2_290_835_423, 8).evaluates_after(7000)


def test_what_ends_a_run_before_its_first_evaluation_is_named():
    for changes, way_out in (
        ({"iterations": 6999}, "leave --iterations out"),
        ({"data": WindowsConfig(train_windows=30)}, "leave --data.train-windows out"),
        (
            {"iterations": 90, "data": WindowsConfig(train_windows=30)},
            "leave --iterations and --data.train-windows out",
        ),
        ({}, "lower --local-batch-size"),
    ):
        with pytest.raises(ValueError, match=f"the first evaluation is after 7000 iterations, .*: {way_out}"):
            plan_schedule(dlrmv4(**changes), 2_290_835_423, 8, epoch_iterations=6999)


def test_a_run_that_would_end_before_its_next_evaluation_is_not_resumed():
    this = Schedule(
        global_batch_size=8,
        iterations=24,
        evaluate_every=5,
        first_evaluation=10,
        evaluates_last=False,
        iterations_per_epoch=100,
    )
    for first in (0, 5, 15, 19):
        assert this.resumed(first).first == first
    for first, following in ((20, 25), (23, 25)):
        with pytest.raises(ValueError, match=f"the next evaluation is after iteration {following}, .* ends after 24"):
            this.resumed(first)
    assert replace(this, evaluates_last=True).resumed(20).first == 20
    assert replace(this, evaluate_every=None).resumed(20).first == 20
