"""Results of a ladder's rungs from their runs, and the ladder as tables."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Literal

import numpy as np
from rich import box
from rich.table import Table

from dlrm_bench.bench.compare.comparison import Result
from dlrm_bench.bench.ladder.comparisons import agreement_by_luck, as_judged, judge_rungs
from dlrm_bench.bench.records.ladder import HostCost, Ladder, RungResult, RungSpread, read_ladder
from dlrm_bench.bench.records.record import Record, read_record
from dlrm_bench.bench.stats.repetitions import finds_from
from dlrm_bench.bench.stats.series import AUTO_CONFIDENCE, CONFIDENCE
from dlrm_bench.bench.stats.variance import levels
from dlrm_bench.dlrm.benchmark import Rung

HOST_COLUMNS = ("CPU ms", "kernel launches", "graph launches", "stream syncs", "D2H copies", "GPU idle")

# At full size and MLPerf's learning rate, Adagrad's first steps amplify rounding differences: from the eighth iteration
# on, the losses of two correct programs differ.
_LOSSES_COMPARED = 5


def read_judged_ladder(
    folder: Path, read: Callable[[Path], Record] = read_record
) -> tuple[Ladder, dict[str, list[Record]]]:
    """Reads a ladder, with ratios and intervals recomputed from the raw times of its runs.

    The intervals in older ladders' files are of another kind, in which the variance within runs counts twice.
    """
    ladder, members = read_ladder(folder, read)
    rungs = [Rung(rung["name"], tuple(rung["flags"]), rung["note"]) for rung in ladder["rungs"]]
    hosts = {rung["name"]: rung["host"] for rung in ladder["rungs"]}
    by_precision = ladder.get("detect") is not None
    judged = rung_results(rungs, members, hosts, by_precision=by_precision)
    for rung, as_written in zip(judged, ladder["rungs"], strict=True):
        rung["loss_difference"] = as_written["loss_difference"]
    return {**ladder, "rungs": judged}, members


def rung_results(
    rungs: Sequence[Rung],
    members: dict[str, list[Record]],
    host_costs: dict[str, HostCost | None],
    *,
    by_precision: bool = False,
) -> list[RungResult]:
    """Returns the results of each rung for ladder.json.

    members: the timed runs of each rung by name, one per round. host_costs: results of the rungs' profiled runs; None
    if a run failed, absent if none was requested. by_precision: whether the ladder ended once its rounds could find a
    difference of a given size.
    """
    judged = judge_rungs({rung.name: members[rung.name] for rung in rungs}, by_precision=by_precision)
    results = []
    for rung, one in zip(rungs, judged, strict=True):
        first, previous = one.over_first, one.over_previous
        medians = [float(np.median(series)) for series in one.side.series]
        records = [record.run["id"] for record in members[rung.name]]
        finds = first.detectable if first else None
        results.append(
            RungResult(
                name=rung.name,
                flags=list(rung.flags),
                record=records[int(np.argsort(medians)[len(medians) // 2])],
                records=records,
                median_ms=one.side.metrics()["p50"],
                speedup_vs_first=first.speedup.value if first else 1.0,
                speedup_vs_previous=previous.speedup.value if previous else 1.0,
                ci95=_interval(first),
                ci95_vs_previous=_interval(previous),
                over_first=as_judged(first),
                over_previous=as_judged(previous),
                loss_difference=_loss_difference(members[rungs[0].name][0], members[rung.name][0]),
                p99_ms=one.side.metrics()["p99"],
                note=rung.note,
                detectable=finds[1] if finds else None,
                detectable_interval=[finds[0], finds[2]] if finds else None,
                agrees_by_luck=agreement_by_luck(one),
                spread=RungSpread(**asdict(levels(one.side.series, "p50", one.side.machines))),  # type: ignore[typeddict-item]
                timed_s=one.side.shortest_s(),
                by_clock_ms=one.side.by_clock(),
                power_w=one.side.power_w,
                sm_clock_mhz=one.side.sm_clock_mhz,
                host=host_costs.get(rung.name),
            )
        )
    return results


def host_cost(profiled: Record) -> HostCost:
    """Returns the results of a rung's profiled run for ladder.json. ValueError if the record has no counts of CUDA
    calls."""
    host, gpu = profiled.run["host"], profiled.run["gpu"]
    counted = [name for name in HostCost.__annotations__ if name not in ("record", "gpu_idle_fraction")]
    if host is None or any(name not in host for name in counted):
        raise ValueError(f"{profiled.folder} has no counts of CUDA calls: name a record of `dlrm-bench host`")
    return HostCost(
        record=profiled.run["id"],
        gpu_idle_fraction=gpu["idle_fraction"] if gpu else None,
        **{name: host[name] for name in counted},  # type: ignore[typeddict-item]
    )


def _interval(result: Result | None) -> list[float] | None:
    """Returns the interval of the speed-up; [1, 1] for the first rung, None after one round."""
    if result is None:
        return [1.0, 1.0]
    low, high = result.speedup[1:]
    return None if math.isnan(low) else [low, high]


def _loss_difference(first: Record, other: Record) -> float | None:
    n = min(len(first.losses), len(other.losses), _LOSSES_COMPARED)
    a, b = (record.losses[:n].astype(np.float64) for record in (first, other))
    difference = float(np.max(np.abs(b / a - 1))) if n else math.nan
    return difference if math.isfinite(difference) else None


def ladder_table(ladder: Ladder) -> Table:
    """Returns the ladder as a table; '~' follows a speed-up that is not proven, corrected for all rungs."""
    vs_first, vs_previous = proven(ladder, "first"), proven(ladder, "previous")
    rounds = f"{ladder['rounds']} round{'s' if ladder['rounds'] > 1 else ''}"
    title = f"{ladder['id']}: {rounds}, interleaved; ~: no difference proven"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    interval = f"{confidence_in_words(ladder)} interval"
    columns = (
        "rung",
        "median\nms",
        "p99\nms",
        "vs\nfirst",
        interval,
        "finds\nfrom",
        "vs\nprevious",
        interval,
        "losses\ndiffer by",
    )
    for column in columns:
        table.add_column(column, justify="left" if column == "rung" else "right", no_wrap=True)
    for rung in ladder["rungs"]:
        loss = rung["loss_difference"]
        table.add_row(
            rung["name"],
            f"{rung['median_ms']:.3f}",
            f"{rung['p99_ms']:.3f}",
            *_cells(rung["speedup_vs_first"], rung["ci95"], rung["name"] in vs_first),
            _finds(rung),
            *_cells(rung["speedup_vs_previous"], rung["ci95_vs_previous"], rung["name"] in vs_previous),
            "unknown" if loss is None else f"{loss:.1e}",
        )
    return table


def _finds(rung: RungResult) -> str:
    value, interval = rung["detectable"], rung["detectable_interval"]
    return "" if value is None or interval is None else finds_from((interval[0], value, interval[1]))


def ladder_spread_table(ladder: Ladder) -> Table:
    """Returns a table of the spread of each rung's runs, level by level."""
    title = "standard deviation of a run's median, level by level"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for column in ("rung", "iterations", "processes", "machines"):
        table.add_column(column, justify="left" if column == "rung" else "right", no_wrap=True)
    for rung in ladder["rungs"]:
        spread = (rung["spread"]["iteration"], rung["spread"]["process"], rung["spread"]["machine"])
        table.add_row(rung["name"], *("unknown" if value is None else f"{value:.2%}" for value in spread))
    return table


def ladder_clock_table(ladder: Ladder) -> Table:
    """Returns a table of the time by the clock, median, power and SM clock of each rung."""
    title = "elapsed time over iterations beside the median, and the GPUs meanwhile"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for column in ("rung", "timed, s", "median, ms", "by clock, ms", "W a GPU", "SM clock, MHz"):
        table.add_column(column, justify="left" if column == "rung" else "right", no_wrap=True)
    for rung in ladder["rungs"]:
        gpu = ("" if value is None else f"{value:.0f}" for value in (rung["power_w"], rung["sm_clock_mhz"]))
        times = (f"{rung[name]:.3f}" for name in ("median_ms", "by_clock_ms"))
        table.add_row(rung["name"], f"{rung['timed_s']:.1f}", *times, *gpu)
    return table


def ladder_host_table(ladder: Ladder) -> Table | None:
    """Returns a table of the host's cost per iteration of each rung; None if no rung has a profiled run."""
    if not any(rung["host"] for rung in ladder["rungs"]):
        return None
    table = Table(title="host cost per iteration, one rank (profiled runs)", title_justify="left", box=box.SIMPLE_HEAD)
    for column in ("rung", *HOST_COLUMNS):
        table.add_column(column, justify="left" if column == "rung" else "right", no_wrap=True)
    for rung in ladder["rungs"]:
        table.add_row(rung["name"], *host_cells(rung["host"]))
    return table


def host_cells(host: HostCost | None) -> list[str]:
    """Returns a cell for each of HOST_COLUMNS."""
    if host is None:
        return ["missing"] * len(HOST_COLUMNS)
    counts = (host["kernel_launches"], host["graph_launches"], host["stream_syncs"], host["d2h_copies"])
    idle = host["gpu_idle_fraction"]
    return [f"{host['cpu_ms']:.3f}", *(f"{count:g}" for count in counts), "no GPU" if idle is None else f"{idle:.0%}"]


def confidence_in_words(ladder: Ladder) -> str:
    """Returns the confidence of a ladder's intervals: '95 %', or '97 %' of one that --rounds auto ended."""
    return f"{(CONFIDENCE if ladder.get('detect') is None else AUTO_CONFIDENCE) * 100:.0f} %"


def proven(ladder: Ladder, against: Literal["first", "previous"]) -> set[str]:
    """Returns the names of the rungs whose time is proven to differ from the first rung's, or from the previous rung's.

    ladder: as returned by read_judged_ladder; older files lack its judgement.
    """
    judged = {
        rung["name"]: rung["over_first"] if against == "first" else rung["over_previous"] for rung in ladder["rungs"]
    }
    return {name for name, one in judged.items() if one is not None and one["proven"]}


def lucky(ladder: Ladder) -> list[str]:
    """Returns a sentence for each rung whose rounds agree better than the noise of their iterations predicts."""
    return [text for rung in ladder["rungs"] if (text := rung["agrees_by_luck"]) is not None]


def _cells(speedup: float, interval: list[float] | None, is_proven: bool) -> tuple[str, str]:
    if interval is None:
        return f"{speedup:.3f} x ~", "one round: unknown"
    low, high = interval
    if speedup == low == high == 1:  # a rung compared with itself
        return "", ""
    return f"{speedup:.3f} x{'' if is_proven else ' ~'}", f"{low:.3f} .. {high:.3f}"
