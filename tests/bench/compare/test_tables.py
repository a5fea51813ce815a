"""Tables and JSON of comparisons; sentences are tested where the verdicts are, in test_compare.py."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from dlrm_bench.bench.compare.tables import result_as_json, result_table
from dlrm_bench.bench.stats.series import METRICS
from tests.bench.compare.test_comparison import RUNS, sides


def test_the_table_shows_all_metrics(tmp_path: Path) -> None:
    result = sides(tmp_path, factor=0.5)
    rows = list(zip(*(column.cells for column in result_table(result).columns), strict=True))
    assert [row[0] for row in rows] == ["median", "p90", "p99", "mean", "by clock", "samples / s"]
    assert [row[-1] for row in rows] == ["faster", "", "", "", "", ""]  # one verdict, in one row
    assert list(result_table(result).columns)[3].header == "times as fast"
    assert rows[0][1] == f"{np.exp(np.mean([np.log(np.median(run)) for run in RUNS[:5]])):.3f}"


def test_json_holds_everything(tmp_path: Path) -> None:
    result = result_as_json(sides(tmp_path, factor=2))
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    assert set(result["times_as_fast"]) == set(METRICS)
    assert result["verdict"] == "slower"
    assert result["times_as_fast"]["p50"]["value"] == pytest.approx(0.5, abs=0.1)
    assert result["times_as_fast"]["p50"]["value"] == pytest.approx(math.exp(-result["estimate"]["log"]))
    assert result["detectable_interval"][0] < result["detectable"] < result["detectable_interval"][1]
    assert (result["confidence"], result["no_verdict_because"]) == (0.95, [])
    assert result["a"]["runs"] == 5
    assert result["between_run_variance_known"]
