"""Says what stops a command, in one line where its user can mend it."""

import os
import sys
import traceback
from collections.abc import Callable

from dlrm_bench.dlrm.command_line import EXIT_BAD_INPUT, EXIT_FAILED, printable

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


def _in_one_line(error: Exception) -> str | None:
    """What its user can mend; None for everything else."""
    if isinstance(error, ModuleNotFoundError):
        return what_to_install(error)
    if isinstance(error, OSError) and isinstance(error.filename, str | bytes):
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    # torch.OutOfMemoryError and the host's, without an import of torch.
    if type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error):
        return f"out of memory: {str(error).splitlines()[0]}: lower --local-batch-size or --model.table-scale"
    return None


def guarded(work: Callable[[], int]) -> int:
    """Runs `work` on a rank and returns its exit status; prints what went wrong, and on which rank."""
    where = f"rank {os.environ.get('RANK', '-')}"
    try:
        return work()
    except ValueError as error:
        print(f"{where}: error: {printable(str(error))}", file=sys.stderr, flush=True)
        return EXIT_BAD_INPUT
    except Exception as error:
        known = _in_one_line(error)
        if known is not None:
            print(f"{where}: error: {printable(known)}", file=sys.stderr, flush=True)
            return EXIT_BAD_INPUT
        print(f"{where} failed:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        return EXIT_FAILED
