"""Ladders whose runs never ran: records of recorded runs, for tests of what makes and reads ladders."""

from pathlib import Path
from typing import Any

import pytest

from dlrm_bench.bench.ladder import run_ladder as module
from dlrm_bench.bench.ladder.launching import LAUNCHER, MEASURE
from dlrm_bench.bench.ladder.run_ladder import Rounds, make_plan, run_ladder
from dlrm_bench.bench.records.ladder import Plan
from dlrm_bench.dlrm.benchmark import Rung
from tests.bench.made_records import profile, recorded_runs, write

RUNGS = (Rung("a", ("--precision", "fp32"), "Nothing."), Rung("b", ("--precision", "bf16")), Rung("c", ()))
SPEED = {"a": 1.0, "b": 0.5, "c": 0.5}


def pretend_runs(monkeypatch: pytest.MonkeyPatch, failing_profiles: str = "", **known: Any) -> list[str]:
    """Instead of real runs: records of recorded runs, and of profiled ones; the list of ids of what ran, in order.

    known: values of the timed records.
    """
    runs = iter(recorded_runs())
    ended: list[str] = []

    def pretend(flags: list[str], processes: int, output: Path, launcher: Path = LAUNCHER) -> None:
        run_id, folder = flags[flags.index("--run-id") + 1], Path(flags[flags.index("--results-dir") + 1])
        assert (launcher, flags[0] == "host") == ((MEASURE, True) if run_id.startswith("host-") else (LAUNCHER, False))
        if run_id.startswith("host-"):
            assert "--seed" in flags[1:]
            ended.append(run_id)
            if run_id[-1] in failing_profiles:
                raise ValueError("out of memory")
            write(folder / run_id, recorded_runs()[0], profile=profile())
            return
        assert flags[:2] == ["--seed", "3"]
        assert processes == 2
        write(folder / run_id, next(runs) * SPEED[run_id[-1]], minute=len(ended), **known)
        ended.append(run_id)

    monkeypatch.setattr(module, "run_forked", pretend)
    return ended


def plan(rounds: int = 4, detect: float | None = None, minutes: float | None = None, **others: Any) -> Plan:
    how_many = Rounds(most=rounds, detect=detect, minutes=minutes)
    return make_plan(RUNGS, how_many, processes=2, seed=1, flags=["--seed", "3"], command="cmd", **others)


def make(folder: Path, rounds: int = 4, host: bool = False) -> list[str]:
    return list(run_ladder(plan(rounds, host=host), folder))


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A ladder of three rungs and four rounds, of recorded runs: b takes half of a's time, c as long as b."""
    ended = pretend_runs(monkeypatch)
    assert make(tmp_path) == ended
    return tmp_path
