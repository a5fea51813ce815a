"""Tables of the model of unpooled tables: its predictions, and the published runs of the same global batches."""

from collections.abc import Sequence

from rich import box
from rich.table import Table

from dlrm_bench.bench.scale.unpooled import UnpooledPoint, UnpooledScaling
from dlrm_bench.dlrm.benchmark import Published, ToTarget


def points_table(scaling: UnpooledScaling, points: Sequence[UnpooledPoint]) -> Table:
    """Returns a table with a row for each number of nodes."""
    table = Table(
        title=f"{scaling.kind}, fitted to {scaling.fitted_to}: GPU work {scaling.gpu_us / 1e3:.1f} ms",
        caption=(
            "ms: on samples as the record's; in a run: as the mean of a run to the target, like all columns after it\n"
            "bound by: the resource that is always busy; dependencies: GPU and network wait for one another\n"
            "minutes: iterations and evaluations up to the target, without the start"
        ),
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
    )
    columns = ("nodes", "GPUs", "global batch", "ms", "in a run", "exchanges", "bound by", "samples/s")
    for name in (*columns, "evaluation, s", "minutes"):
        table.add_column(name, justify="left" if name == "bound by" else "right")
    for point in points:
        in_run = point.in_run
        table.add_row(
            str(point.topology.nodes),
            str(point.topology.world_size),
            str(point.global_batch_size),
            f"{point.steady.iteration_us / 1e3:.1f}",
            f"{in_run.iteration_us / 1e3:.1f}",
            f"{(in_run.iteration_us - in_run.busy_us['GPU']) / 1e3:.1f}",
            in_run.bound_by,
            f"{point.global_batch_size / in_run.iteration_us * 1e6:,.0f}",
            f"{point.evaluation_s:.1f}",
            _minutes(point.minutes),
        )
    return table


def published_table(scaling: UnpooledScaling, points: Sequence[UnpooledPoint]) -> Table | None:
    """Returns the benchmark's published runs beside the predictions for the same global batch; None if there are
    none."""
    ruleset = scaling.benchmark.ruleset
    known = () if ruleset is None else ruleset.published
    same = [(row, point) for row in known for point in points if row.global_batch_size == point.global_batch_size]
    if not same:
        return None
    table = Table(
        title="beside published runs of the same global batch: other programs, other GPUs",
        caption=(
            "published ms are means of whole runs, and minutes include their start\n"
            "by the rules: without evaluations before the first that the rules ask for"
        ),
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("published")
    of_both = ("ms", "evaluation, s", "minutes")
    for name in ("global batch", *of_both, "by the rules", "our GPUs", *of_both):
        table.add_column(name, justify="right")
    for row, point in same:
        table.add_row(
            f"{row.system}, {row.source}",
            str(row.global_batch_size),
            f"{row.ms_per_iteration:.1f}",
            "" if row.eval_seconds is None else f"{row.eval_seconds:.1f}",
            _minutes(row.minutes),
            _minutes(_by_the_rules(row, point.to_target)),
            str(point.topology.world_size),
            f"{point.in_run.iteration_us / 1e3:.1f}",
            f"{point.evaluation_s:.1f}",
            _minutes(point.minutes),
        )
    return table


def _by_the_rules(row: Published, to_target: ToTarget | None) -> float | None:
    """Returns the minutes of a run that evaluates on the whole grid, without the evaluations that the rules skip."""
    if row.minutes is None or row.eval_seconds is None or to_target is None:
        return None
    return row.minutes - to_target.skipped * row.eval_seconds / 60


def _minutes(minutes: float | None) -> str:
    return "" if minutes is None else f"{minutes:.1f}"
