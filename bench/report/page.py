"""One self-contained HTML page, and its pictures as PNG files, from records, ladders, limits and MLPerf logs.

dlrm-bench report results --out report

Folders are searched. Nothing is measured here, and every number on the page comes from a file that the page names.
"""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from matplotlib.figure import Figure
from PIL import Image
from rich.console import Console
from rich.markup import escape

from dlrm_bench.bench.instruments.progress import StillBar
from dlrm_bench.bench.ladder.analysis import HOST_COLUMNS, confidence_in_words, host_cells, lucky, proven
from dlrm_bench.bench.limits.floor import WORK_SHOWN, best_cells
from dlrm_bench.bench.mlperf.published_logs import LOG_COLUMNS, log_row
from dlrm_bench.bench.report import pictures
from dlrm_bench.bench.report.families import all_doubts, families, machines, works
from dlrm_bench.bench.report.output import check_output, write_files
from dlrm_bench.bench.report.pictures import Picture, Works
from dlrm_bench.bench.report.published import PUBLISHED, PUBLISHED_CAVEATS
from dlrm_bench.bench.report.rounding import milliseconds, times, with_interval
from dlrm_bench.bench.report.sources import Family, Sources, find, machine_in_words, read_sources
from dlrm_bench.dlrm.benchmarks import BENCHMARKS

PAGE = "index.html"
_DPI = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenReport:
    """A report on disk."""

    page: Path
    notes: list[str]
    """Sentences on omissions, and on files of the folder that are not the report's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A family on the page."""

    family: Family
    works: Works
    pictures: list[Picture]

    def of_kind(self, *kinds: str) -> list[Picture]:
        """Returns its pictures of these kinds."""
        return [picture for picture in self.pictures if picture.kind in kinds]


def write_report(paths: Sequence[Path], out: Path, console: Console, first: Path | None = None) -> WrittenReport:
    """Writes out/index.html and its pictures; progress goes to `console` if that is a terminal.

    first: the ladder that the page opens with. ValueError, naming the file, if a source cannot be read, if there is
    none, if `first` is not among the sources, or if a file of another origin has the name of a file of the report.
    """
    check_output(out)
    sources = _read(paths, console)
    shown = families(sources, paths, first)
    sections, taken = [], set[str]()
    for family in shown:
        kernels = works(family, sources)
        drawn = pictures.of_family(family, kernels, sources.limits, headline=family is shown[0])
        drawn = pictures.numbered(drawn, taken)
        sections.append(Section(family=family, works=kernels, pictures=drawn))
    published = pictures.numbered(pictures.published(shown, sources.logs), taken)
    encoded = _draw([*(picture for section in sections for picture in section.pictures), *published], console)
    page = _render(sources, sections, published, encoded)
    files = {f"{name}.png": png for name, png in encoded.items()} | {PAGE: page.encode()}
    others = write_files(out, files)
    left_alone = [f"left alone in {out}, not a report's: {', '.join(others)}"] if others else []
    return WrittenReport(page=out / PAGE, notes=sources.notes() + left_alone)


def _read(paths: Sequence[Path], console: Console) -> Sources:
    if not paths:
        raise ValueError("nothing is named: name records, or folders of them")
    found = find(paths)
    with StillBar(len(found), "reading", console) as bar:
        sources = read_sources(found, lambda number, path: bar.show(number, f"reading {escape(str(path))}"))
        bar.show(len(found), "read")
    if not any((sources.ladders, sources.timed, sources.profiled, sources.limits, sources.logs)):
        unfinished = f"; {len(sources.unfinished)} unfinished runs" if sources.unfinished else ""
        untimed = f"; {len(sources.untimed)} runs that ended within their warm-up" if sources.untimed else ""
        where = ", ".join(map(str, paths))
        raise ValueError(f"nothing to report in {where}: no record, ladder, limits or MLPerf log{unfinished}{untimed}")
    return sources


def _draw(drawn: Sequence[Picture], console: Console) -> dict[str, bytes]:
    """Returns the PNG of each picture by the picture's name."""
    encoded = {}
    with StillBar(len(drawn), "drawing", console) as bar:
        for number, picture in enumerate(drawn):
            bar.show(number, f"drawing {escape(picture.name)}")
            encoded[picture.name] = png_of(picture.draw())
        bar.show(len(drawn), "drawn")
    return encoded


def _render(sources: Sources, sections: list[Section], published: list[Picture], encoded: dict[str, bytes]) -> str:
    environment = Environment(
        loader=PackageLoader("dlrm_bench.bench.report"), autoescape=True, undefined=StrictUndefined
    )
    shown = [section.family for section in sections]
    values: dict[str, Any] = {
        "sections": sections,
        "sources": sources,
        "published_pictures": published,
        "encoded": {name: base64.b64encode(png).decode() for name, png in encoded.items()},
        "proven": proven,
        "lucky": lucky,
        "confidence_in_words": confidence_in_words,
        "work_shown": WORK_SHOWN,
        "best_cells": best_cells,
        "host_columns": HOST_COLUMNS,
        "host_cells": host_cells,
        "machine_in_words": machine_in_words,
        "machines": machines(shown, sources),
        "published": PUBLISHED,
        "published_caveats": PUBLISHED_CAVEATS,
        "titles": {benchmark.name: benchmark.title for benchmark in BENCHMARKS},
        "milliseconds": milliseconds,
        "times": times,
        "with_interval": with_interval,
        "log_columns": LOG_COLUMNS,
        "log_row": log_row,
        "doubts": all_doubts(shown),
        "created": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
    }
    return environment.get_template("report.html").render(values)


def png_of(figure: Figure) -> bytes:
    """Returns the figure as a PNG with a palette, enough for the few colours of a chart: a third of the bytes."""
    drawn, buffer = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png", dpi=_DPI)
    Image.open(drawn).convert("RGB").quantize(64).save(buffer, format="png", optimize=True)
    return buffer.getvalue()
