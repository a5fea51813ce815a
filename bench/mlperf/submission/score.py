"""The score of a submission, by MLPerf's rules: minutes, fewer are better.

training_rules.adoc, "Benchmark Results": the fastest and the slowest of ten runs are dropped, and the result is the
mean of the other eight. One run may fail to converge, and counts as the slowest. "Reference Convergence Points": a
closed submission that converged faster than the reference, but within the accepted range, is scaled to the reference's
mean of epochs.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.table import Table

from dlrm_bench.bench.mlperf.published_logs import MLPerfRun
from dlrm_bench.bench.mlperf.submission.checkers import convergence
from dlrm_bench.bench.mlperf.submission.log_sense import senseless
from dlrm_bench.bench.mlperf.submission.package import RUNS, Package, read_run


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The result of one benchmark on one system."""

    package: Package
    runs: list[MLPerfRun]
    olympic_minutes: float | None
    """Mean of the eight runs that count; None if there is no valid result."""
    scaling: float
    """Factor by the reference convergence points; 1 in the open division."""
    mean_epochs: float | None
    """Mean of epochs, or samples, to converge, from the RCP checker; None in the open division."""
    invalid: list[str]
    """Reasons why there is no valid result; empty if there is one."""
    notes: list[str]

    @property
    def minutes(self) -> float | None:
        """The score; None if there is no valid result."""
        return None if self.olympic_minutes is None else self.olympic_minutes * self.scaling


def minutes_of(run: MLPerfRun) -> float:
    """Returns the time to train of a run; infinite if it did not converge."""
    minutes = run.time_to_train_minutes
    return math.inf if minutes is None else minutes


def olympic_mean(minutes: Sequence[float]) -> float:
    """Returns the mean of all minutes except the smallest and the largest; at least three are needed."""
    assert len(minutes) >= 3
    return math.fsum(sorted(minutes)[1:-1]) / (len(minutes) - 2)


def score_package(package: Package, version: str | None = None) -> Score:
    """Computes the score; ValueError if a log cannot be read.

    version: of the ruleset; by default the newest that knows the benchmark.
    """
    ruleset = package.ruleset(version)
    runs = [read_run(log) for log in package.logs()]
    invalid, notes = [], list[str]()
    if len(runs) != RUNS:
        invalid.append(f"{len(runs)} result logs: exactly {RUNS} are needed")
    invalid += [finding.text for log in package.logs() for finding in senseless(log) if finding.fatal]
    failed = [run.path.name for run in runs if math.isinf(minutes_of(run))]
    if len(failed) > 1:
        invalid.append(f"{len(failed)} runs did not converge ({', '.join(failed)}): one may")
    elif failed:
        notes.append(f"{failed[0]} did not converge: it counts as the slowest run, which is dropped")
    scaling, mean_epochs = 1.0, None
    if runs and runs[0].division == "closed" and not invalid:
        verdict, figures = convergence(package, ruleset)
        invalid += [f"RCP: {finding.text}" for finding in verdict.findings if finding.fatal]
        if figures is not None:
            scaling, mean_epochs = figures.scaling, figures.mean_epochs
        notes += _other_scaling(package.results / "scaling.json", scaling)
    elif runs and runs[0].division != "closed":
        notes.append("open division: no reference convergence points, no scaling")
    return Score(
        package=package,
        runs=runs,
        olympic_minutes=None if invalid else olympic_mean([minutes_of(run) for run in runs]),
        scaling=scaling,
        mean_epochs=mean_epochs,
        invalid=invalid,
        notes=notes,
    )


def _other_scaling(path: Path, scaling: float) -> list[str]:
    """Returns a note on the package's own scaling.json, if any, and on the factor that the ruleset gives."""
    if not path.exists():
        return []
    try:
        named = float(json.loads(path.read_text(encoding="utf-8"))["scaling_factor"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} names no scaling_factor ({error!r}): remove it") from error
    if math.isclose(named, scaling, rel_tol=1e-9):
        return [f"scaling.json in the package names the same factor, {named:.6f}"]
    return [f"scaling.json in the package names {named:.6f}; computed, and used here, is {scaling:.6f}"]


def score_table(score: Score) -> Table:
    """Returns a table with a row for each run, fastest first, and whether it counts."""
    title = f"{score.package.folder.name}, {score.package.system}: runs, fastest first"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for column in ("log", "seed", "minutes", "epochs", "AUC", "status", "counts"):
        table.add_column(column, justify="left" if column in ("log", "status", "counts") else "right")
    ordered = sorted(score.runs, key=minutes_of)
    for place, run in enumerate(ordered):
        dropped = "dropped, fastest" if place == 0 else "dropped, slowest" if place == len(ordered) - 1 else "yes"
        table.add_row(
            run.path.name,
            "-" if run.seed is None else str(run.seed),
            "-" if math.isinf(minutes_of(run)) else f"{minutes_of(run):.4f}",
            "-" if run.epoch_num is None else f"{run.epoch_num:.4f}",
            "-" if run.auc is None else f"{run.auc:.5f}",
            run.status,
            dropped if not score.invalid else "-",
        )
    return table
