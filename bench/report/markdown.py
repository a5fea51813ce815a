"""Tables of Markdown files, rendered from records: dlrm-bench tables README.md results

A table stands between two comments. The first describes the table, with paths from the file's own folder:

    <!-- table: times
    what was compared | record | before | after
    bf16 and fp8 | results/44-2xh200-6912-a-gpu-stock-bf16-fp8 | peer-memory-bf16 | fp8
    -->
    <!-- end of table -->

tables.py has the kinds of tables, and the form of their lines.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from dlrm_bench.bench.report.tables import KINDS

_TABLE = re.compile(r"(<!-- table: (\w+)\n?(.*?)-->\n)(.*?)(<!-- end of table -->)", re.DOTALL)
_OPENING = "<!-- table:"


def markdown_files(paths: Sequence[Path]) -> list[Path]:
    """Returns the named files, and README.md of each named folder and of the folders in it.

    ValueError names a path that is neither, or a folder without such files, or says that no path is named.
    """
    if not paths:
        raise ValueError("nothing is named: name Markdown files, or folders of them")
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            pages = sorted(path.glob("*/README.md")) + sorted(path.glob("README.md"))
            if not pages:
                raise ValueError(f"{path} holds no README.md: name Markdown files, or folders of them")
            found += pages
        elif path.is_file():
            found.append(path)
        else:
            raise ValueError(f"{path} does not exist: name Markdown files, or folders of them")
    return found


def rendered(path: Path) -> str:
    """Returns a Markdown file's text with its tables rendered again; ValueError names the file and the table."""
    text = path.read_text(encoding="utf-8")
    if text.count(_OPENING) != len(_TABLE.findall(text)):
        raise ValueError(
            f"{path}: a table does not end: close its first comment, and write <!-- end of table --> below"
        )

    def make(match: re.Match[str]) -> str:
        opening, kind, lines, _, ending = match.groups()
        if kind not in KINDS:
            raise ValueError(f"{path} has a table of kind {kind!r}: choose one of {', '.join(KINDS)}")
        try:
            rows = KINDS[kind](path.parent, [line for line in lines.splitlines() if line.strip()])
        except ValueError as error:
            raise ValueError(f"{path}, table {kind!r}: {error}") from error
        return opening + _table(rows) + ending

    return _TABLE.sub(make, text)


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Returns rows, the headings first, as a Markdown table that ends in a newline."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]]) + "\n"
