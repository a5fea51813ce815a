"""Progress of long-running work on stderr: steps with their rate and the remaining time."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

LINE_SECONDS = 60.0
"""Seconds between two progress lines if stderr is not a terminal; a terminal shows a bar instead."""

Advance = Callable[[float], None]


class RateColumn(ProgressColumn):
    """Work done per second."""

    def render(self, task: Task) -> Text:
        """Returns the rate of a task, in the unit of its fields."""
        return Text(_rate(task.finished_speed or task.speed, task.fields["unit"], task.fields["scale"]))


@contextmanager
def step(title: str, total: float, unit: str, scale: float = 1e6) -> Iterator[Advance]:
    """Shows progress of one step of `total` pieces of work; yields the function to call with each number of finished
    pieces.

    Rates are shown as pieces / scale per second, in `unit`.
    """
    console = Console(stderr=True, force_terminal=sys.stderr.isatty())  # by default, rich obeys FORCE_COLOR
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), RateColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=console, speed_estimate_period=120, disable=not console.is_terminal)
    task = bar.add_task(title, total=total, unit=unit, scale=scale)
    begun = shown = time.monotonic()
    done = 0.0

    def advance(pieces: float) -> None:
        nonlocal shown, done
        done += pieces
        bar.advance(task, pieces)
        now = time.monotonic()
        if bar.disable and now - shown >= LINE_SECONDS and done:
            shown = now
            rate = done / (now - begun)
            left = timedelta(seconds=round((total - done) / rate))
            print(f"{title}: {done / total:.0%}, {_rate(rate, unit, scale)}, {left} left", file=sys.stderr, flush=True)

    with bar:
        yield advance
    if bar.disable:
        seconds = max(time.monotonic() - begun, 1e-9)
        print(f"{title}: done in {seconds:.0f} s, {_rate(done / seconds, unit, scale)}", file=sys.stderr, flush=True)


def _rate(rate: float | None, unit: str, scale: float) -> str:
    return "" if rate is None else f"{rate / scale:.3g} {unit}/s"
