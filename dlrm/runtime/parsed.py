"""Command lines read by tyro, whose pages about a wrong flag become errors of one line. Imports nothing of the project,
so that commands start quickly."""

import contextlib
import io
import re
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


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
