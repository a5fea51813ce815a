"""Sides, their differences, and the claims that a comparison makes and does not make."""

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlrm_bench.bench.compare.comparison import Result, Terms, compare_all, compare_paths
from dlrm_bench.bench.compare.sides import read_side
from dlrm_bench.bench.compare.tables import (
    result_as_json,
    result_table,
    rungs_table,
    throughput_ratio,
    verdict_in_words,
)
from dlrm_bench.bench.records.own_timings import write_timings
from dlrm_bench.bench.records.record import RUN_JSON, Record, read_record, summarize_latency, write_record
from dlrm_bench.bench.stats.statistics import compare
from tests.bench.compare.two_sides import compare_sides
from tests.bench.ladder.made_ladders import make, pretend_runs
from tests.bench.made_records import H200, WARMUP, configured, recorded_runs, telemetry, write
from tests.bench.mlperf.test_published_logs import LOGS

RUNS = recorded_runs()


def sides(tmp_path: Path, factor: float = 1.0, runs: int = 5, alternate: bool = True, **changes: Any) -> Result:
    """A and B of `runs` recorded runs each, B's times `factor`; changes are B's. alternate: in the order A B B A ...;
    else all of A's come first."""
    for i in range(runs):
        write(tmp_path / "a" / f"run{i}", RUNS[i], minute=2 * i + i % 2 if alternate else i)
        minute = 2 * i + 1 - i % 2 if alternate else runs + i
        write(tmp_path / "b" / f"run{i}", RUNS[runs + i] * factor, minute=minute, **changes)
    return compare_sides(read_side(tmp_path / "a"), read_side(tmp_path / "b"))


def test_a_proven_difference(tmp_path: Path) -> None:
    result = sides(tmp_path, factor=2)
    assert (result.metric, result.verdict) == ("p50", "slower")
    assert result.comparison.paired
    said = re.match(r"B is slower, (0\.\d{4}) times as fast as A \(median; 95 % interval ", verdict_in_words(result))
    assert said
    assert float(said[1]) == pytest.approx(result.speedup.value, abs=1e-4)
    assert result.speedup.value == pytest.approx(1 / result.estimate.ratio().value)
    assert result.differences == []
    finds, varies, *windows = result.notes
    assert all("not steady" in note for note in windows)
    assert re.fullmatch(
        r"5 and 5 runs that differ like these find differences from \d+\.\d+% \(.* to .*, with so few runs\)", finds
    )
    level = r"iterations \d+\.\d\d%, processes \d+\.\d\d%, machines unknown"
    assert re.fullmatch(rf"a run's median varies by level \(standard deviation\): A {level}; B {level}", varies)
    throughput = throughput_ratio(result)
    assert throughput is not None
    assert throughput.high < 1


def test_nothing_proven_is_a_tilde(tmp_path: Path) -> None:
    result = sides(tmp_path)
    assert result.verdict == "no difference proven"
    assert list(result_table(result).columns[-1].cells) == ["~", "", "", "", "", ""]
    assert verdict_in_words(result).startswith("no difference proven; B was ")


def test_one_run_a_side_proves_nothing(tmp_path: Path) -> None:
    result = sides(tmp_path, factor=2, runs=1)
    assert result.verdict == "no difference proven"
    assert "Among these runs alone, B's were slower" in verdict_in_words(result)
    assert any("does not show how much runs" in note for note in result.notes)
    assert result.detectable is None
    assert result.runs_needed(0.02) is None


def test_sides_one_after_the_other_have_no_verdict(tmp_path: Path) -> None:
    """However large the difference; one run a side has too few runs first of all."""
    result = sides(tmp_path, factor=3, alternate=False)
    assert not result.comparison.paired
    assert result.verdict == "no verdict"
    assert verdict_in_words(result).startswith("no verdict, B was 0.")
    assert any("--reference" in note and "--accept-blocked-order" in note for note in result.notes)
    assert next(iter(result_table(result).columns[-1].cells)) == "no verdict"
    a, b = tmp_path / "a", tmp_path / "b"
    (accepted,) = compare_paths([a, b], Terms(accept_blocked_order=True))
    assert accepted.verdict == "slower"
    assert any(note.startswith("--accept-blocked-order: a verdict despite") for note in accepted.notes)


def test_a_reference_takes_out_what_changed_between_two_sittings(tmp_path: Path) -> None:
    """The second day is 40 % slower for all; B is 20 % faster than A, and its reference shows the day."""
    rng = np.random.default_rng(1)
    for day, (name, factor) in enumerate((("a", 1.0), ("b", 1.4 / 1.2))):
        for i in range(6):
            for side, times in ((name, factor), (f"ref_{name}", 1.4**day * 2)):
                minute = 1440 * day + 2 * i + (side != name) * (1 if i % 2 == 0 else -1) + i % 2
                folder = tmp_path / side / f"run{i}"
                git = {"commit": "old" if side != "b" else "new", "dirty": False, "source": side[-1] * (side == "b")}
                write(folder, np.full(250, times * math.exp(rng.normal(0, 0.005))), minute=minute, git=git)
    paths, reference = [tmp_path / "a", tmp_path / "b"], (tmp_path / "ref_a", tmp_path / "ref_b")
    (blind,) = compare_paths(paths, Terms(accept_blocked_order=True))
    assert blind.verdict == "slower"
    (result,) = compare_paths(paths, Terms(reference=reference))
    assert result.confounded == []
    assert result.verdict == "faster"
    assert result.speedup.low < 1.2 < result.speedup.high
    assert result.speedup.high / result.speedup.low < 1.05
    assert any("difference of differences" in note for note in result.notes)
    with pytest.raises(ValueError, match=r"--reference: .* must be runs of one commit and configuration, but differ"):
        compare_paths(paths, Terms(reference=(tmp_path / "ref_a", tmp_path / "b")))
    with pytest.raises(ValueError, match="--reference is for two sides"):
        compare_paths([*paths, tmp_path / "a"], Terms(reference=reference))


def test_one_side_always_first_may_hide_drift(tmp_path: Path) -> None:
    for i in range(4):
        write(tmp_path / "a" / f"run{i}", RUNS[i], minute=2 * i)
        write(tmp_path / "b" / f"run{i}", RUNS[4 + i], minute=2 * i + 1)
    result = compare_sides(read_side(tmp_path / "a"), read_side(tmp_path / "b"))
    assert not result.comparison.paired
    assert any(f"{tmp_path / 'a'} came first in most pairs" in note for note in result.notes)


def test_balanced_pairs_of_the_same_program_under_drift_are_no_difference() -> None:
    """2 % more time from run to run: false alarms in at most one of twenty comparisons; A always first: in most."""
    rng, alarms = np.random.default_rng(0), {"ABBAABBA": 0, "ABABABAB": 0}
    for _ in range(60):
        for order in alarms:
            times = np.exp(0.02 * np.arange(8) + rng.normal(0, 0.002, 8))
            runs = [times[i] * rng.gamma(1e5, 1e-5, 60) for i in range(8)]
            a, b = ([runs[i] for i, side in enumerate(order) if side == which] for which in "AB")
            alarms[order] += compare(a, b, paired=True).estimates["p50"].verdict() != "no difference proven"
    assert alarms["ABBAABBA"] <= 3
    assert alarms["ABABABAB"] > 30


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"machine": {**H200, "gpu": "NVIDIA H100"}}, "GPU differs: NVIDIA H200 in .*, NVIDIA H100 in"),
        ({"machine": {**H200, "driver": "570.0"}}, "driver differs"),
        ({"machine": {**H200, "power_limit_w": 500.0}}, "power limit"),
        ({"machine": {**H200, "sm_clock_max_mhz": 1700}}, "largest SM clock"),
        ({"telemetry": telemetry(clock=1700)}, "SM clock during the run"),
        ({"telemetry": telemetry(throttled=True)}, r"b: throttled \(power cap\) in 2 of 2 runs"),
        ({"pipeline": {"paused_after": [1, WARMUP]}}, "b: the pipeline paused within the timed iterations.* in 2 of 2"),
        ({"git": {"commit": "0123abc", "dirty": True}}, "b: the checkout had uncommitted changes in 2 of 2"),
        ({"config": configured(local_batch_size=256)}, "global batch differs: 1024 in .*, 512 in"),
        ({"config": configured(precision="bf16")}, "precision differs"),
        ({"world_size": 4}, "number of ranks differs: 2 in .*, 4 in"),
    ],
)
def test_what_should_be_equal_and_is_not(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    result = sides(tmp_path, runs=2, **changes)
    assert any(re.search(said, difference) for difference in result.differences), result.differences


def test_pauses_in_the_warm_up_are_no_difference(tmp_path: Path) -> None:
    assert sides(tmp_path, runs=2, pipeline={"paused_after": [0, WARMUP - 1]}).differences == []


def test_clocks_a_little_apart_and_unknown_values_are_no_difference(tmp_path: Path) -> None:
    unknown = {**H200, "driver": None}
    result = sides(tmp_path, runs=2, telemetry=telemetry(clock=1970), machine=unknown)
    assert result.differences == []


def test_a_side_that_is_mixed_says_so(tmp_path: Path) -> None:
    write(tmp_path / "a" / "x", RUNS[0])
    write(tmp_path / "a" / "y", RUNS[1], config=configured(precision="bf16"))
    side = read_side(tmp_path / "a")
    result = compare_sides(side, side)
    assert any("precision varies within" in difference for difference in result.differences)
    assert any(difference.startswith("2 runs are on both sides") for difference in result.differences)


def test_mlperf_logs_give_a_mean(tmp_path: Path) -> None:
    logs = read_side(LOGS)
    assert logs.metrics() == {"mean": pytest.approx(3.25, abs=0.005)}
    assert read_side(LOGS / "result_1.txt").metrics()["mean"] == pytest.approx(3.243, abs=0.001)
    for i in range(6):
        write(tmp_path / "a" / f"run{i}", RUNS[i], minute=i)
    result = compare_sides(logs, read_side(tmp_path / "a"))
    assert (result.metric, result.verdict) == ("mean", "no verdict")
    assert result.confounded == [f"{LOGS} states neither when its runs ran nor on which machine"]
    (accepted,) = compare_paths([LOGS, tmp_path / "a"], Terms(accept_blocked_order=True))
    assert accepted.verdict == "slower"
    assert result_table(result).row_count == 2
    assert any("an MLPerf log has the mean" in note for note in result.notes)
    assert any("global batch differs: 55296" in difference for difference in result.differences)


def test_a_record_and_a_log_are_compared_by_the_clock(tmp_path: Path) -> None:
    """Two ranks that are slow in turn: the mean of the slowest rank is 3 ms, and 2 ms pass by the clock."""
    for i in range(2):
        times = np.array([[1.0, 3.0] * 50, [3.0, 1.0] * 50]) * (1 + 0.001 * i)
        write_timings(tmp_path / "a" / str(i), times, name="x", samples=55296)
    (result,) = compare_paths([LOGS, tmp_path / "a"], Terms(accept_blocked_order=True))
    assert not result.per_sample
    assert result.estimate.ratio().value == pytest.approx(2.001 / 3.25, abs=0.002)
    assert result.estimate == result.clock == result.comparison.estimates["mean"]
    rows = result_table(result)
    assert [*rows.columns[0].cells] == ["by clock", "samples / s"]
    assert next(iter(rows.columns[2].cells)) == "2.001"
    assert [*rows.columns[5].cells] == ["faster", ""]


def test_one_mlperf_log_a_side_has_no_interval(tmp_path: Path) -> None:
    result = compare_sides(read_side(LOGS / "result_0.txt"), read_side(LOGS / "result_1.txt"))
    assert math.isnan(result.speedup.low)
    as_json = json.loads(json.dumps(result_as_json(result), allow_nan=False))
    assert as_json["times_as_fast"]["mean"] == {"value": pytest.approx(1 / 0.9935, abs=1e-3), "low": None, "high": None}
    assert "unknown" in list(result_table(result).columns[4].cells)
    assert re.fullmatch(
        r"no difference proven: too few runs \(B: 1\.00\d+ times as fast as A, by clock; interval unknown\)",
        verdict_in_words(result),
    )


def test_across_batch_sizes_the_verdict_is_about_samples_per_second(tmp_path: Path) -> None:
    """Half of the batch in 90 % of the time: a faster iteration, and fewer samples per second."""
    result = sides(tmp_path, factor=0.9, config=configured(local_batch_size=256))
    assert result.per_sample
    assert (result.metric, result.verdict) == ("mean", "slower")
    assert result.clock is not None
    assert result.estimate.ratio().value == pytest.approx(2 * result.clock.ratio().value)
    assert result.clock.ratio().value < 1
    said = re.fullmatch(
        r"B is slower, (.*) times as fast as A \(samples per second; 95 % interval (.*) to (.*)\)",
        verdict_in_words(result),
    )
    assert said
    value, low, high = map(float, said.groups())
    assert low < value < high < 1
    assert value == pytest.approx(throughput_ratio(result).value, abs=1e-4)  # type: ignore[union-attr]
    rows = list(zip(*(column.cells for column in result_table(result).columns), strict=True))
    assert [row[-1] for row in rows] == ["", "", "", "", "", "slower"]
    assert any("the verdict is about samples per second" in note for note in result.notes)


def test_samples_a_second_are_batches_over_elapsed_time(tmp_path: Path) -> None:
    """With two ranks that are slow in turn, A's iterations have a slowest rank of 3 ms, and 2 ms pass for each."""
    for i in range(4):
        for name, times in (("a", [[1, 3], [3, 1]]), ("b", [[2, 2], [2, 2]])):
            ms = np.tile(np.array(times, np.float32), 60) * (1 + 0.01 * i)
            minute = 2 * i + (i + (name == "b")) % 2
            write(tmp_path / name / str(i), ms[0], minute=minute, config=configured(warmup_iterations=0))
            folder = tmp_path / name / str(i)
            record = build_like(read_record(folder), ms)
            (folder / RUN_JSON).unlink()
            write_record(folder, record, ms, np.ones(ms.shape[1]))
    result = compare_sides(read_side(tmp_path / "a"), read_side(tmp_path / "b"))
    assert result.comparison.ratios["mean"].value == pytest.approx(2 / 3)
    throughput = throughput_ratio(result)
    assert throughput is not None
    assert throughput.value == pytest.approx(1)
    rows = {row[0]: row for row in zip(*(column.cells for column in result_table(result).columns), strict=True)}
    assert rows["by clock"][1:4] == ("2.030", "2.030", "1.0000 x")
    assert rows["samples / s"][1] == rows["samples / s"][2]
    assert result_as_json(result)["a"]["by_clock_ms"] == pytest.approx(2 * 1.015, rel=1e-3)


def build_like(record: Record, ms: np.ndarray) -> Any:
    """The same run with other times."""
    summary = summarize_latency(ms, 0)
    return {**record.run, "warmup_iterations": 0, "latency_ms": summary, "samples_per_second": None}


def pairs(tmp_path: Path, factors: list[float]) -> list[tuple[str, Any, Any]]:
    """Comparisons of six runs each with A's, of hardly any noise but 1 % between runs."""
    random = np.random.default_rng(0)
    made = []
    for i, factor in enumerate([1.0, *factors]):
        for run in range(6):
            times = RUNS[run] / np.median(RUNS[run]) * factor * math.exp(random.normal(0, 0.01))
            minute = 11 * run + (i if run % 2 == 0 else len(factors) - i)
            write(tmp_path / f"side{i}" / f"run{run}", np.full(250, np.median(times)), minute=minute)
        made.append(read_side(tmp_path / f"side{i}"))
    return [(side.label, made[0], side) for side in made[1:]]


def test_many_comparisons_are_corrected_for(tmp_path: Path) -> None:
    """A loss that would be proven by itself is not where ten were looked at; a large one still is."""
    alone = pairs(tmp_path, [1.015, *[1.0] * 8, 1.5])
    (one,) = compare_all(alone[:1])
    many = compare_all(alone)
    assert one.verdict == "slower"
    assert 0.005 < one.p_value < 0.05 < many[0].p_value < 1
    assert [result.verdict for result in many] == ["no difference proven"] * 9 + ["slower"]
    assert "10 comparisons were made" in verdict_in_words(many[0])
    assert next(iter(result_table(many[0]).columns[-1].cells)) == "~"
    assert one.detectable is not None
    assert many[0].detectable is not None
    assert one.detectable[1] < many[0].detectable[1]


def test_two_ladders_are_compared_rung_by_rung(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("x", "y"):
        pretend_runs(monkeypatch)
        (tmp_path / name).mkdir()
        make(tmp_path / name, rounds=3)
    results = compare_paths([tmp_path / "x", tmp_path / "y"])
    assert [result.name for result in results] == ["a", "b", "c"]
    assert all(result.speedup.value == 1 and result.comparisons == 3 for result in results)
    table = rungs_table(results)
    assert list(table.columns[0].cells) == ["a", "b", "c"]
    assert str(table.title).endswith(f"A = {tmp_path / 'x'}\nB = {tmp_path / 'y'}")
    assert not any("left out" in note for note in results[0].notes)
    ladder = json.loads((tmp_path / "y" / "ladder.json").read_text())
    ladder["rungs"][1]["name"] += "-new"
    (tmp_path / "y" / "ladder.json").write_text(json.dumps(ladder))
    results = compare_paths([tmp_path / "x", tmp_path / "y"])
    assert [result.name for result in results] == ["a", "c"]
    assert results[0].notes[-1] == "rungs that only one of the ladders has are left out: b, b-new"
    for rung in ladder["rungs"]:
        rung["name"] = rung["name"].removesuffix("-new") + "-new"
    (tmp_path / "y" / "ladder.json").write_text(json.dumps(ladder))
    with pytest.raises(ValueError, match=r"have no rung in common \(a, b, c; a-new"):
        compare_paths([tmp_path / "x", tmp_path / "y"])
    (rung,) = compare_paths([tmp_path / "x" / "b", tmp_path / "y" / "b-new"])
    assert rung.comparison.runs == (3, 3)
    with pytest.raises(ValueError, match=r"x is a ladder, which compares only with another ladder"):
        compare_paths([tmp_path / "x", tmp_path / "y" / "b-new"])


def test_rungs_of_a_ladder_that_ran_until_it_found_something_are_compared_at_97_percent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such rounds stop when their spread happens to look small: at 95 % compare was wrong in 5.5 to 7.4 %."""
    pretend_runs(monkeypatch)
    make(tmp_path, rounds=3)
    (fixed,) = compare_paths([tmp_path / "a", tmp_path / "b"])
    ladder = json.loads((tmp_path / "ladder.json").read_text())
    (tmp_path / "ladder.json").write_text(json.dumps(ladder | {"detect": 0.02}))
    (result,) = compare_paths([tmp_path / "a", tmp_path / "b"])
    assert (fixed.confidence, result.confidence) == (0.95, 0.97)
    assert result.speedup.low < fixed.speedup.low
    assert "97 % interval" in verdict_in_words(result)
    assert result_table(result).columns[4].header == "97 % interval"
    assert result_as_json(result)["confidence"] == 0.97


def test_runs_that_were_not_steady_are_named(tmp_path: Path) -> None:
    write(tmp_path / "x", np.linspace(1, 2, 250))
    write(tmp_path / "y", np.full(250, 1.0))
    (result,) = compare_paths([tmp_path / "y", tmp_path / "x"])
    (note,) = [note for note in result.notes if "not steady" in note]
    assert "x: 1 of 1 runs were not steady" in note
    assert "the median changed by up to +" in note


def test_runs_that_agree_by_luck_are_named(tmp_path: Path) -> None:
    """Noisy iterations, and medians that are nearly equal all the same."""
    noise = np.random.default_rng(0).gamma(2, 1, 250)
    for i, side in enumerate("abbaab"):
        write(tmp_path / side / f"run{i}", noise * (1 if side == "a" else 1.001) * (1 + i * 1e-6), minute=i)
    (result,) = compare_paths([tmp_path / "a", tmp_path / "b"])
    assert any("runs agree better (0.00%) than their own iterations" in note for note in result.notes)


def test_runs_on_several_machines(tmp_path: Path) -> None:
    result = sides(tmp_path, machine={**H200, "gpu_uuids": ["another"]})
    assert any("runs on 2 machines" in note for note in result.notes)
