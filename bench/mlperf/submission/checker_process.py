"""Runs checkers of mlperf_logging one after another in this process: their imports cost more than their checks.

python checker_process.py < JSON > JSON, in an empty folder that nobody else uses. Imports nothing of this project.
"""

import contextlib
import io
import json
import logging
import runpy
import sys
import traceback

from mlperf_logging.compliance_checker import mlp_compliance


def run_checker(module: str, arguments: list[str]) -> tuple[int, str]:
    """Runs `python -m module arguments` in this process; returns the exit status and all output."""
    # State that the checkers share, and that a crash leaves: rules still to be read, and handlers of the root logger.
    mlp_compliance.enqueued_configs.clear()
    logging.getLogger().handlers.clear()
    output = io.StringIO()
    sys.argv = [module, *arguments]
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
            status = 0
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        except Exception:  # a checker that crashes has failed, and its traceback is its output, as of a process
            output.write(traceback.format_exc())
            status = 1
    return status, output.getvalue()


def main() -> None:
    """Runs each [module, arguments] of stdin; writes each [status, text] to stdout."""
    print(json.dumps([run_checker(module, arguments) for module, arguments in json.load(sys.stdin)]))


if __name__ == "__main__":
    main()
