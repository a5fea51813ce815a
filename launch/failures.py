"""Says what stops a command, in one line where its user can mend it."""

import os
import sys
import traceback
from collections.abc import Callable

from dlrm_bench.dlrm.command_line import EXIT_BAD_INPUT, EXIT_FAILED

_TORCHREC = "pip install '.[torchrec]', or without a GPU what requirements/cpu.txt lists"
_INSTALLATION = {
    "torch": "pip install '.[run]'",
    "mlperf_logging": "pip install '.[run]'",
    "polars": "pip install '.[run]'",
    "torchrec": _TORCHREC,
    "fbgemm_gpu": _TORCHREC,
    "iopath": "pip install iopath",
}
"""How to install what only some commands need, by the name of its import."""


def what_to_install(error: ModuleNotFoundError) -> str | None:
    """One line that names the missing package and the fix; None if it is none of those that only some commands need."""
    package = (error.name or "").partition(".")[0]
    if package not in _INSTALLATION:
        return None
    return f"this needs {package}, which is not installed: in a checkout of dlrm-bench, {_INSTALLATION[package]}"


def guarded(work: Callable[[], int]) -> int:
    """Runs `work` on a rank and returns its exit status; prints what went wrong, and on which rank."""
    where = f"rank {os.environ.get('RANK', '-')}"
    try:
        return work()
    except ValueError as error:
        print(f"{where}: error: {error}", file=sys.stderr, flush=True)
        return EXIT_BAD_INPUT
    except Exception as error:
        missing = what_to_install(error) if isinstance(error, ModuleNotFoundError) else None
        if missing is not None:
            print(f"{where}: error: {missing}", file=sys.stderr, flush=True)
            return EXIT_BAD_INPUT
        print(f"{where} failed:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        return EXIT_FAILED
