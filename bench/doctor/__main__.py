"""The doctor as a separate program: python -m PACKAGE [flags] -- torchrun --nproc_per_node 8 train.py ..."""

import sys
from collections.abc import Sequence

import tyro
from rich.console import Console

from .examine import EXIT_FAILED, ExaminationError, doctor
from .options import DoctorOptions

EXIT_BAD_INPUT = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Examines the command after `--`; returns the exit status: 1 if a check or the command fails, 2 for bad input."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    at = given.index("--") if "--" in given else len(given)
    options = tyro.cli(DoctorOptions, prog="host-doctor", description=_HELP, args=given[:at])
    try:
        return doctor(Console(), given[at + 1 :], options)
    except (ValueError, OSError, ExaminationError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_FAILED if isinstance(error, ExaminationError) else EXIT_BAD_INPUT
    except KeyboardInterrupt:
        return 130


_HELP = """Examines your training script: host-doctor [flags] -- torchrun --nproc_per_node 8 train.py ...

Names the lines that make the host wait, copy or launch too much in a steady iteration, costliest first. The script is
not changed; it is ended after the iterations that the doctor needs."""

if __name__ == "__main__":
    sys.exit(main())
