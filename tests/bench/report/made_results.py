"""A results folder that holds one of everything a report can show."""

import json
import shutil
from pathlib import Path

import pytest

from dlrm_bench.bench.ladder import run_ladder as ladder_module
from dlrm_bench.bench.ladder.launching import LAUNCHER
from dlrm_bench.bench.ladder.run_ladder import Rounds, make_plan, run_ladder
from dlrm_bench.bench.records.limits import LIMITS_JSON
from dlrm_bench.dlrm.benchmark import Rung
from tests.bench.made_records import profile, recorded_runs, telemetry, write
from tests.bench.mlperf.test_published_logs import LOGS
from tests.bench.records.test_limits import some_limits

RUNS = recorded_runs()


def make_results(results: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes a ladder with profiled runs, timed and profiled runs alone, limits, MLPerf logs and an unfinished run."""
    runs = iter(RUNS)

    def pretend(flags: list[str], processes: int, output: Path, launcher: Path = LAUNCHER) -> None:
        run_id = flags[-1]
        if run_id == "host-same":
            raise ValueError("this profiled run failed")
        known = {"profile": profile()} if run_id.startswith("host-") else {}
        write(results / "ladder" / run_id, next(runs) * (0.5 if run_id.endswith("fast") else 1.0), **known)

    monkeypatch.setattr(ladder_module, "run_forked", pretend)
    (results / "ladder").mkdir(parents=True)
    rungs = (Rung("stock", ()), Rung("fast", (), "Half of the work."), Rung("same", ()))
    plan = make_plan(rungs, Rounds(most=3), processes=2, seed=0, flags=[], command="dlrm-bench ladder", host=True)
    list(run_ladder(plan, results / "ladder"))
    write(results / "timed-1", RUNS[20], telemetry=telemetry(throttled=True))
    write(results / "timed-2", RUNS[21], minute=1)
    write(results / "profiled-<b>", RUNS[22], profile=profile())
    make_limits(results / "limits")
    shutil.copytree(LOGS, results / "mlperf")
    (results / "unfinished").mkdir()
    (results / "unfinished" / "result_0.txt").touch()
    return results


def make_limits(folder: Path, **changes: object) -> Path:
    """A limits record of some_limits()."""
    folder.mkdir(parents=True)
    (folder / LIMITS_JSON).write_text(json.dumps(some_limits(**changes)))
    return folder
