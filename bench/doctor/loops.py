"""The loop of the source around a line: leaving a loop out removes all of its lines."""

import ast
from collections.abc import Collection
from functools import cache
from pathlib import Path

_LOOPS = (ast.For, ast.While, ast.AsyncFor)


def lines_of_loop(file: str, line: int, without: Collection[tuple[str, int]]) -> range:
    """Returns the lines of the innermost loop around a line; the line alone where there is none, or no source to be
    read.

    without: lines (file, number) that the loop must not hold. The training loop holds the line at which iterations
    begin.
    """
    around = [
        lines for lines in _loops(file) if line in lines and not any(f == file and n in lines for f, n in without)
    ]
    return min(around, key=len, default=range(line, line + 1))


@cache
def _loops(file: str) -> tuple[range, ...]:
    try:
        tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return ()
    nodes = [node for node in ast.walk(tree) if isinstance(node, _LOOPS)]
    return tuple(range(node.lineno, (node.end_lineno or node.lineno) + 1) for node in nodes)
