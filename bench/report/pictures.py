"""The pictures of a report: their kinds, content and names. plots.py draws them."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from dlrm_bench.bench.compare.sides import Side
from dlrm_bench.bench.limits.bound import roofline_points
from dlrm_bench.bench.limits.floor import WORK_SHOWN, Work, caveats_of_floor
from dlrm_bench.bench.mlperf.published_logs import read_mlperf_log
from dlrm_bench.bench.profile.kernel_names import STAGES
from dlrm_bench.bench.records.limits import Limits
from dlrm_bench.bench.records.record import Record
from dlrm_bench.bench.report import plots
from dlrm_bench.bench.report.families import same_work
from dlrm_bench.bench.report.published import PUBLISHED
from dlrm_bench.bench.report.roofline import roofline
from dlrm_bench.bench.report.sources import Family, machine_in_words
from dlrm_bench.dlrm.benchmarks import benchmark_of

Works = Mapping[str, tuple[str | None, list[Work]]]
"""The result of families.works."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A figure with its texts, not yet drawn."""

    kind: str
    """Its kind: 'ladder', 'distributions', 'kernels', ..."""
    name: str
    """Name of the PNG file, without extension."""
    alt: str
    caption: str
    draw: Callable[[], Figure]


def of_family(family: Family, works: Works, limits: Sequence[Limits], headline: bool) -> list[Picture]:
    """Returns the pictures of a ladder, or of the runs in no ladder; pictures of the headline have fixed names.

    A ladder that is not the headline has fewer pictures: its tables have the rest.
    """
    place = "headline" if headline else file_name(family.name)
    drawn = [*_ladder(family, place), *_distributions(family, place), *_timelines(family, place)]
    complete = headline or family.ladder is None
    if complete or any(beside is not None for beside, _ in works.values()):
        drawn += [*_kernels(family, place, works), *_roofline(family, place)]
    if complete:
        drawn += [*_stages(family, place), *_floors(family, place, limits), *_series(family, place)]
    return drawn


def file_name(text: str) -> str:
    """Returns `text` with a dash in place of characters that do not belong in a file name."""
    return re.sub(r"[^\w.-]+", "-", text)


def numbered(pictures: Sequence[Picture], taken: set[str]) -> list[Picture]:
    """Returns pictures whose names are not in `taken`, to which they are added; a repeated name gets a number. File
    names of different families, such as 63/ladder and 63-ladder, may be equal."""
    found = []
    for picture in pictures:
        names = (picture.name, *(f"{picture.name}-{number}" for number in range(2, len(taken) + 3)))
        name = next(each for each in names if each not in taken)
        taken.add(name)
        found.append(replace(picture, name=name))
    return found


def _ladder(family: Family, place: str) -> Iterator[Picture]:
    ladder = family.ladder
    if ladder is not None:
        alone = " A single round proves nothing." if ladder["rounds"] == 1 else ""
        yield Picture(
            kind="ladder",
            name=f"{place}-ladder",
            alt="Median latency of each rung, and the time that it saves over the previous rung",
            caption=f"{family.name}: median latency of an iteration on each rung, the time saved or lost against the "
            f"previous rung, and in brackets the ratio to the first. {family.title()}, interleaved.{alone}",
            draw=partial(plots.waterfall, ladder),
        )


def _distributions(family: Family, place: str) -> Iterator[Picture]:
    if family.sides:
        series = {name: (np.concatenate(side.series), side.metrics()) for name, side in family.sides.items()}
        yield Picture(
            kind="distributions",
            name=f"{place}-distributions",
            alt="Range, percentiles and median of the latency of an iteration, for each configuration",
            caption=f"{family.name}: every iteration after the warm-up, slowest rank, all runs of a configuration "
            "together. No outlier is left out. Median and p99 are geometric means over the runs, as in the tables.",
            draw=partial(plots.distributions, series),
        )


def _kernels(family: Family, place: str, works: Works) -> Iterator[Picture]:
    """Yields a picture of the last profiled run with known ceilings, or else of the last one: ceilings matter more than
    a later rung."""
    shown = [label for label, (beside, _) in works.items() if beside is not None] or list(works)
    if shown:
        label = shown[-1]
        beside, work = works[label]
        rows = [(each.name, each.us, each.best_us) for each in work[:WORK_SHOWN]]
        ceilings = f", beside the ceilings of {beside}" if beside else "; no limits record of this work is known"
        yield Picture(
            kind="kernels",
            name=f"{place}-kernels",
            alt=f"The longest kernels of an iteration of {label}, beside their ceilings",
            caption=f"{family.name}, {label}: the longest kernels of an iteration{ceilings}.",
            draw=partial(plots.work, rows),
        )


def _roofline(family: Family, place: str) -> Iterator[Picture]:
    """Yields a picture of the last profiled run on a GPU with known rates, and of its work with known FLOP and
    bytes."""
    for label, profiled in reversed(family.profiled.items()):
        found = roofline_points(profiled.run)
        if found is not None:
            precision = profiled.run["config"]["precision"]
            yield Picture(
                kind="roofline",
                name=f"{place}-roofline",
                alt=f"Kernels of {label} under the roofline of its GPU",
                caption=f"{family.name}, {label}: FLOP per second of kernels over their FLOP per byte of memory, under "
                "the GPU's best measured rates (TF32 and fp32: data sheet).",
                draw=partial(roofline, label, *found, precision),
            )
            return


def _stages(family: Family, place: str) -> Iterator[Picture]:
    for kind, field_name, where in (("stages_host", "host_stages_ms", "host"), ("stages_gpu", "stages_ms", "GPU")):
        runs = {label: p.run for label, p in family.profiled.items() if where == "host" or p.run["gpu"] is not None}
        times: dict[str, Any] = {label: run.get(field_name) for label, run in runs.items() if run.get(field_name)}
        if times:
            yield Picture(
                kind=kind,
                name=f"{place}-{kind}",
                alt=f"Time of each stage on the {where}, stacked",
                caption=f"{family.name}: time of each stage on the {where}, from profiled runs. Stages that overlap "
                "add up to more than an iteration takes.",
                draw=partial(plots.stages, times),
            )


def _timelines(family: Family, place: str) -> Iterator[Picture]:
    known = {label: profiled.run for label, profiled in family.profiled.items() if profiled.run.get("timeline")}
    if known:
        places = sorted({"on the GPU" if run["gpu"] else "on the host" for run in known.values()})
        yield Picture(
            kind="timelines",
            name=f"{place}-timelines",
            alt="When each stage of an iteration begins and ends, for each profiled run",
            caption=f"{family.name}: when each stage ran within an iteration, {' or '.join(places)}; median of the "
            "traced iterations. Bars that share a span of time overlap; busy is the time in which a stage had work.",
            draw=partial(plots.timelines, {label: run["timeline"] or {} for label, run in known.items()}),
        )


def _floors(family: Family, place: str, limits: Sequence[Limits]) -> Iterator[Picture]:
    """Yields a picture of the newest limits of the family's work."""
    for each in sorted(limits, key=lambda one: one["created"], reverse=True):
        same = {name: fit for name, records in family.timed.items() if (fit := same_work(each, records))}
        stages = {name: p for name, p in family.profiled.items() if same_work(each, [p]) and p.run["stages_ms"]}
        least = each["floor_ms"]
        if same:
            medians = [(name, least["iteration"], family.sides[name].metrics()["p50"]) for name in same]
            yield Picture(
                kind="floor",
                name=f"{place}-floor",
                alt="Median latency of each configuration beside the floor of an iteration",
                caption=f"{family.name}: median latency beside the floor of {each['id']}.{_doubtful(each, same)}",
                draw=partial(plots.above_floor, medians),
            )
        if stages:
            label, profiled = list(stages.items())[-1]
            times = profiled.run["stages_ms"] or {}
            rows = [(stage, least[stage], times[stage]) for stage in STAGES]
            yield Picture(
                kind="floor_stages",
                name=f"{place}-floor_stages",
                alt=f"Stages of {label} beside their floor",
                caption=f"{family.name}: stages of {label} beside the floor of {each['id']}."
                + _doubtful(each, {label: [profiled]}),
                draw=partial(plots.above_floor, rows),
            )
        if same or stages:
            return


def _doubtful(limits: Limits, beside: dict[str, list[Record]]) -> str:
    """Returns reasons why the floor may not apply to these records, by label; empty without a reason."""
    found: dict[str, list[str]] = {}
    for label, records in beside.items():
        for doubt in dict.fromkeys(doubt for record in records for doubt in caveats_of_floor(limits, record.run)):
            found.setdefault(doubt, []).append(label)
    return "".join(f" Doubtful: {doubt} ({', '.join(labels)})." for doubt, labels in found.items())


def _series(family: Family, place: str) -> Iterator[Picture]:
    """Yields a picture of every iteration of the middle run, for the first and for the last configuration."""
    for name in dict.fromkeys((*list(family.timed)[:1], *list(family.timed)[-1:])):
        records = family.timed[name]
        record = records[len(records) // 2]
        yield Picture(
            kind="series",
            name=f"{place}-series-{file_name(name)}",
            alt=f"Latency of every iteration of {name}",
            caption=f"{family.name}: {name}, run {record.run['id']}. {_conditions_in_words(record)}",
            draw=partial(
                plots.time_series,
                name,
                record.iterations_ms.max(axis=0),
                record.run["warmup_iterations"],
                series_marks(record),
            ),
        )


def _conditions_in_words(record: Record) -> str:
    conditions = record.run.get("conditions")
    if conditions is None:
        return "Clocks and garbage collections were not recorded."
    collections = len(conditions["gc_iterations"])
    throttled = {True: "The GPU was throttled.", False: "The GPU was not throttled.", None: "Throttling is not known."}
    clock = conditions["sm_clock_mhz"]
    return " ".join(
        (
            f"Garbage collections: {collections or 'none'}.",
            throttled[conditions["throttled"]],
            f"SM clock {clock[0]:g} to {clock[2]:g} MHz." if clock else "",
        )
    )


def series_marks(record: Record) -> plots.SeriesMarks:
    """Returns the events of a run, in its own iterations. The MLPerf log places evaluations by their fraction of the
    epoch; that of a run that resumed begins with the evaluations before, which are left out."""
    conditions, training, n = record.run.get("conditions"), record.run["training"], record.iterations_ms.shape[1]
    checkpoints = record.run.get("checkpoints")
    resumed = checkpoints["resumed"] if checkpoints else None
    before = resumed["iteration"] if resumed else 0
    evals: list[int] = []
    log = record.folder / "result_0.txt"
    if log.exists() and training and training["epoch_num"]:
        epochs = read_mlperf_log(log)[0].eval_epochs
        places = (round(epoch / training["epoch_num"] * (before + n)) - before for epoch in epochs)
        evals = [place for place in places if place > 0]
    return plots.SeriesMarks(
        evals=evals,
        collections=conditions["gc_iterations"] if conditions else (),
        throttled=[(s["first_iteration"], s["last_iteration"]) for s in conditions["throttling"]] if conditions else (),
    )


def published(shown: Sequence[Family], logs: Sequence[Side]) -> list[Picture]:
    """Returns a picture for each benchmark, of published results and ours at the same global batch; none for a
    benchmark without comparable results."""
    drawn = (_published(name, shown, logs) for name in PUBLISHED)
    return [picture for picture in drawn if picture is not None]


def _published(benchmark: str, shown: Sequence[Family], logs: Sequence[Side]) -> Picture | None:
    known = PUBLISHED[benchmark]
    unnamed: list[list[str]] = [[]] if benchmark == next(iter(PUBLISHED)) else []  # logs older than a second benchmark
    same_work = [log for log in logs if log.settings["benchmark"] in (*unnamed, [benchmark])]
    ours = [(f"log {Path(log.label).name}", log) for log in same_work] + _fastest(shown, benchmark)
    rows: list[tuple[str, float, bool]] = []
    for batch in sorted({row.global_batch_size for row in known}):
        same = [(f"{words}, {batch}", side) for words, side in ours if side.global_batch_size == batch]
        theirs = [row for row in known if row.global_batch_size == batch and same]
        rows += [(f"{row.system}, {row.source}, {batch}", row.ms_per_iteration, False) for row in theirs]
        rows += [(words, side.by_clock(), True) for words, side in same]
    if not rows:
        return None
    return Picture(
        kind="published",
        name=f"published-{benchmark}",
        alt=f"Milliseconds per iteration of published MLPerf results of {benchmark} and of ours",
        caption="System, software and round, global batch; ours ran on GPUs with full-size tables.",
        draw=partial(plots.published, rows),
    )


def _fastest(shown: Sequence[Family], benchmark: str) -> list[tuple[str, Side]]:
    """Returns the first and fastest rung of the newest ladder, or the fastest single run, by number of GPUs and global
    batch.

    Only runs of the benchmark, on GPUs with full-size tables; each with its name.
    """
    found: dict[tuple[int, int | None], list[tuple[str, Side]]] = {}
    for family in sorted(shown, key=lambda each: each.ladder["created"] if each.ladder else "", reverse=True):
        kinds: dict[tuple[int, int | None], list[str]] = {}
        for name, side in family.sides.items():
            record = family.timed[name][0]
            if record.run["config"].get("benchmark") == benchmark and _on_gpus_with_full_tables(record):
                machine = record.run["machine"]
                kinds.setdefault((machine["gpus"], side.global_batch_size), []).append(name)
        for kind, names in kinds.items():
            fastest = min(names, key=lambda name: family.sides[name].by_clock())
            chosen = dict.fromkeys((names[0], fastest)) if family.ladder else [fastest]
            words = machine_in_words(family.timed[fastest][0].run["machine"])
            found.setdefault(kind, [(f"{words}, {family.name}: {name}", family.sides[name]) for name in chosen])
    return [each for sides in found.values() for each in sides]


def _on_gpus_with_full_tables(record: Record) -> bool:
    config = record.run["config"]
    benchmark = benchmark_of(config)
    closed = [each for each in benchmark.presets.values() if each.division == "closed"] if benchmark else []
    if not record.run["machine"]["gpus"] or benchmark is None:
        return False
    rows = benchmark.restored(config).model.tables.rows
    return any(each.training.model.tables.rows == rows for each in closed)
