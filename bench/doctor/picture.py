"""The timeline of an iteration: calls of torch, findings by number, and the GPU's work, on one time axis."""

from matplotlib.figure import Figure

from .diagnosis import Timeline

_FONT = 8
_WIDTH = 8.32
"""Inches."""
_FINDINGS = 10
"""Findings with a row."""


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
            facecolor="#1b3a57" if numbered else "#c4d7e6",
            edgecolor="#1b3a57",
            linewidth=0.3,
        )
    axes.set_yticks(range(len(rows)), rows, fontsize=_FONT)
    axes.invert_yaxis()
    axes.set_xlim(0, timeline.length_ms)
    axes.tick_params(labelsize=_FONT)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel(f"ms of an iteration of rank {timeline.rank}, its calls marked by line", fontsize=_FONT)
    return figure
