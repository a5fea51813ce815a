"""What the runs of a ladder say of its rungs, and the ladder as tables."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from rich import box
from rich.table import Table

from dlrm_bench.bench.compare.sides import Side, side_of_records
from dlrm_bench.bench.records.ladder import HostCost, Ladder, RungResult, RungSpread, read_ladder
from dlrm_bench.bench.records.record import Record, read_record
from dlrm_bench.bench.stats.repetitions import detectable, finds, finds_from, holm, runs_needed
from dlrm_bench.bench.stats.series import CONFIDENCE, summary_statistics
from dlrm_bench.bench.stats.statistics import Estimate, Ratio, compare, student_t
from dlrm_bench.bench.stats.variance import agree_by_luck, levels
from dlrm_bench.dlrm.benchmark import Rung

HOST_COLUMNS = ("CPU ms", "kernel launches", "graph launches", "stream syncs", "D2H copies", "GPU idle")

# At full size and MLPerf's learning rate, Adagrad's first steps amplify rounding differences: from the eighth iteration
# on, the losses of two correct programs differ.
_LOSSES_COMPARED = 5


AUTO_CONFIDENCE = 0.97
"""Confidence of intervals, and of tests, in a ladder that ran until it found a difference of some size.

To stop when the spread happens to look small makes 95 % intervals cover 92 % to 94 %; 97 % ones cover 95 % and more
(simulated in the tests of this file)."""


@dataclass(frozen=True, slots=True)
class Precision:
    """What a ladder with so many rounds can find."""

    detectable: float
    """Smallest difference that any rung shows from the first one or the one before, all of them looked at together."""
    rounds_needed: int | None
    """Rounds that find what is asked for, if runs go on to differ like these; None if it takes too many."""

    def in_words(self, rounds: int, detect: float) -> str:
        """Such as '6 rounds find differences from 3.10%; 2.00% takes about 11'."""
        found = f"{rounds} rounds {finds(self.detectable)}"
        if self.detectable <= detect:
            return found
        needed = "too many" if self.rounds_needed is None else f"about {self.rounds_needed}"
        return f"{found}; {detect:.2%} takes {needed}"


def precision_of(members: dict[str, list[Record]], detect: float) -> Precision:
    """What at least two rounds of rungs can find; members: the timed runs of each rung, one of each round."""
    sides = list(members.values())
    logs = [np.log([summary_statistics(record.latencies_ms)["p50"] for record in side]) for side in sides]
    rounds, others = len(logs[0]), len(logs) - 1
    pairs = [(logs[j], logs[i]) for i in range(1, len(logs)) for j in {0, i - 1}]
    spread = max((float(np.std(b - a, ddof=1)) for a, b in pairs), default=0.0)
    return Precision(
        detectable(spread, rounds, True, max(1, others), AUTO_CONFIDENCE),
        runs_needed(spread, detect, True, max(1, others), AUTO_CONFIDENCE),
    )


def read_judged_ladder(
    folder: Path, read: Callable[[Path], Record] = read_record
) -> tuple[Ladder, dict[str, list[Record]]]:
    """A ladder as read_ladder reads it, with ratios and intervals made anew from the raw times of its members.

    Older ladders have intervals of another kind in their files, in which the variance within runs counts twice.
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
    """What ladder.json says of each rung.

    members: the timed runs of each rung by its name, one of each round. host_costs: what the rungs' profiled runs
    measured; None where one failed, and absent where none was asked for. by_precision: whether the rounds ended because
    they found a difference of some size.
    """
    sides = [side_of_records(rung.name, members[rung.name]) for rung in rungs]
    confidence = AUTO_CONFIDENCE if by_precision else CONFIDENCE
    results = []
    for i, (rung, side) in enumerate(zip(rungs, sides, strict=True)):
        first, previous = (_speedup(sides[j], side, confidence) if i else Ratio(1.0, 1.0, 1.0) for j in (0, i - 1))
        medians = [float(np.median(series)) for series in side.series]
        records = [record.run["id"] for record in members[rung.name]]
        results.append(
            RungResult(
                name=rung.name,
                flags=list(rung.flags),
                record=records[int(np.argsort(medians)[len(medians) // 2])],
                records=records,
                median_ms=side.metrics()["p50"],
                speedup_vs_first=first.value,
                speedup_vs_previous=previous.value,
                ci95=_interval(first),
                ci95_vs_previous=_interval(previous),
                loss_difference=_loss_difference(members[rungs[0].name][0], members[rung.name][0]),
                p99_ms=side.metrics()["p99"],
                note=rung.note,
                detectable=_detectable(sides[0], side, len(sides) - 1, confidence) if i else None,
                spread=RungSpread(**asdict(levels(side.series, "p50", side.machines))),  # type: ignore[typeddict-item]
                host=host_costs.get(rung.name),
            )
        )
    return results


def host_cost(profiled: Record) -> HostCost:
    """What ladder.json says of a rung's profiled run. ValueError if the record has no counts of CUDA calls."""
    host, gpu = profiled.run["host"], profiled.run["gpu"]
    counted = [name for name in HostCost.__annotations__ if name not in ("record", "gpu_idle_fraction")]
    if host is None or any(name not in host for name in counted):
        raise ValueError(f"{profiled.folder} has no counts of CUDA calls: name a record of `dlrm-bench host`")
    return HostCost(
        record=profiled.run["id"],
        gpu_idle_fraction=gpu["idle_fraction"] if gpu else None,
        **{name: host[name] for name in counted},  # type: ignore[typeddict-item]
    )


def _detectable(first: Side, side: Side, comparisons: int, confidence: float) -> float | None:
    """The smallest difference from the first rung that the rounds find; None after one round."""
    if len(side.series) < 2:
        return None
    logs = [np.log([summary_statistics(run)["p50"] for run in each.series]) for each in (first, side)]
    spread = float(np.std(logs[1] - logs[0], ddof=1))
    return detectable(spread, len(side.series), True, comparisons, confidence)


def _speedup(slower: Side, faster: Side, confidence: float) -> Ratio:
    """Time of `slower` over that of `faster`, paired by round; the interval is unknown after one round."""
    comparison = compare(faster.series, slower.series, paired=True)
    ratio = comparison.estimates["p50"].ratio(confidence)
    return ratio if comparison.between_runs else Ratio(ratio.value, math.nan, math.nan)


def _interval(ratio: Ratio) -> list[float] | None:
    return None if math.isnan(ratio.low) else [ratio.low, ratio.high]


def _loss_difference(first: Record, other: Record) -> float | None:
    n = min(len(first.losses), len(other.losses), _LOSSES_COMPARED)
    a, b = (record.losses[:n].astype(np.float64) for record in (first, other))
    difference = float(np.max(np.abs(b / a - 1))) if n else math.nan
    return difference if math.isfinite(difference) else None


def ladder_table(ladder: Ladder) -> Table:
    """The ladder as a table; '~' follows a speed-up that is not proven, all rungs considered."""
    vs_first, vs_previous = proven(ladder, "first"), proven(ladder, "previous")
    rounds = f"{ladder['rounds']} round{'s' if ladder['rounds'] > 1 else ''}"
    title = f"{ladder['id']}: {rounds}, interleaved; ~: no difference proven"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    interval = "95 % interval" if ladder.get("detect") is None else "97 % interval"
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
            "" if (difference := rung.get("detectable")) is None else finds_from(difference),
            *_cells(rung["speedup_vs_previous"], rung["ci95_vs_previous"], rung["name"] in vs_previous),
            "unknown" if loss is None else f"{loss:.1e}",
        )
    return table


def ladder_spread_table(ladder: Ladder) -> Table | None:
    """What the runs of each rung differ by, level by level; None for older ladders that do not say."""
    if any("spread" not in rung for rung in ladder["rungs"]):
        return None
    title = "what a run's median varies by (standard deviation), level by level"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for column in ("rung", "iterations", "processes", "machines"):
        table.add_column(column, justify="left" if column == "rung" else "right", no_wrap=True)
    for rung in ladder["rungs"]:
        spread = (rung["spread"]["iteration"], rung["spread"]["process"], rung["spread"]["machine"])
        table.add_row(rung["name"], *("unknown" if value is None else f"{value:.2%}" for value in spread))
    return table


def ladder_host_table(ladder: Ladder) -> Table | None:
    """What an iteration costs the host on each rung; None where no rung has a profiled run."""
    if not any(rung["host"] for rung in ladder["rungs"]):
        return None
    table = Table(title="host, an iteration of one rank (profiled runs)", title_justify="left", box=box.SIMPLE_HEAD)
    for column in ("rung", *HOST_COLUMNS):
        table.add_column(column, justify="left" if column == "rung" else "right", no_wrap=True)
    for rung in ladder["rungs"]:
        table.add_row(rung["name"], *host_cells(rung["host"]))
    return table


def host_cells(host: HostCost | None) -> list[str]:
    """One cell for each of HOST_COLUMNS."""
    if host is None:
        return ["missing"] * len(HOST_COLUMNS)
    counts = (host["kernel_launches"], host["graph_launches"], host["stream_syncs"], host["d2h_copies"])
    idle = host["gpu_idle_fraction"]
    return [f"{host['cpu_ms']:.3f}", *(f"{count:g}" for count in counts), "no GPU" if idle is None else f"{idle:.0%}"]


def proven(ladder: Ladder, against: Literal["first", "previous"]) -> set[str]:
    """Names of the rungs whose time is proven to differ from the first rung's, or from that of the rung before.

    p values are those of the paired t test behind the intervals, corrected for all rungs being looked at (Holm):
    without that, 16 rungs of the same program show a false difference in two ladders of three.
    """
    others = ladder["rungs"][1:]
    confidence = CONFIDENCE if ladder.get("detect") is None else AUTO_CONFIDENCE
    p_values = [
        _p_value(*(rung["speedup_vs_first"], rung["ci95"]), ladder["rounds"], confidence)
        if against == "first"
        else _p_value(*(rung["speedup_vs_previous"], rung["ci95_vs_previous"]), ladder["rounds"], confidence)
        for rung in others
    ]
    return {rung["name"] for rung, p in zip(others, holm(p_values), strict=True) if p < 1 - confidence}


def _p_value(speedup: float, interval: list[float] | None, rounds: int, confidence: float) -> float:
    """Two-sided p value of the t test whose interval of the ratio this is; nan where one round was run."""
    if interval is None:
        return math.nan
    return Estimate(math.log(speedup), _error(interval, rounds, confidence), rounds - 1).p_value


def _error(interval: list[float], rounds: int, confidence: float) -> float:
    """Standard error of the logarithm of the ratio whose interval this is."""
    return math.log(interval[1] / interval[0]) / (2 * student_t((1 + confidence) / 2, rounds - 1))


def lucky(ladder: Ladder) -> Iterator[str]:
    """A sentence for each rung whose rounds agree better than the noise of their iterations lets expect."""
    first, *others = ladder["rungs"]
    confidence = CONFIDENCE if ladder.get("detect") is None else AUTO_CONFIDENCE
    for rung in others:
        known = [spread for each in (first, rung) if (spread := each.get("spread", {}).get("iteration")) is not None]
        if rung["ci95"] is None or len(known) < 2:
            continue
        between = _error(rung["ci95"], ladder["rounds"], confidence) * math.sqrt(ladder["rounds"])
        within = math.hypot(*known)
        if agree_by_luck(between, within, ladder["rounds"]):
            yield (
                f"the ratios of {rung['name']} to {first['name']} agree better from round to round ({between:.2%}) "
                f"than their iterations let expect ({within:.2%}): the interval is narrow by luck; run more rounds"
            )


def _cells(speedup: float, interval: list[float] | None, is_proven: bool) -> tuple[str, str]:
    if interval is None:
        return f"{speedup:.3f} x ~", "one round: unknown"
    low, high = interval
    if low == high:  # the rung itself
        return "", ""
    return f"{speedup:.3f} x{'' if is_proven else ' ~'}", f"{low:.3f} .. {high:.3f}"
