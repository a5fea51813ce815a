"""Ladders: their order, what a run that fails leaves, and the profiled runs. Real ones run in test_cli.py."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlrm_bench.bench.analysis.ladder import ladder_host_table
from dlrm_bench.bench.ladder import run_ladder as module
from dlrm_bench.bench.ladder.run_ladder import draw_order
from dlrm_bench.bench.records.ladder import Ladder, read_ladder
from dlrm_bench.dlrm.command_line import FailedError
from tests.bench.ladder.made_ladders import RUNGS, make, pretend_runs
from tests.bench.made_records import recorded_runs, write


def cells(ladder: Ladder, columns: slice) -> list[tuple[str, ...]]:
    table = ladder_host_table(ladder)
    assert table is not None
    return [tuple(map(str, row))[columns] for row in zip(*(column.cells for column in table.columns), strict=True)]


def test_every_round_runs_every_rung_once_in_a_drawn_order() -> None:
    order = draw_order(RUNGS, 20, seed=0)
    rounds = [[rung.name for r, rung in order if r == round_number] for round_number in range(20)]
    assert all(sorted(names) == ["a", "b", "c"] for names in rounds)
    assert len({tuple(names) for names in rounds}) > 3
    assert all(backwards == forwards[::-1] for forwards, backwards in zip(rounds[::2], rounds[1::2], strict=True))
    assert [r for r, _ in order] == sorted(r for r, _ in order)
    assert order == draw_order(RUNGS, 20, seed=0) != draw_order(RUNGS, 20, seed=1)


def test_profiled_runs_follow_all_that_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = pretend_runs(monkeypatch)
    assert make(tmp_path, rounds=2, host=True) == ended
    assert ended[6:] == ["host-a", "host-b", "host-c"]
    assert not any(run_id.startswith("host") for run_id in ended[:6])
    ladder, _ = read_ladder(tmp_path)
    assert ladder["order"] == ended[:6]
    assert ladder["rungs"][1]["host"] == {
        "record": "host-b",
        "cpu_ms": 12,
        "wall_ms": 12,
        "kernel_launches": 12,
        "graph_launches": 12,
        "stream_syncs": 12,
        "d2h_copies": 12,
        "gpu_idle_fraction": 0.875,
    }
    assert [rung["note"] for rung in ladder["rungs"]] == ["Nothing.", "", ""]
    assert cells(ladder, slice(7))[0] == ("a", "12.000", "12", "12", "12", "12", "88%")


def test_a_profiled_run_that_fails_loses_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_runs(monkeypatch, failing_profiles="b")
    make(tmp_path, rounds=2, host=True)
    ladder, members = read_ladder(tmp_path)
    assert len(members["b"]) == 2
    assert ladder["rungs"][1]["host"] is None
    assert cells(ladder, slice(1, 7)) == [
        *cells(ladder, slice(1, 7))[:1],
        ("missing",) * 6,
        *cells(ladder, slice(1, 7))[2:],
    ]
    assert "missing" not in cells(ladder, slice(1, 7))[2]


def test_a_member_that_ends_within_its_warm_up_ends_the_ladder_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    def pretend(flags: list[str], *_: Any) -> None:
        run_id = flags[flags.index("--run-id") + 1]
        ran.append(run_id)
        write(tmp_path / run_id, recorded_runs()[0] if len(ran) < 3 else np.empty(0))

    monkeypatch.setattr(module, "run_forked", pretend)
    with pytest.raises(
        ValueError, match=r"after 10 iterations, within its warm-up: lower --warmup-iterations"
    ) as caught:
        make(tmp_path)
    assert len(ran) == 3
    assert str(caught.value).startswith(str(tmp_path / ran[2]))
    assert caught.value.__notes__ == [f"finished before, and kept in {tmp_path}: {ran[0]}, {ran[1]}"]


@pytest.mark.parametrize("ending", [FailedError("dead"), KeyboardInterrupt(), SystemExit(143)])
def test_what_ends_a_ladder_names_what_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: BaseException
) -> None:
    def pretend(flags: list[str], *_: Any) -> None:
        if any(tmp_path.iterdir()):
            raise ending
        write(tmp_path / flags[flags.index("--run-id") + 1], recorded_runs()[0])

    monkeypatch.setattr(module, "run_forked", pretend)
    with pytest.raises(type(ending)):
        make(tmp_path)
    (kept,) = tmp_path.iterdir()
    assert ending.__notes__ == [f"finished before, and kept in {tmp_path}: {kept.name}"]
