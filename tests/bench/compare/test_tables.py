"""Tables and JSON of comparisons; sentences are tested where the verdicts are, in test_compare.py."""

import json
from pathlib import Path

import numpy as np

from dlrm_bench.bench.compare.tables import result_as_json, result_table
from dlrm_bench.bench.stats.series import METRICS
from tests.bench.compare.test_comparison import RUNS, sides


def test_the_table_shows_all_metrics(tmp_path: Path) -> None:
    result = sides(tmp_path, factor=0.5)
    rows = list(zip(*(column.cells for column in result_table(result).columns), strict=True))
    assert [row[0] for row in rows] == ["median", "p90", "p99", "mean", "samples / s"]
    assert [row[-1] for row in rows] == ["faster"] * 5
    assert rows[0][1] == f"{np.exp(np.mean([np.log(np.median(run)) for run in RUNS[:5]])):.3f}"


def test_json_holds_everything(tmp_path: Path) -> None:
    result = result_as_json(sides(tmp_path, factor=2))
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    assert set(result["ratios"]) == set(METRICS)
    assert result["verdict"] == "slower"
    assert result["a"]["runs"] == 5
    assert result["between_run_variance_known"]
