"""Helpers of the commands that start runs: ranks, ids, and one run of launch/measure.py."""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from dlrm_bench.bench.forwarded import preset_name
from dlrm_bench.bench.instruments.progress import StillBar, stderr_console
from dlrm_bench.bench.ladder.launching import MEASURE, torchrun
from dlrm_bench.bench.machine.description import gpus_of_node, short_name_of_node
from dlrm_bench.bench.records.record import new_run_id


def processes_of_run(nproc: int | None) -> int:
    """Returns the number of ranks: `nproc`, or one for each GPU, or two without a GPU. ValueError if `nproc` is less
    than one."""
    if nproc is not None and nproc < 1:
        raise ValueError(f"--nproc is {nproc}: at least one process is needed")
    return nproc or gpus_of_node() or 2


def new_id(processes: int, flags: Sequence[str], kind: str) -> str:
    """Returns the id of a record of `kind`, such as 'ladder', for these flags of launch/dlrm.py."""
    return new_run_id(short_name_of_node(processes), f"{preset_name(flags)}-{kind}", datetime.now(UTC))


def measure(what: str, flags: Sequence[str], processes: int, results_dir: Path) -> Path:
    """Runs launch/measure.py and returns the folder that it made, which holds the output too.

    what: 'host', 'nvtx' or 'limits'. FailedError, with the output, if a rank fails.
    """
    run_id = new_id(processes, flags, what)
    results_dir.mkdir(parents=True, exist_ok=True)
    output = results_dir / f"{run_id}.log"
    place = ["--results-dir", str(results_dir), "--run-id", run_id]
    with StillBar(1, f"{what}: output in {output}", stderr_console()) as bar:
        torchrun([what, *flags, *place], processes, output, MEASURE)
        bar.show(1, what)
    output.rename(results_dir / run_id / "output.log")
    return results_dir / run_id
