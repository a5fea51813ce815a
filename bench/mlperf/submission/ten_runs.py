"""Ten runs of one configuration, each with its own seed, in fresh processes one after another."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from dlrm_bench.bench.ladder.launching import run_forked
from dlrm_bench.bench.mlperf.submission.build import FIRST_LOG
from dlrm_bench.bench.mlperf.submission.package import RUNS, read_run
from dlrm_bench.dlrm.runtime.command_line import FailedError


def run_ten(folder: Path, processes: int, first_seed: int, flags: Sequence[str]) -> Iterator[Path]:
    """Runs launch/dlrm.py ten times with these flags; yields the record folder of each, inside `folder`.

    One run may miss the target, as the rules allow; FailedError at the second one, or if a run fails otherwise. A
    finished run of an interrupted call is not repeated.
    """
    missed: list[Path] = []
    for run in range(RUNS):
        record = folder / f"run-{run}"
        if not (record / "run.json").exists():
            _refuse_leftover(record)
            place = ["--seed", str(first_seed + run), "--results-dir", str(folder), "--run-id", record.name]
            try:
                run_forked([*flags, *place], processes, folder / f"{record.name}.log")
            except FailedError:
                if not _missed_target(record):
                    raise
        if _missed_target(record):
            missed.append(record)
        if len(missed) > 1:
            names = " and ".join(path.name for path in missed)
            raise FailedError(f"{names} in {folder} missed the target AUC: only one of a submission's ten may")
        yield record


def _missed_target(record: Path) -> bool:
    """Whether a run finished and missed its target; it then has a record, unlike a run that failed."""
    return (record / "run.json").exists() and read_run(record / FIRST_LOG).status != "success"


def _refuse_leftover(record: Path) -> None:
    if record.exists():
        raise ValueError(f"{record} is left from an interrupted run: remove it, so that the command repeats that run")
