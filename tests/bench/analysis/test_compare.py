"""Sides, what makes them unlike, and what a comparison says and does not say."""

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlrm_bench.bench.analysis.compare import (
    Result,
    compare_sides,
    read_side,
    result_as_json,
    result_table,
    throughput_ratio,
    verdict_in_words,
)
from dlrm_bench.bench.records.statistics import METRICS, compare
from tests.bench.analysis.test_mlperf_logs import LOGS, small_log
from tests.bench.made_records import H200, configured, edit, profile, recorded_runs, telemetry, write

RUNS = recorded_runs()


def sides(tmp_path: Path, factor: float = 1.0, runs: int = 5, alternate: bool = False, **changes: Any) -> Result:
    """A and B of `runs` recorded runs each, B's times `factor`; changes are B's. alternate: in the order A B B A ..."""
    for i in range(runs):
        write(tmp_path / "a" / f"run{i}", RUNS[i], minute=2 * i + i % 2 if alternate else i)
        minute = 2 * i + 1 - i % 2 if alternate else runs + i
        write(tmp_path / "b" / f"run{i}", RUNS[runs + i] * factor, minute=minute, **changes)
    return compare_sides(read_side(tmp_path / "a"), read_side(tmp_path / "b"))


def test_a_proven_difference(tmp_path: Path) -> None:
    result = sides(tmp_path, factor=2, alternate=True)
    assert (result.metric, result.verdict) == ("p50", "slower")
    assert result.comparison.paired
    assert result.regressed(0.02)
    assert not result.regressed(9.0)
    assert verdict_in_words(result).startswith("B is slower (median, ")
    assert result.differences == []
    assert len(result.notes) == 1
    assert re.fullmatch(r"5 and 5 runs that differ like these find differences from \d+\.\d+% on", result.notes[0])
    throughput = throughput_ratio(result)
    assert throughput is not None
    assert throughput.high < 1


def test_nothing_proven_is_a_tilde(tmp_path: Path) -> None:
    result = sides(tmp_path)
    assert result.verdict == "no difference proven"
    assert not result.regressed(0.0)
    assert list(result_table(result).columns[-1].cells) == ["~"] * 5
    assert verdict_in_words(result).startswith("no difference proven (median, ")


def test_the_table_shows_all_metrics(tmp_path: Path) -> None:
    result = sides(tmp_path, factor=0.5)
    rows = list(zip(*(column.cells for column in result_table(result).columns), strict=True))
    assert [row[0] for row in rows] == ["median", "p90", "p99", "mean", "samples / s"]
    assert [row[-1] for row in rows] == ["faster"] * 5
    assert rows[0][1] == f"{np.exp(np.mean([np.log(np.median(run)) for run in RUNS[:5]])):.3f}"


def test_one_run_a_side_proves_nothing(tmp_path: Path) -> None:
    result = sides(tmp_path, factor=2, runs=1)
    assert result.verdict == "no difference proven"
    assert "Of these runs alone, B's were slower" in verdict_in_words(result)
    assert any("it cannot be known how much runs" in note for note in result.notes)
    with pytest.raises(ValueError, match="--fail-on needs at least two runs on each side, not 1 of"):
        result.regressed(0.02)


def test_sides_one_after_the_other_may_hide_drift(tmp_path: Path) -> None:
    result = sides(tmp_path)
    assert not result.comparison.paired
    assert any("a drift of the machine would look like a difference" in note for note in result.notes)


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
            alarms[order] += compare(a, b, paired=True).ratios["p50"].verdict != "no difference proven"
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
        ({"git": {"commit": "0123abc", "dirty": True}}, "b: source tree differed from its commit in 2 of 2 runs"),
        ({"config": configured(local_batch_size=256)}, "global batch differs: 1024 in .*, 512 in"),
        ({"config": configured(precision="bf16")}, "precision differs"),
        ({"world_size": 4}, "ranks differs: 2 in .*, 4 in"),
    ],
)
def test_what_should_be_equal_and_is_not(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    result = sides(tmp_path, runs=2, **changes)
    assert any(re.search(said, difference) for difference in result.differences), result.differences


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


def test_mlperf_logs_give_a_mean(tmp_path: Path) -> None:
    logs = read_side(LOGS)
    assert logs.metrics() == {"mean": pytest.approx(3.25, abs=0.005)}
    assert read_side(LOGS / "result_1.txt").metrics()["mean"] == pytest.approx(3.243, abs=0.001)
    for i in range(6):
        write(tmp_path / "a" / f"run{i}", RUNS[i], minute=i)
    result = compare_sides(logs, read_side(tmp_path / "a"))
    assert (result.metric, result.verdict) == ("mean", "slower")
    assert result_table(result).row_count == 2
    assert any("an MLPerf log gives the mean" in note for note in result.notes)
    assert any("global batch differs: 55296" in difference for difference in result.differences)


def test_one_mlperf_log_a_side_has_no_interval(tmp_path: Path) -> None:
    result = compare_sides(read_side(LOGS / "result_0.txt"), read_side(LOGS / "result_1.txt"))
    assert math.isnan(result.ratio.low)
    as_json = json.loads(json.dumps(result_as_json(result), allow_nan=False))
    assert as_json["ratios"]["mean"] == {"value": pytest.approx(0.9935, abs=1e-3), "low": None, "high": None}
    assert "unknown" in list(result_table(result).columns[4].cells)
    assert re.fullmatch(
        r"no difference proven: too few runs \(mean, 0\.\d+% less time; interval unknown\)", verdict_in_words(result)
    )


def test_logs_that_are_damaged_or_unfinished_say_so(tmp_path: Path) -> None:
    (tmp_path / "result_0.txt").write_text(small_log() + ":::MLLOG {\n")
    (tmp_path / "result_1.txt").write_text(small_log().replace("success", "aborted"))
    side = read_side(tmp_path)
    assert len(side.series) == 2
    assert [text.partition(": ")[2] for text in side.warnings] == ["1 malformed lines", "a run that is aborted"]
    (tmp_path / "cut.txt").write_text("".join(small_log().splitlines(keepends=True)[:6]))
    with pytest.raises(ValueError, match="no run with a run_stop"):
        read_side(tmp_path / "cut.txt")


def test_json_holds_everything(tmp_path: Path) -> None:
    result = result_as_json(sides(tmp_path, factor=2))
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    assert set(result["ratios"]) == set(METRICS)
    assert result["verdict"] == "slower"
    assert result["a"]["runs"] == 5
    assert result["between_run_variance_known"]


def test_profiled_and_unfinished_runs_are_left_out_of_a_folder(tmp_path: Path) -> None:
    write(tmp_path / "a" / "x", RUNS[0])
    write(tmp_path / "a" / "x-host", RUNS[0], profile=profile())
    (tmp_path / "a" / "cut").mkdir()
    (tmp_path / "a" / "cut" / "result_0.txt").touch()
    side = read_side(tmp_path / "a")
    assert len(side.series) == 1
    assert any("unfinished runs left out: cut" in text for text in side.warnings)
    assert any("profiled runs left out: x-host" in text for text in side.warnings)
    with pytest.raises(ValueError, match="x-host is a profiled run"):
        read_side(tmp_path / "a" / "x-host")


def test_what_is_no_side(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="absent does not exist"):
        read_side(tmp_path / "absent")
    with pytest.raises(ValueError, match="holds neither"):
        read_side(tmp_path)
    record = write(tmp_path / "x", RUNS[0])
    edit(record, latency_ms=None, warmup_iterations=260)
    with pytest.raises(ValueError, match="ended within its warm-up"):
        read_side(record)
    edit(record, schema=7)
    with pytest.raises(ValueError, match="schema 7"):
        read_side(tmp_path)
