"""Starts `dlrm-bench`, only some of whose commands need torch."""

import sys

from dlrm_bench.dlrm.runtime.command_line import EXIT_BAD_INPUT
from dlrm_bench.launch.failures import what_to_install


def main() -> int:
    """Runs a command of `dlrm-bench`; returns the exit status: 2 if a package that the command needs is missing."""
    from dlrm_bench.bench.cli import main as run_command

    try:
        return run_command()
    except ModuleNotFoundError as error:
        missing = what_to_install(error)
        if missing is None:
            raise
        print(f"error: {missing}", file=sys.stderr)
        return EXIT_BAD_INPUT


if __name__ == "__main__":
    sys.exit(main())
