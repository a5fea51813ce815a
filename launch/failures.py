"""Reports the error that stops a command, in one line if its user can fix it."""

import os
import sys
import time
import traceback
from collections.abc import Callable

from dlrm_bench.dlrm.runtime.command_line import (
    EXIT_BAD_INPUT,
    EXIT_FAILED,
    printable,
    told_to_torchrun,
    torchrun_says_errors,
)

_TORCHREC = "pip install '.[torchrec]', or without a GPU what requirements/cpu.txt lists"
_INSTALLATION = {
    "torch": "pip install '.[run]'",
    "mlperf_logging": "pip install '.[run]'",
    "polars": "pip install '.[run]'",
    "torchrec": _TORCHREC,
    "fbgemm_gpu": _TORCHREC,
    "iopath": "pip install iopath",
}
"""Installation of packages that only some commands need, by import name."""

_SAME_ERROR_S = 5.0
"""Seconds that a rank waits for its node's first rank, which usually has the same error, to report it."""


def what_to_install(error: ModuleNotFoundError) -> str | None:
    """Returns a line that names the missing package and the fix; None if the package is not in `_INSTALLATION`."""
    package = (error.name or "").partition(".")[0]
    if package not in _INSTALLATION:
        return None
    return f"this needs {package}, which is not installed: in a checkout of dlrm-bench, {_INSTALLATION[package]}"


def _in_one_line(error: Exception) -> str | None:
    """Returns a one-line message for an error that its user can fix; None for any other error."""
    if isinstance(error, ModuleNotFoundError):
        return what_to_install(error)
    if isinstance(error, OSError) and isinstance(error.filename, str | bytes):
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    # torch.OutOfMemoryError and the host's MemoryError, without importing torch.
    if type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error):
        return f"out of memory: {str(error).splitlines()[0]}: lower --local-batch-size or --model.table-scale"
    return None


def guarded(work: Callable[[], int]) -> int:
    """Runs `work` on a rank and returns its exit status; reports errors with their rank.

    torchrun prints 28 lines below its ranks' output, so an error that the user can fix is passed to torchrun, which
    prints it last. A traceback is printed at once, and torchrun ends with its last line.
    """
    where = f"rank {os.environ['RANK']}" if "RANK" in os.environ else "this process"
    try:
        return work()
    except Exception as error:
        known = str(error) if isinstance(error, ValueError) else _in_one_line(error)
        if known is None:
            print(f"{where} failed:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
            told_to_torchrun(f"{where} failed, see the traceback above: {_last_line(error)}")
            return EXIT_FAILED
    line = f"{where}: error: {printable(known)}" if "RANK" in os.environ else f"error: {printable(known)}"
    if torchrun_says_errors() and os.environ["LOCAL_RANK"] != "0":
        time.sleep(_SAME_ERROR_S)  # torchrun ends this rank in the meantime if rank 0 of the node has failed as well
    if not told_to_torchrun(line):
        # One write: `python -u` prints a line and its end apart, and ranks share the ladder's pipe.
        sys.stderr.write(line + "\n")
        sys.stderr.flush()
    return EXIT_BAD_INPUT


def _last_line(error: Exception) -> str:
    return traceback.format_exception_only(error)[-1].strip()
