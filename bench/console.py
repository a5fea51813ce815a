"""The console of dlrm-bench: wide enough for its tables; names of files can steer neither the terminal nor rich."""

from collections.abc import Iterator
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table

from dlrm_bench.dlrm.runtime.command_line import printable

_WIDEST = 1000
"""Number of columns of a console that shows every table whole."""


def console() -> Console:
    """Returns a console at least as wide as each table, which would be cut off otherwise.

    Control characters in names are printed as escapes; brackets and colons, which are rich's markup and emoji, as they
    are, also in tables. A line in bold takes a style.
    """

    class EndingConsole(Console):
        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
            for text, style, control in super().render(renderable, options):
                yield Segment(text if control else printable(text), style, control)

        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # as print() does: rich exits with status 1, which has a meaning here

        def print(self, *objects: Any, **keywords: Any) -> None:
            for table in objects:
                if isinstance(table, Table):
                    whole = self.measure(table, options=self.options.update(width=_WIDEST)).maximum
                    self.width = max(self.width, whole)
            super().print(*objects, **keywords)

    return EndingConsole(width=max(130, Console().width), markup=False, emoji=False)
