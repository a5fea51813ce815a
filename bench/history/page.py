"""A history as one HTML page, in the style of the report."""

import base64
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

import numpy as np
from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from matplotlib.figure import Figure

from dlrm_bench.bench.history.sittings import History
from dlrm_bench.bench.history.words import cells, sentences
from dlrm_bench.bench.report.output import check_output, write_files
from dlrm_bench.bench.report.page import PAGE, png_of
from dlrm_bench.bench.report.plots import WIDTH

_FONT = 8
_DARK, _MID, _LIGHT = "#1b3a57", "#5b8db8", "#c4d7e6"


def write_page(histories: Sequence[History], out: Path) -> list[str]:
    """Writes out/index.html and its pictures; returns other files there, which are left alone. ValueError if `out` is
    no folder for a report."""
    check_output(out)
    drawn = [png_of(picture(history)) if history.points else b"" for history in histories]
    loader = ChoiceLoader([PackageLoader("dlrm_bench.bench.history"), PackageLoader("dlrm_bench.bench.report")])
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
    text = environment.get_template("history.html").render(
        shown=[
            (history, [*sentences(history)], base64.b64encode(png).decode())
            for history, png in zip(histories, drawn, strict=True)
        ],
        cells=cells,
        created=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
    )
    files = {f"history-{i}.png": png for i, png in enumerate(drawn) if png}
    return write_files(out, {**files, PAGE: text.encode()})


def picture(history: History) -> Figure:
    """Draws medians over time, and below them the times over the reference's with the levels between changes."""
    figure = Figure(figsize=(WIDTH, 4.2), layout="constrained")
    above, below = figure.subplots(2, 1)
    others = [point.side for point in history.points]
    for sides, marker, colour, label in ((history.references, "x", _MID, "reference"), (others, "o", _DARK, "others")):
        when = [datetime.fromisoformat(side.finished[0]) for side in sides]
        medians = [side.metrics()["p50"] for side in sides]
        above.plot(when, medians, marker, color=colour, markersize=3.5, label=label)
    above.set_ylabel("median, ms", fontsize=_FONT)
    above.legend(fontsize=_FONT - 1, frameon=False, ncols=2, loc="lower left", bbox_to_anchor=(0, 1))
    above.tick_params(axis="x", rotation=20)
    judged = history.judged
    places = np.arange(len(judged))
    for i, point in enumerate(judged):
        assert point.estimate is not None
        value, low, high = point.estimate.speedup()
        if np.isfinite(low) and low > 0.2 * value:  # intervals of two runs may be arbitrarily wide
            below.plot((i, i), (low, high), color=_LIGHT, linewidth=1.5, zorder=1)
    ratios = np.exp([-point.estimate.log for point in judged if point.estimate is not None])
    below.plot(places, ratios, "o", color=_DARK, markersize=3.5, zorder=2)
    ends = [0, *(change.at for change in history.changes), len(judged)]
    for first, last in pairwise(ends):
        if last > first:
            level = float(np.exp(np.log(ratios[first:last]).mean()))
            below.plot((first - 0.4, last - 0.6), (level, level), color="black", linewidth=1.2)
    for change in history.changes:
        below.axvspan(change.low - 0.5, change.high - 0.5 + 1e-6, color=_MID, alpha=0.25, linewidth=0)
        below.axvline(change.at - 0.5, color="black", linestyle="--", linewidth=0.9)
    below.set_xticks(places, [point.program[:7] for point in judged], rotation=90, fontsize=_FONT - 2)
    below.set_ylabel("times as fast as\nthe reference", fontsize=_FONT)
    for axes in (above, below):
        axes.tick_params(labelsize=_FONT - 1)
    return figure
