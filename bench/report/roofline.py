"""A roofline plot: FLOP per second of kernels over their FLOP per byte of memory.

S. Williams, A. Waterman, D. Patterson, "Roofline: an insightful visual performance model for multicore architectures",
2009. A kernel under the slope is bound by memory, one under the flat roof by the tensor cores.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console

from dlrm_bench.bench.limits.bound import NO_BOUND, RooflinePoint, bound_table, roofline_points
from dlrm_bench.bench.records.limits import Limits
from dlrm_bench.bench.records.schema import RunRecord
from dlrm_bench.bench.report.plots import new_figure
from dlrm_bench.dlrm.runtime.gpu_types import GpuRates

_FONT = 8
_DPI = 160


def print_bounds(
    console: Console, runs: Sequence[RunRecord], picture: Path | None = None, limits: Limits | None = None
) -> int:
    """Prints each record's bound_table, and draws the plot; returns the exit status. ValueError without a bound.

    limits: as for bound_of.
    """
    if picture is not None:
        write_roofline(runs, picture)
    for run in runs:
        table = bound_table(run, limits)
        if table is None:
            raise ValueError(f"{run['id']}: {NO_BOUND}")
        console.print(table)
    return 0


def write_roofline(runs: Sequence[RunRecord], path: Path) -> None:
    """Draws the first profiled run on a GPU with known rates that has known work. ValueError if there is none."""
    for run in runs:
        found = roofline_points(run)
        if found is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            roofline(run["id"], *found, run["config"]["precision"]).savefig(path, dpi=_DPI)
            return
    raise ValueError(
        "--roofline needs a profiled run in --above, on a GPU with known rates and with GEMMs, table lookups or table "
        "updates among its kernels: see dlrm-bench host"
    )


def roofline(name: str, points: Sequence[RooflinePoint], rates: GpuRates, precision: str) -> Figure:
    """Returns the roofs of a GPU, and each piece of work as a point."""
    figure, axes = new_figure(3.2)
    most = rates.flop[precision]
    least_x = min(0.1, *(point.intensity for point in points)) / 2
    x = np.geomspace(least_x, 10 * most / rates.memory, 200)
    axes.loglog(x, np.minimum(most, x * rates.memory) / 1e12, color="#1b3a57", linewidth=1.2)
    notes = []
    for number, point in enumerate(points, start=1):
        axes.plot(point.intensity, point.flop_per_s / 1e12, "o", color="#1b3a57", markersize=4)
        where = (point.intensity, point.flop_per_s / 1e12)
        axes.annotate(str(number), where, (5, -4), textcoords="offset points", fontsize=_FONT)
        share = point.flop_per_s / min(most, point.intensity * rates.memory)
        notes.append(f"{number} {point.name}, {point.us:.0f} us: {share:.0%} of the roof")
    axes.text(0.98, 0.05, "\n".join(notes), transform=axes.transAxes, fontsize=_FONT, ha="right")
    axes.set_xlabel("FLOP per byte of memory", fontsize=_FONT)
    axes.set_ylabel("TFLOP/s", fontsize=_FONT)
    axes.set_title(
        f"{name}\n{most / 1e12:.0f} TFLOP/s in {precision}, {rates.memory / 1e12:.1f} TB/s", fontsize=_FONT, loc="left"
    )
    return figure
