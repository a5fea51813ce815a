"""Arguments of `dlrm-bench report` and `dlrm-bench tables`. Starts at once: a command imports its modules when it
runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tyro.conf import Positional

from dlrm_bench.dlrm.runtime.command_line import EXIT_FAILED

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(kw_only=True, slots=True, frozen=True)
class Report:
    """Writes one self-contained HTML page, and its pictures, from all records in the named folders.

    The page opens with the ladder that --first names. By default it is a ladder of the first folder that has any: the
    newest whose last rung is proven faster than its first, or else the newest.
    """

    paths: Positional[tuple[Path, ...]]
    """Records, ladders, limits and MLPerf logs, or folders of them; your own before others'."""
    first: Path | None = None
    """Ladder with which the page opens."""
    out: Path = Path("report")
    """Folder of index.html and the pictures; only files that an earlier report wrote are replaced."""

    def run(self, console: "Console", forwarded: Sequence[str]) -> int:
        """Writes the page; returns the exit status."""
        from dlrm_bench.bench.instruments.progress import stderr_console
        from dlrm_bench.bench.report.page import write_report

        report = write_report(self.paths, self.out, stderr_console(), self.first)
        for note in report.notes:
            console.print(f"note: {note}", soft_wrap=True, markup=False, highlight=False)
        console.print(f"page {report.page} ({report.page.stat().st_size / 1e6:.2f} MB)", soft_wrap=True)
        return 0


@dataclass(kw_only=True, slots=True, frozen=True)
class Tables:
    """Renders the tables of Markdown files from the records that they name: dlrm-bench tables README.md results

    A table is enclosed by two comments; bench/report/markdown.py describes their form.
    """

    files: Positional[tuple[Path, ...]]
    """Markdown files, or folders: their README.md and those of the folders in them."""
    check: bool = False
    """Change nothing; exit with status 1 if a table differs from its records."""

    def run(self, console: "Console", forwarded: Sequence[str]) -> int:
        """Writes the files whose tables changed, or names them; returns the exit status."""
        from dlrm_bench.bench.records.json_file import whole_file
        from dlrm_bench.bench.report.markdown import markdown_files, rendered

        changed = 0
        for path in markdown_files(self.files):
            text = rendered(path)
            if text == path.read_text(encoding="utf-8"):
                continue
            changed += 1
            if not self.check:
                with whole_file(path) as file:
                    file.write(text.encode())
            says = "differs from its records" if self.check else "rendered again"
            console.print(f"{path}: {says}", soft_wrap=True, markup=False, highlight=False)
        return EXIT_FAILED if self.check and changed else 0
