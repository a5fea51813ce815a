"""Runs whose ranks torchrun starts again (--max-restarts), in the same command, after one of them was killed."""

import os
import sys

from dlrm_bench.bench.checkpoints.saved_state import Resumed
from dlrm_bench.bench.config import RunConfig
from dlrm_bench.dlrm.runtime.ranks import RESTARTS, Ranks


def check_restarts(config: RunConfig) -> None:
    """Raises ValueError where torchrun would restart a run that takes snapshots, and the run would not resume them."""
    most = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if most != "0" and config.snapshot.every is not None and not config.resumes_newest:
        raise ValueError(
            f"torchrun --max-restarts {most}: a restarted run goes on from its snapshots with --resume auto: add it"
        )


def restarted(run_id: str | None) -> str | None:
    """Returns the name for the folder of a run that was given one: its ranks' first start has that name itself."""
    return run_id if run_id is None or RESTARTS == "0" else f"{run_id}-restart-{RESTARTS}"


def say_origin(config: RunConfig, resumed: Resumed | None, ranks: Ranks) -> str | None:
    """Returns a line on what --resume auto has found, and prints it on rank 0; None without this flag."""
    if not config.resumes_newest:
        return None
    line = "--resume auto: there is no snapshot or checkpoint yet: training begins"
    if resumed is not None:
        place = "snapshot in memory" if resumed.folder.parent == config.snapshot.folder else "checkpoint"
        line = f"--resume auto: continues from the {place} {resumed.folder}, after iteration {resumed.first:,}"
    if ranks.rank == 0:
        print(line, file=sys.stderr, flush=True)
    return line
