"""Command lines read by tyro, whose pages about a wrong flag become errors of one line. Imports nothing of the project,
so that commands start quickly."""

import contextlib
import io
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import tyro

T = TypeVar("T")


def options_of(
    kind: type[T], args: Sequence[str] | None, command: str, description: str | None = None, **more: Any
) -> T:
    """Returns the options of a dlrm-bench command, read by tyro from its words, the process's own if None. Switches
    have no --no- twin. more: further arguments of tyro.cli."""
    off = (tyro.conf.FlagCreatePairsOff,)
    prog = f"dlrm-bench {command}"
    return parsed(lambda: tyro.cli(kind, args=args, prog=prog, description=description, config=off, **more))


def parsed(cli: Callable[[], T], prints: bool = True) -> T:
    """Returns the result of tyro; its page about a wrong flag becomes a ValueError. prints: whether this process
    prints the help."""
    page = io.StringIO()
    try:
        quiet = contextlib.nullcontext() if prints else contextlib.redirect_stdout(io.StringIO())
        with contextlib.redirect_stderr(page), quiet:
            return cli()
    except SystemExit as leave:
        if not leave.code:
            raise
        raise ValueError(_in_one_line(page.getvalue())) from None


def _in_one_line(page: str) -> str:
    """Returns the error of tyro's page: sections with rules between them, in a frame with the title or below the title.

    Of tyro's suggestions only the flags are kept; their help, and how to get all help, are left out.
    """
    lines = [line.strip("│┃ ") for line in page.splitlines() if not line.startswith(("╭", "╰"))]
    sections = [part.split("\n") for part in re.split("^[-─━]{3,}$", "\n".join(lines), flags=re.MULTILINE)]
    said, *others = sections if "╭" in page else sections[1:]
    meant = [
        line.split()[0] for section in others if "Perhaps you meant:" in section for line in section if line[:2] == "--"
    ]
    error = re.sub("^Error parsing [A-Z][a-z][A-Za-z]*: ", "", " ".join(filter(None, said)))  # of a class's own check
    return f"{error}; perhaps you meant {' or '.join(dict.fromkeys(meant))}" if meant else error
