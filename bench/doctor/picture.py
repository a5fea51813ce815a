"""Timelines: an iteration's calls of torch, findings and GPU work, and the ranks side by side, each on one axis."""

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from .diagnosis import Timeline
from .stragglers import Together

_FONT = 8
_WIDTH = 8.32
"""Inches."""
_FINDINGS = 10
"""Findings with a row."""
_RANKS = 16
"""Ranks with a row."""
_DARK, _LIGHT, _WAITS = "#1b3a57", "#c4d7e6", "#e8b06a"


def timeline_figure(timeline: Timeline) -> Figure:
    """Rows of bars, milliseconds from the beginning of the iteration."""
    found = list(dict.fromkeys(bar.row for bar in timeline.bars if bar.row[0].isdigit()))
    found.sort(key=lambda row: int(row.split()[0]))
    rows = ["calls of torch", *found[:_FINDINGS]]
    rows += [row for row in ("GPU: kernels", "GPU: copies") if any(bar.row == row for bar in timeline.bars)]
    figure = Figure(figsize=(_WIDTH, 0.28 * len(rows) + 0.9), layout="constrained")
    axes = figure.add_subplot()
    for y, row in enumerate(rows):
        spans = [(bar.start_ms, max(bar.ms, timeline.length_ms / 1000)) for bar in timeline.bars if bar.row == row]
        numbered = row[0].isdigit()
        axes.broken_barh(
            spans,
            (y - 0.35, 0.7),
            facecolor=_DARK if numbered else _LIGHT,
            edgecolor=_DARK,
            linewidth=0.3,
        )
    axes.set_yticks(range(len(rows)), rows, fontsize=_FONT)
    axes.invert_yaxis()
    axes.set_xlim(0, timeline.length_ms)
    axes.tick_params(labelsize=_FONT)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel(f"ms of an iteration of rank {timeline.rank}, its calls marked by line", fontsize=_FONT)
    return figure


def ranks_figure(together: Together) -> Figure | None:
    """Draws two traced iterations of each rank on the ranks' common clock, in milliseconds: waiting and transfer of
    their collectives. None for ranks without common collectives."""
    if not together.late:
        return None
    ranks = sorted(together.spans, key=lambda rank: -together.late[rank].ms)[:_RANKS]
    ranks.sort()
    zero = min(together.iterations[rank][0][0] for rank in ranks)
    end = max(together.iterations[rank][:2][-1][1] for rank in ranks)
    figure = Figure(figsize=(_WIDTH, 0.28 * len(ranks) + 1.1), layout="constrained")
    axes = figure.add_subplot()
    for y, rank in enumerate(ranks):
        iterations = [(begin - zero, stop - begin) for begin, stop in together.iterations[rank][:2]]
        axes.broken_barh(iterations, (y - 0.4, 0.8), facecolor=_LIGHT, edgecolor="white", linewidth=0.8)
        pairs = list(zip(together.spans[rank], together.arrived, strict=True))
        waits = [(span.start - zero, max(0.0, min(at, span.end) - span.start)) for span, at in pairs]
        transfers = [(max(at, span.start) - zero, max(0.0, span.end - max(at, span.start))) for span, at in pairs]
        for spans, color in ((waits, _WAITS), (transfers, _DARK)):
            axes.broken_barh(spans, (y - 0.3, 0.6), facecolor=color)
    axes.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks], fontsize=_FONT)
    axes.invert_yaxis()
    axes.set_xlim(0, end - zero)
    axes.tick_params(labelsize=_FONT)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("ms on the ranks' common clock, under the profiler", fontsize=_FONT)
    names = ((_LIGHT, "iteration"), (_WAITS, "waits in a collective"), (_DARK, "transfers"))
    figure.legend(
        handles=[Patch(color=c, label=n) for c, n in names], loc="outside upper left", ncols=3, fontsize=_FONT
    )
    return figure
