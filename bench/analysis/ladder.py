"""Ladders as files and as tables."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NotRequired, TypedDict

import numpy as np
from rich import box
from rich.table import Table

from dlrm_bench.bench.analysis.compare import Side, side_of_records
from dlrm_bench.bench.ladder.rungs import Rung
from dlrm_bench.bench.records.json_file import read_json
from dlrm_bench.bench.records.record import Record, read_record
from dlrm_bench.bench.records.statistics import Ratio, compare

LADDER_JSON = "ladder.json"

LADDER_SCHEMA = 1

HOST_COLUMNS = ("CPU ms", "kernel launches", "graph launches", "stream syncs", "D2H copies", "GPU idle")

# At full size and MLPerf's learning rate, Adagrad's first steps amplify what rounding makes of them: from the eighth
# iteration on two correct programs are apart.
_LOSSES_COMPARED = 5


class HostCost(TypedDict):
    """What a rung's instrumented twin says of an iteration, mean of the ranks."""

    record: str
    """The twin's."""
    cpu_ms: float
    wall_ms: float
    """Of an iteration without the profiler."""
    kernel_launches: float
    graph_launches: float
    stream_syncs: float
    d2h_copies: float
    gpu_idle_fraction: float | None
    """Of the traced iterations: see bench/measure/trace.py. None without a GPU."""


class RungResult(TypedDict):
    """A rung in ladder.json. A speed-up of 2 means half the time; intervals are 95 %, None where one round was run."""

    name: str
    flags: list[str]
    record: str
    """The member whose median is the middle one."""
    records: list[str]
    """One of each round, in order."""
    median_ms: float
    """Geometric mean of the members' medians."""
    speedup_vs_first: float
    speedup_vs_previous: float
    ci95: list[float] | None
    """Of speedup_vs_first."""
    ci95_vs_previous: list[float] | None
    loss_difference: float | None
    """Largest relative difference from the first rung's losses over the first 5 iterations."""
    p99_ms: NotRequired[float]
    """As median_ms. From here on optional: ladders of before have none of it."""
    note: NotRequired[str]
    """What the rung takes away, in a sentence; may be empty."""
    host: NotRequired[HostCost | None]
    """None where no twin was asked for, or it failed."""


class Ladder(TypedDict):
    """ladder.json."""

    schema: int
    id: str
    created: str
    command: str
    rounds: int
    seed: int
    rungs: list[RungResult]
    order: list[str]
    """Ids of all members in the order in which they ran."""


def host_cost(twin: Record) -> HostCost:
    """What a ladder says of a twin. ValueError if the record is not one that counted."""
    host, gpu = twin.run["host"], twin.run["gpu"]
    counted = [name for name in HostCost.__annotations__ if name not in ("record", "gpu_idle_fraction")]
    if host is None or any(name not in host for name in counted):
        raise ValueError(f"{twin.folder} is no record of `dlrm-bench host`: it counts no calls")
    return HostCost(
        record=twin.run["id"],
        gpu_idle_fraction=gpu["idle_fraction"] if gpu else None,
        **{name: host[name] for name in counted},  # type: ignore[typeddict-item]
    )


def read_ladder(path: Path) -> tuple[Ladder, dict[str, Side]]:
    """ladder.json in folder `path`, its optional fields filled in, and each rung's members.

    ValueError, naming the file, if it is damaged.
    """
    file = path / LADDER_JSON
    try:
        ladder = read_json(file)
    except OSError as error:
        raise ValueError(f"{file} cannot be read ({error.strerror}): {path} is no ladder") from error
    if not isinstance(ladder, dict) or ladder.get("schema") != LADDER_SCHEMA:
        raise ValueError(f"{file} is no ladder of schema {LADDER_SCHEMA}: use the version of the harness that wrote it")
    missing = [name for name in Ladder.__annotations__ if name not in ladder]
    for rung in ladder.get("rungs", []):
        missing += [f"rungs.{name}" for name in sorted(RungResult.__required_keys__) if name not in rung]
    if missing:
        raise ValueError(f"{file} lacks {', '.join(missing)}")
    members = {
        rung["name"]: side_of_records(rung["name"], [read_record(path / member) for member in rung["records"]])
        for rung in ladder["rungs"]
    }
    for rung in ladder["rungs"]:
        rung.setdefault("p99_ms", members[rung["name"]].metrics()["p99"])
        rung.setdefault("note", "")
        rung.setdefault("host", None)
    return ladder, members  # type: ignore[return-value]


def ladder_table(ladder: Ladder) -> Table:
    """The ladder for people: '~' behind a speed-up whose interval holds 1."""
    title = f"{ladder['id']}: {ladder['rounds']} rounds, interleaved"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    columns = (
        "rung",
        "median ms",
        "p99 ms",
        "vs first",
        "95 % interval",
        "vs previous",
        "95 % interval",
        "loss off by",
    )
    for column in columns:
        table.add_column(column, justify="left" if column == "rung" else "right", no_wrap=True)
    for rung in ladder["rungs"]:
        loss = rung["loss_difference"]
        table.add_row(
            rung["name"],
            f"{rung['median_ms']:.3f}",
            f"{rung['p99_ms']:.3f}",
            *_cells(rung["speedup_vs_first"], rung["ci95"]),
            *_cells(rung["speedup_vs_previous"], rung["ci95_vs_previous"]),
            "unknown" if loss is None else f"{loss:.1e}",
        )
    return table


def ladder_host_table(ladder: Ladder) -> Table | None:
    """What an iteration costs the host on each rung; None where no rung has a twin."""
    if not any(rung["host"] for rung in ladder["rungs"]):
        return None
    table = Table(
        title="host, an iteration of one rank (instrumented twins)", title_justify="left", box=box.SIMPLE_HEAD
    )
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


def _cells(speedup: float, interval: list[float] | None) -> tuple[str, str]:
    if interval is None:
        return f"{speedup:.3f} x", "one round: unknown"
    low, high = interval
    if low == high:  # the rung itself
        return "", ""
    proven = " ~" if low <= 1 <= high else ""
    return f"{speedup:.3f} x{proven}", f"{low:.3f} .. {high:.3f}"


def rung_results(
    rungs: Sequence[Rung], members: dict[str, list[Record]], twins: dict[str, HostCost | None]
) -> list[RungResult]:
    sides = [side_of_records(rung.name, members[rung.name]) for rung in rungs]
    results = []
    for i, (rung, side) in enumerate(zip(rungs, sides, strict=True)):
        first, previous = (_speedup(sides[j], side) if i else Ratio(1.0, 1.0, 1.0) for j in (0, i - 1))
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
                host=twins.get(rung.name),
            )
        )
    return results


def _speedup(slower: Side, faster: Side) -> Ratio:
    """Time of one over time of the other, round by round; the interval is unknown after one round."""
    comparison = compare(faster.series, slower.series, paired=True)
    ratio = comparison.ratios["p50"]
    return ratio if comparison.between_runs else Ratio(ratio.value, math.nan, math.nan)


def _interval(ratio: Ratio) -> list[float] | None:
    return None if math.isnan(ratio.low) else [ratio.low, ratio.high]


def _loss_difference(first: Record, other: Record) -> float | None:
    n = min(len(first.losses), len(other.losses), _LOSSES_COMPARED)
    a, b = (record.losses[:n].astype(np.float64) for record in (first, other))
    difference = float(np.max(np.abs(b / a - 1))) if n else math.nan
    return difference if math.isfinite(difference) else None
