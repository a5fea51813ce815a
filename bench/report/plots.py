"""The pictures of a report, as matplotlib figures. Lightness, hatches and direct labels carry the meaning, not hue."""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from dlrm_bench.bench.ladder.analysis import proven
from dlrm_bench.bench.profile.kernel_names import OTHER, STAGES
from dlrm_bench.bench.records.ladder import Ladder
from dlrm_bench.bench.records.schema import Span
from dlrm_bench.bench.report.rounding import milliseconds, times
from dlrm_bench.bench.stats.series import Metric

WIDTH = 5.2
"""Width in inches. At the width of a phone's screen a font of this size is still readable."""
_FONT = 8
_DARK, _MID, _LIGHT = "#1b3a57", "#5b8db8", "#c4d7e6"
_STAGE_COLOURS = ("#dfe9f1", "#9dbfd9", "#5b8db8", "#2f6690", "#16324f", "#ffffff")
_HATCHES = ("", "///", "", "\\\\\\", "", "...")


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesMarks:
    """Marks of a run, in iterations."""

    evals: Sequence[int] = ()
    collections: Sequence[int] = ()
    throttled: Sequence[tuple[int, int]] = ()
    """(first, last) iteration of every span."""


def distributions(series: Mapping[str, tuple[np.ndarray, Mapping[Metric, float]]]) -> Figure:
    """Draws latencies [n] and metrics of each name, ms: range, p10 to p90, median and p99, on a logarithmic axis."""
    figure, axes = _rows(list(series))
    for y, (values, metrics) in enumerate(series.values()):
        low, p10, p90, high = np.percentile(values, (0, 10, 90, 100))
        median, p99 = metrics["p50"], metrics["p99"]
        axes.plot((low, high), (y, y), color=_MID, linewidth=1, zorder=1)
        axes.barh(y, p90 - p10, left=p10, height=0.5, color=_LIGHT, edgecolor=_DARK, linewidth=0.8, zorder=2)
        axes.plot((p99, p99), (y - 0.25, y + 0.25), color=_DARK, linewidth=1.5, linestyle=":", zorder=3)
        axes.plot(median, y, "o", color=_DARK, markersize=4, zorder=4)
        _write(axes, milliseconds(median), high, y)
    axes.set_xscale("log")
    _plain_numbers(axes)
    return _explained(figure, "ms: range (line), p10 to p90 (box), median (dot and number), p99 (dotted)")


def time_series(name: str, latencies_ms: np.ndarray, warmup: int, marks: SeriesMarks) -> Figure:
    """Draws every iteration [n] of one run, ms, with the warm-up shaded and its marks."""
    figure, axes = new_figure(2.2)
    axes.plot(np.arange(len(latencies_ms)), latencies_ms, color=_DARK, linewidth=0.7, rasterized=True)
    axes.axvspan(0, warmup, facecolor=_LIGHT, hatch="//", edgecolor=_MID, linewidth=0, label="warm-up")
    for i, (first, last) in enumerate(marks.throttled):
        label = "throttled" if i == 0 else None
        axes.axvspan(first, max(last, first + 1), facecolor="#888888", alpha=0.4, hatch="xx", linewidth=0, label=label)
    for places, style, label in ((marks.evals, "--", "evaluation"), (marks.collections, ":", "garbage collection")):
        for i, place in enumerate(places):
            axes.axvline(place, color="black", linestyle=style, linewidth=0.9, label=label if i == 0 else None)
    axes.set_yscale("log")
    _plain_numbers(axes, "y")
    axes.set_title(name, fontsize=_FONT, loc="left")
    axes.set_xlabel("iteration", fontsize=_FONT)
    axes.set_ylabel("ms", fontsize=_FONT)
    axes.legend(fontsize=_FONT - 1, ncols=4, loc="upper right", framealpha=0.9)
    return figure


def stages(profiled: dict[str, dict[str, float]]) -> Figure:
    """Draws milliseconds of each stage for each name, stacked."""
    figure, axes = _rows(list(profiled), inches=0.4, around=1.2)
    for y, spent in enumerate(profiled.values()):
        left = 0.0
        for stage, colour, hatch in zip((*STAGES, OTHER), _STAGE_COLOURS, _HATCHES, strict=True):
            label = stage.replace("_", " ") if y == 0 else None
            ms = spent.get(stage, 0.0)
            style: dict[str, Any] = {"facecolor": colour, "edgecolor": "black", "linewidth": 0.6, "hatch": hatch}
            axes.barh(y, ms, left=left, height=0.6, label=label, **style)
            left += ms
        _write(axes, f"{left:.2f}", left, y)
    _explained(figure, "ms per iteration")
    figure.legend(fontsize=_FONT - 1, ncols=3, loc="outside upper center")
    return figure


def timelines(profiled: dict[str, dict[str, Span]]) -> Figure:
    """Draws spans of the stages of one iteration for each name, one below the other, each on its own time scale."""
    heights = [0.2 * len(timeline) + 0.75 for timeline in profiled.values()]
    figure = Figure(figsize=(WIDTH, sum(heights) + 0.2), layout="constrained")
    grid = figure.add_gridspec(len(profiled), 1, height_ratios=heights)
    style = dict(zip(STAGES, zip(_STAGE_COLOURS, _HATCHES, strict=True), strict=False))
    for row, (name, timeline) in enumerate(profiled.items()):
        axes = _plain(figure.add_subplot(grid[row]))
        for y, (stage, span) in enumerate(timeline.items()):
            colour, hatch = style[stage]
            length = span["end_ms"] - span["start_ms"]
            bar: dict[str, Any] = {"facecolor": colour, "hatch": hatch, "edgecolor": "black", "linewidth": 0.6}
            axes.barh(y, length, left=span["start_ms"], height=0.7, **bar)
            _write(axes, f"busy {span['busy_ms']:.3g}", span["end_ms"], y)
        axes.axvline(0, color="black", linewidth=0.6)
        _names(axes, [stage.replace("_", " ") for stage in timeline])
        axes.set_title(name, fontsize=_FONT, loc="left")
        axes.use_sticky_edges = False
        axes.margins(x=0.03)
    return _explained(figure, "ms from the iteration's first kernel, or on the host from its beginning")


def work(rows: Sequence[tuple[str, float, float | None]]) -> Figure:
    """Draws (name, us, best us or None) of kernels, measured beside best."""
    figure, axes = _rows([name for name, _, _ in rows], inches=0.34)
    for y, (_, us, best) in enumerate(rows):
        axes.barh(y, us, height=0.62, facecolor=_LIGHT, edgecolor=_DARK, hatch="///", linewidth=0.8)
        if best is not None:
            axes.barh(y, best, height=0.28, facecolor=_DARK)
        text = f"{us:.0f}, best not known" if best is None else f"{us:.0f}, best {best:.0f} ({us / best:.1f} x)"
        _write(axes, text, max(us, best or 0), y)
    return _explained(figure, "us per iteration and rank; hatched: measured, dark: at best")


def waterfall(ladder: Ladder) -> Figure:
    """Draws the median of each rung, its saving over the previous rung, and the ratio to the first."""
    rungs = ladder["rungs"]
    figure, axes = _rows([rung["name"] for rung in rungs])
    before, is_proven = rungs[0]["median_ms"], proven(ladder, "previous")
    for y, rung in enumerate(rungs):
        now = rung["median_ms"]
        axes.barh(y, now, height=0.6, color=_LIGHT if y else _MID, edgecolor=_DARK, linewidth=0.8)
        if y:
            saved = before > now
            style: dict[str, Any] = {"facecolor": "white", "hatch": "///"} if saved else {"facecolor": "#333333"}
            axes.barh(y, before - now, left=now, height=0.6, edgecolor=_DARK, linewidth=0.8, **style)
        mark = "" if rung["name"] in is_proven else " ~"
        previous, first = times(rung["speedup_vs_previous"]), times(rung["speedup_vs_first"])
        faster = f"{previous} x{mark} ({first} x)" if y else ""
        _write(axes, ", ".join(filter(None, (f"{milliseconds(now)} ms", faster))), max(before, now), y)
        before = now
    return _explained(
        figure,
        "median ms; hatched: saved by this rung, dark: lost; x: times as fast as the previous rung,\n"
        "~: not proven, in brackets: as the first rung",
    )


def above_floor(rows: Sequence[tuple[str, float, float]]) -> Figure:
    """Draws (name, floor, measured) in milliseconds, side by side."""
    figure, axes = _rows([name.replace("_", " ") for name, _, _ in rows], inches=0.4, around=1.1)
    for y, (_, least, now) in enumerate(rows):
        first = y == 0
        axes.barh(y - 0.18, least, height=0.34, color=_DARK, label="floor" if first else None)
        style: dict[str, Any] = {"facecolor": _LIGHT, "edgecolor": _DARK, "hatch": "///", "linewidth": 0.8}
        axes.barh(y + 0.18, now, height=0.34, label="measured" if first else None, **style)
        above = f" ({times(now / least)} x)" if least else ""
        _write(axes, f"{milliseconds(now)}{above}", max(now, least), y)
    _explained(figure, "ms per iteration")
    figure.legend(fontsize=_FONT - 1, ncols=2, loc="outside upper center")
    return figure


def published(rows: Sequence[tuple[str, float, bool]]) -> Figure:
    """Draws (name, ms per iteration, whether ours): published records and ours."""
    figure, axes = _rows([name for name, _, _ in rows], wrap=32)
    for y, (_, ms, ours) in enumerate(rows):
        style: dict[str, Any] = {"facecolor": _DARK} if ours else {"facecolor": _LIGHT, "hatch": "///"}
        axes.barh(y, ms, height=0.6, edgecolor=_DARK, linewidth=0.8, **style)
        _write(axes, f"{ms:.2f}", ms, y)  # as many decimals as results are published with
    return _explained(figure, "mean ms per iteration; solid: ours")


def new_figure(height: float) -> tuple[Figure, Axes]:
    """Returns a figure of WIDTH and this height in inches, and its axes."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained")  # no pyplot: no window, no state to close
    return figure, _plain(figure.add_subplot())


def _rows(names: list[str], inches: float = 0.3, around: float = 0.9, wrap: int = 24) -> tuple[Figure, Axes]:
    """Returns a figure with a row for each name, `inches` high, or more if the name's lines of `wrap` characters need
    more."""
    lines = max(len(textwrap.wrap(name, wrap)) for name in names)
    figure, axes = new_figure(max(inches, 0.17 * lines) * len(names) + around)
    _names(axes, names, wrap)
    return figure, axes


def _plain(axes: Axes) -> Axes:
    axes.tick_params(labelsize=_FONT)
    axes.spines[["top", "right"]].set_visible(False)
    return axes


def _names(axes: Axes, names: list[str], wrap: int = 24) -> None:
    """Writes names on the vertical axis, the first one on top, in lines of at most `wrap` characters."""
    axes.set_yticks(range(len(names)), [textwrap.fill(name, wrap) for name in names], fontsize=_FONT)
    axes.set_ylim(len(names) - 0.4, -0.6)


def _write(axes: Axes, text: str, x: float, y: float) -> None:
    """Writes to the right of (x, y), where no bar is; the layout makes room for it."""
    axes.annotate(text, (x, y), (4, 0), textcoords="offset points", va="center", fontsize=_FONT)


def _explained(figure: Figure, text: str) -> Figure:
    """Writes `text` below the whole figure: below the axes alone it would not fit."""
    figure.supxlabel(text, fontsize=_FONT)
    return figure


def _plain_numbers(axes: Axes, which: str = "x") -> None:
    """Sets ticks at 1, 2, 5 and 10, or at 1 and 10 if those do not fit, without powers."""
    axis = getattr(axes, f"{which}axis")
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 200 * low else (1,)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())
