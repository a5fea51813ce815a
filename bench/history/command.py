"""dlrm-bench history: prints the records of each configuration over time and their changes, and writes the page."""

from rich import box
from rich.console import Console
from rich.table import Table

from dlrm_bench.bench.history.arguments import HistoryCommand
from dlrm_bench.bench.history.page import write_page
from dlrm_bench.bench.history.sittings import History, read_histories
from dlrm_bench.bench.history.words import cells, sentences


def history_command(console: Console, asked: HistoryCommand) -> int:
    """Prints a table and sentences for each configuration; returns the exit status. ValueError names a bad flag."""
    if not asked.gap_minutes >= 0:
        raise ValueError(f"--gap-minutes is {asked.gap_minutes:g}: it must not be negative")
    histories = read_histories(asked.folder, asked.reference, asked.gap_minutes)
    for history in histories:
        console.print(history_table(history))
        for text in sentences(history):
            console.print(text, soft_wrap=True, markup=False, highlight=False)
    if asked.out is not None:
        others = write_page(histories, asked.out)
        if others:
            console.print(f"note: left alone in {asked.out}: {', '.join(others)}", soft_wrap=True, markup=False)
        console.print(f"page {asked.out / 'index.html'}", soft_wrap=True)
    return 0


def history_table(history: History) -> Table:
    """Returns the points of a history as a table."""
    table = Table(title=history.name, title_justify="left", box=box.SIMPLE_HEAD)
    for column in ("first run ended", "program", "runs", "median, ms", "reference, ms", "times as fast", "judged"):
        table.add_column(column, justify="right" if column in ("runs", "median, ms", "reference, ms") else "left")
    for point in history.points:
        table.add_row(*cells(point))
    return table
