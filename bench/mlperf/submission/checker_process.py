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


def run_checker(module: str, arguments: list[str]) -> str:
    """Runs `python -m module arguments` in this process; returns all output, whatever its exit status."""
    # State that the checkers share and that a crashed checker leaves: rules still to be read, handlers of the root
    # logger.
    mlp_compliance.enqueued_configs.clear()
    logging.getLogger().handlers.clear()
    output = io.StringIO()
    sys.argv = [module, *arguments]
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            with contextlib.suppress(SystemExit):
                runpy.run_module(module, run_name="__main__", alter_sys=True)
        except Exception:  # a checker that crashes has failed; its traceback is output, as from a process
            output.write(traceback.format_exc())
    return output.getvalue()


def main() -> None:
    """Runs each [module, arguments] of stdin; writes the text of each to stdout."""
    print(json.dumps([run_checker(module, arguments) for module, arguments in json.load(sys.stdin)]))


if __name__ == "__main__":
    main()
