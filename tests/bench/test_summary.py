"""The output at the end of a run, and the exit status."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from dlrm_bench.bench import summary
from dlrm_bench.bench.machine.description import describe_machine
from dlrm_bench.bench.mlperf.log import ComplianceVerdict
from dlrm_bench.bench.presets import preset
from dlrm_bench.bench.records.record import build_record
from dlrm_bench.bench.records.schema import Checkpointing, Git, ResumedFrom, TakenSnapshot, Training
from dlrm_bench.bench.run import Outcome
from dlrm_bench.bench.summary import EXIT_NOT_COMPLIANT, EXIT_TARGET_MISSED, print_summary
from dlrm_bench.dlrm.runtime.ranks import Ranks
from tests.bench.made_records import trained
from tests.launched import fork, wait

REACHED = trained(status="success", epoch_num=0.75, auc=0.80281, target=0.80275, best_auc=0.81)
MISSED: Training = {**REACHED, "status": "aborted", "epoch_num": 0.999, "auc": 0.80211}
NO_TARGET = trained()


def outcome(training: Training, iterations: int = 300) -> Outcome:
    record = build_record(
        run_id="20261121T004512Z-8xh200-mlperf-dcnv2",
        created=datetime(2026, 11, 21, tzinfo=UTC),
        command="torchrun launch/dlrm.py",
        git=Git(commit="0123abc", dirty=False),
        config=preset("mlperf-dcnv2"),
        world_size=8,
        machine=describe_machine(),
        iterations_ms=np.linspace(2, 1234.5678, 8 * iterations, dtype=np.float32).reshape(iterations, 8).T,
        training=training,
        pipeline={},
    )
    return Outcome(folder=Path("results") / record["id"], record=record)


def printed(capsys: pytest.CaptureFixture[str], what: Outcome) -> tuple[int, str]:
    status = summary._print(what)
    return status, capsys.readouterr().out


@pytest.fixture(autouse=True)
def compliant(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    answer = {"passed": True, "output": "the checker's [bold]text"}
    monkeypatch.setattr(summary, "check_compliance", lambda path, ruleset, of_data: ComplianceVerdict(**answer))
    return answer


def test_the_rate_of_evaluations_is_that_of_the_median(capsys):
    training: Training = {**REACHED, "evaluations": {"samples": 2_058_204, "seconds": [85.0, 84.0, 100.0]}}
    _, text = printed(capsys, outcome(training))
    assert "evaluations  3 of 2,058,204 samples, 85.000 s each (median): 24,214 samples/s" in text
    _, text = printed(capsys, outcome(REACHED))
    assert "evaluations" not in text


def test_a_run_that_was_not_steady_says_so(capsys):
    _, text = printed(capsys, outcome(NO_TARGET))  # its iterations become slower and slower
    assert "not steady   between two eighths of the timed iterations the median changed by +" in text
    _, text = printed(capsys, outcome(NO_TARGET, iterations=60))
    assert "too short" in text


def test_target_reached(capsys):
    status, text = printed(capsys, outcome(REACHED))
    assert status == 0
    assert "AUC          0.80281, target 0.80275 reached after 0.750 epochs; best of any model 0.81000" in text
    assert "compliance   SUCCESS" in text
    assert "finished" not in text
    assert f"record       {Path('results/20261121T004512Z-8xh200-mlperf-dcnv2')}" in text


def test_a_resumed_run_says_from_where(capsys):
    what = outcome(REACHED)
    resumed = ResumedFrom(run_id="[bold]first", iteration=1000, samples=55_296_000, read_s=12.5)
    what.record["checkpoints"] = Checkpointing(saved=[], resumed=resumed)
    _, text = printed(capsys, what)
    assert "resumed from [bold]first, after iteration 1,000 (55,296,000 samples)" in text
    del resumed["samples"]  # of an older record
    _, text = printed(capsys, what)
    assert "resumed from [bold]first, after iteration 1,000\n" in text
    what.record["checkpoints"] = None
    assert "resumed" not in printed(capsys, what)[1]


def test_snapshots_are_counted_with_their_pauses(capsys):
    what = outcome(REACHED)
    taken = [TakenSnapshot(iteration=i, gb=209.24, paused_s=paused) for i, paused in ((10, 2.51), (20, 2.3), (30, 2.4))]
    what.record["checkpoints"] = Checkpointing(saved=[], resumed=None, snapshots=taken, left_out=0)
    _, text = printed(capsys, what)
    assert "snapshots    3 of 209 GB in memory; training paused for 2.3 to 2.51 s\n" in text
    what.record["checkpoints"]["left_out"] = 2
    assert "2 more were due while the only one was not yet on disk" in " ".join(printed(capsys, what)[1].split())


def test_rows_of_two_tiers_are_counted_and_batches_that_repeat_are_said(capsys):
    what = outcome(NO_TARGET)
    what.record["pipeline"] = {"table_tiers": [{"batches": 30, "moved": 60_000, "in_place": 30}] * 2}
    assert "a batch had 4,000 rows brought from host memory, and used 2 there\n" in printed(capsys, what)[1]
    fixed = {"batches": 30, "moved": 60_000, "in_place": 30, "fixed_host_rows": 5000}
    what.record["pipeline"] = {"table_tiers": [fixed] * 2}
    text = " ".join(printed(capsys, what)[1].split())
    assert "and used 2 there, besides those of 10,000 that always stay there" in text
    what.record["pipeline"] = {"table_tiers": [{"batches": 300, "moved": 60_000, "in_place": 30}]}
    text = " ".join(printed(capsys, what)[1].split())
    assert "the 32 random batches repeat, and rows then stay: raise --data.random-batches" in text


def test_rows_that_were_made_and_that_lost_their_places_are_counted(capsys):
    what = outcome(NO_TARGET)
    full = {"places": 1200, "used": 1100, "made": 1150, "evicted": 0, "returned": 0}
    what.record["pipeline"] = {"dynamic_rows": [full, full | {"used": 1200, "made": 9000}]}
    said = " ".join(printed(capsys, what)[1].split())
    assert "dynamic rows 10,150 made; the fullest rank uses 1,200 of 1,200 places" in said
    what.record["pipeline"] = {"dynamic_rows": [full, full | {"evicted": 4000, "returned": 30}]}
    said = " ".join(printed(capsys, what)[1].split())
    assert "2,300 made, 4,000 lost their places, of which 30 were named again; the fullest rank uses 1,100" in said


def test_target_missed(capsys):
    status, text = printed(capsys, outcome(MISSED))
    assert status == EXIT_TARGET_MISSED == 3
    assert "0.80211, target 0.80275 missed after 0.999 epochs" in text


def test_a_run_that_ended_before_its_next_evaluation(capsys):
    status, text = printed(capsys, outcome({**MISSED, "auc": None}))
    assert status == EXIT_TARGET_MISSED
    assert "AUC          none, as no evaluation was due, target 0.80275 missed" in text


def test_a_log_that_the_checker_refuses(capsys, compliant):
    compliant["passed"] = False
    status, text = printed(capsys, outcome(REACHED))
    assert status == EXIT_NOT_COMPLIANT == 4
    assert "compliance   FAILURE" in text
    assert "the checker's [bold]text" in text
    assert printed(capsys, outcome(MISSED))[0] == EXIT_TARGET_MISSED


def test_a_run_without_a_target_is_finished_and_not_failed(capsys):
    status, text = printed(capsys, outcome(NO_TARGET))
    assert status == 0
    assert "finished     all iterations; no target AUC was set" in text
    assert "missed" not in text
    assert "compliance" not in text


def test_the_table_shows_every_figure_in_full(capsys):
    what = outcome(NO_TARGET)
    latency = what.record["latency_ms"]
    assert latency is not None
    _, text = printed(capsys, what)
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    figures = [latency["n"], *(f"{latency[name]:.3f}" for name in ("p50", "p90", "p99", "mean"))]  # type: ignore[literal-required]
    for figure in (*figures, *(f"{end:.3f}" for end in latency["ci95"]), f"{what.record['samples_per_second']:,.0f}"):
        assert str(figure) in text


def test_a_run_that_ends_within_its_warmup(capsys):
    status, text = printed(capsys, outcome(REACHED, iterations=50))
    assert status == 0
    assert "no latency: the run ended within its 50 warm-up iterations" in text


def print_on(what: Outcome) -> int:
    ranks = Ranks.from_environment()
    ranks.init_process_group()
    status = print_summary(what, ranks)
    dist.barrier()
    return status


def test_all_ranks_leave_with_the_same_status_and_only_rank_0_prints(tmp_path):
    no_target = wait(fork(2, tmp_path, print_on, outcome(NO_TARGET)), tmp_path)
    assert no_target.statuses == [0, 0]
    assert "samples/s" in no_target.outputs[0]
    assert no_target.outputs[1] == ""
