"""Progress bars without cost to a measurement.

A bar is drawn when the program asks for it and never in between: no thread takes Python's interpreter lock or a core
from the timed loop. Nothing is drawn if stderr is not a terminal, as under torchrun's --tee or in a batch job.
"""

import sys
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


def stderr_console() -> Console:
    """Returns a console for bars: on stderr, so that stdout can go to a file."""
    return Console(stderr=True, force_terminal=sys.stderr.isatty())  # rich alone obeys FORCE_COLOR


class StillBar:
    """Shows how much of `total` is done. A context manager; draws on entry, at show() and on exit."""

    def __init__(self, total: int, text: str, console: Console, shown: bool = True) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._console = console
        self._progress = Progress(
            *columns,
            console=console,
            auto_refresh=False,  # no thread
            redirect_stdout=False,
            redirect_stderr=False,
            disable=not (shown and console.is_terminal),
        )
        self._task: TaskID = self._progress.add_task(text, total=total)

    def __enter__(self) -> "StillBar":
        self._progress.start()
        if not self._progress.disable:
            self._console.show_cursor(True)  # a run that is killed cannot bring it back
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def show(self, done: int, text: str) -> None:
        """Draws the bar with `done` completed; must not be called within timed work."""
        self._progress.update(self._task, completed=done, description=text, refresh=True)
