"""One self-contained HTML page, and its pictures as PNG files, from records, ladders, limits and MLPerf logs.

dlrm-bench report results --out report

Folders are searched. Nothing is measured here, and every number on the page comes from a file that the page names.
"""

import base64
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from matplotlib.figure import Figure
from PIL import Image

from dlrm_bench.bench.analysis.floor import WORK_SHOWN, best_cells, caveats_of_floor
from dlrm_bench.bench.analysis.ladder import HOST_COLUMNS, host_cells
from dlrm_bench.bench.analysis.mlperf_logs import LOG_COLUMNS, log_row, read_mlperf_log
from dlrm_bench.bench.records.kernel_names import OTHER, STAGES
from dlrm_bench.bench.records.limits import Limits
from dlrm_bench.bench.records.record import Record
from dlrm_bench.bench.records.statistics import slowest_rank
from dlrm_bench.bench.report import plots
from dlrm_bench.bench.report.sources import (
    Material,
    all_doubts,
    collect,
    families,
    groups,
    machines,
    others,
    preset_of,
    same_work,
    twin_families,
    twins,
    works,
)

PAGE = "index.html"
_DPI = 200
_SERIES_SHOWN = 6
_KERNELS_DRAWN = 3
"""Twins whose kernels get a picture: the last ones, of those with limits if there are any; all have a table."""
_FLOORS_DRAWN = 3
"""Twins, the last ones, whose stages get a picture beside the floor."""


class Published(NamedTuple):
    """A published MLPerf result, from its logs: ms per iteration is train only."""

    system: str
    source: str
    global_batch_size: int
    ms_per_iteration: float
    minutes: float


PUBLISHED = (
    Published("8 x H200", "HugeCTR, NVIDIA v4.0", 55296, 3.25, 3.47),
    Published("8 x H200", "HugeCTR, HPE v5.0", 65536, 3.71, 3.44),
    Published("8 x H100", "HugeCTR, NVIDIA v4.0", 55296, 3.53, 3.84),
    Published("8 x B200", "HugeCTR, NVIDIA v5.0", 55296, 2.15, 2.26),
    Published("64 x H100", "HugeCTR, NVIDIA v4.1", 135168, 2.35, 1.32),
    Published("128 x H100", "HugeCTR, NVIDIA v4.1", 135168, 1.77, 0.94),
    Published("64 x GB200", "HugeCTR, Supermicro v5.0", 135168, 1.30, 0.713),
)
"""Computed from the logs in mlcommons/training_results_v4.0, v4.1 and v5.0 as analysis/mlperf_logs.py does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A figure with its words."""

    name: str
    """Of the PNG file, without extension."""
    alt: str
    caption: str
    figure: Figure


def write_report(paths: Sequence[Path], out: Path) -> Path:
    """Writes out/index.html and its pictures; returns the page.

    ValueError, naming the file, if something cannot be read, and if nothing is found.
    """
    material = collect(paths)
    out.mkdir(parents=True, exist_ok=True)
    pictures = {section: list(draw(material)) for section, draw in _SECTIONS.items()}
    encoded = {}
    for picture in (picture for drawn in pictures.values() for picture in drawn):
        png = _png(picture.figure)
        (out / f"{picture.name}.png").write_bytes(png)
        encoded[picture.name] = base64.b64encode(png).decode()
    environment = Environment(
        loader=PackageLoader("dlrm_bench.bench.report"), autoescape=True, undefined=StrictUndefined
    )
    page = environment.get_template("report.html").render(
        material=material,
        pictures=pictures,
        encoded=encoded,
        groups=[(label, side, records, side.metrics()) for label, (side, records) in groups(material).items()],
        twins=twins(material),
        works=works(material),
        work_shown=WORK_SHOWN,
        best_cells=best_cells,
        host_columns=HOST_COLUMNS,
        host_cells=host_cells,
        machines=machines(material),
        published=PUBLISHED,
        log_columns=LOG_COLUMNS,
        log_row=log_row,
        doubts=all_doubts(material),
        stages=(*STAGES, OTHER),
        created=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
    )
    (out / PAGE).write_text(page, encoding="utf-8")
    return out / PAGE


def _distributions(material: Material) -> Iterator[Picture]:
    for family, sides in families(material).items():
        series = {label: np.concatenate(side.series) for label, (side, _) in sides.items()}
        yield Picture(
            name=_file_name("distributions", family),
            alt="Range, percentiles and median of the latency of an iteration, for each configuration",
            caption=f"{family}: every iteration after the warm-up, slowest rank, all runs of a configuration together; "
            "no outlier is left out.",
            figure=plots.distributions(series),
        )


def _time_series(material: Material) -> Iterator[Picture]:
    for i, (label, (_, records)) in enumerate(list(groups(material).items())[:_SERIES_SHOWN]):
        record = records[len(records) // 2]
        slowest = slowest_rank(record.iterations_ms)
        yield Picture(
            name=f"series_{i}",
            alt=f"Latency of every iteration of {record.run['id']}",
            caption=f"{label}, run {record.run['id']}. {_conditions_in_words(record)}",
            figure=plots.time_series(label, slowest, record.run["warmup_iterations"], _marks(record)),
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


def _marks(record: Record) -> plots.SeriesMarks:
    """Evaluations stand in the MLPerf log by their share of the epoch, everything else in the record."""
    conditions, training, n = record.run.get("conditions"), record.run["training"], record.iterations_ms.shape[1]
    evals: list[int] = []
    log = record.folder / "result_0.txt"
    if log.exists() and training and training["epoch_num"]:
        epochs = read_mlperf_log(log)[0].eval_epochs
        evals = [round(epoch / training["epoch_num"] * n) for epoch in epochs]
    return plots.SeriesMarks(
        evals=evals,
        collections=conditions["gc_iterations"] if conditions else (),
        throttled=[(s["first_iteration"], s["last_iteration"]) for s in conditions["throttling"]] if conditions else (),
    )


def _stages(material: Material) -> Iterator[Picture]:
    for (family, of_family), (name, field_name, place) in product(
        twin_families(material).items(),
        (("stages_gpu", "stages_ms", "GPU"), ("stages_host", "host_stages_ms", "host")),
    ):
        runs = {label: t.run for label, t in of_family.items() if place == "host" or t.run["gpu"] is not None}
        times: dict[str, Any] = {label: run.get(field_name) for label, run in runs.items() if run.get(field_name)}
        if times:
            yield Picture(
                name=_file_name(name, family),
                alt=f"Time of each stage on the {place}, stacked",
                caption=f"{family}: time of each stage on the {place}, from instrumented twins. Stages that overlap "
                "add up to more than an iteration takes.",
                figure=plots.stages(times),
            )


def _timelines(material: Material) -> Iterator[Picture]:
    for family, of_family in twin_families(material).items():
        known = {label: twin.run for label, twin in of_family.items() if twin.run.get("timeline")}
        if known:
            places = sorted({"on the GPU" if run["gpu"] else "on the host" for run in known.values()})
            yield Picture(
                name=_file_name("timelines", family),
                alt="When each stage of an iteration begins and ends, for each instrumented twin",
                caption=f"{family}: when each stage ran within an iteration, {' or '.join(places)}; median of the "
                "traced iterations. What lies below one another in time overlaps; busy is the time in which a stage "
                "had work.",
                figure=plots.timelines({label: run["timeline"] or {} for label, run in known.items()}),
            )


def _kernels(material: Material) -> Iterator[Picture]:
    found = works(material)
    # A ceiling beside a kernel says more than another kernel.
    shown = {label: each for label, each in found.items() if each[0] is not None} or found
    for label, (limits, work) in list(shown.items())[-_KERNELS_DRAWN:]:
        yield Picture(
            name=_file_name("kernels", label),
            alt=f"The longest kernels of an iteration of {label}, beside what they could take",
            caption=f"{label}: longest kernels of an iteration"
            + (f" beside the ceilings of {limits}." if limits else "; no limits record of this work to set beside."),
            figure=plots.work([(each.name, each.us, each.best_us) for each in work[:WORK_SHOWN]]),
        )


def _waterfalls(material: Material) -> Iterator[Picture]:
    for ladder, _, _ in material.ladders:
        yield Picture(
            name=ladder["id"],
            alt="Median latency of each rung and what it saves of the one before it",
            caption=f"{ladder['id']}: {ladder['rounds']} rounds, rungs interleaved.",
            figure=plots.waterfall(ladder),
        )


def _floors(material: Material) -> Iterator[Picture]:
    for limits in material.limits:
        least = limits["floor_ms"]
        for family, sides in families(material).items():
            same = {k: fit for k, (_, records) in sides.items() if (fit := same_work(limits, records))}
            if same:
                medians = [(label, least["iteration"], sides[label][0].metrics()["p50"]) for label in same]
                yield Picture(
                    name=_file_name("floor", limits["id"], family),
                    alt="Median latency of each configuration beside the floor of an iteration",
                    caption=f"{family}: median latency beside the floor of {limits['id']}.{_doubtful(limits, same)}",
                    figure=plots.above_floor(medians),
                )
        fitting = [(label, twin) for label, twin in twins(material).items() if same_work(limits, [twin])]
        known = [(label, twin, times) for label, twin in fitting if (times := twin.run["stages_ms"])]
        for label, twin, times in known[-_FLOORS_DRAWN:]:
            yield Picture(
                name=_file_name("stages", limits["id"], label),
                alt=f"Stages of {label} beside their floor",
                caption=f"Stages of {label} beside the floor of {limits['id']}." + _doubtful(limits, {label: [twin]}),
                figure=plots.above_floor([(stage, least[stage], times[stage]) for stage in STAGES]),
            )


def _doubtful(limits: Limits, beside: dict[str, list[Record]]) -> str:
    """Why the floor may not be that of these records, by label, in words; empty where there is no reason."""
    found: dict[str, list[str]] = {}
    for label, records in beside.items():
        for doubt in dict.fromkeys(doubt for record in records for doubt in caveats_of_floor(limits, record.run)):
            found.setdefault(doubt, []).append(label)
    return "".join(f" Doubtful: {doubt} ({', '.join(labels)})." for doubt, labels in found.items())


def _file_name(*parts: str) -> str:
    """Of a picture: the same whatever else is reported, so that others can link to it."""
    return "_".join(re.sub(r"[^\w.-]+", "-", part) for part in parts)


def _published(material: Material) -> Iterator[Picture]:
    rows = [(f"{p.system}, {p.source}, {p.global_batch_size}", p.ms_per_iteration, False) for p in PUBLISHED]
    for log in material.logs:
        rows.append((f"log {Path(log.label).name}, {log.global_batch_size}", log.metrics()["mean"], False))
    ours = [(label, *group) for label, group in others(material).items()]
    seen: set[tuple[str, int]] = set()
    for _, sides, members in material.ladders:
        first, preset = next(iter(sides)), preset_of(members)
        place = preset, members[first][0].run["machine"]["gpus"]
        if place not in seen:
            seen.add(place)
            fastest = min(sides, key=lambda name: sides[name].metrics()["mean"])
            ours += [(f"{preset}: {name}", sides[name], members[name]) for name in dict.fromkeys((first, fastest))]
    for label, side, records in ours:
        machine = records[0].run["machine"]
        if machine["gpus"] and records[0].run["config"]["model"]["table_scale"] == 1.0:
            system = f"{machine['gpus']} x {str(machine['gpu']).removeprefix('NVIDIA ')}"
            rows.append((f"{system}, {label}, {side.global_batch_size}", side.metrics()["mean"], True))
    yield Picture(
        name="published",
        alt="Milliseconds per iteration of published MLPerf results and of ours",
        caption="Name, software and round, global batch. Ours appear where they ran on GPUs with full-size tables: of "
        "each preset's newest ladder on each number of GPUs the first rung and the fastest.",
        figure=plots.published(rows),
    )


_SECTIONS = {
    "ladder": _waterfalls,
    "distributions": _distributions,
    "series": _time_series,
    "stages": _stages,
    "timelines": _timelines,
    "kernels": _kernels,
    "floor": _floors,
    "published": _published,
}


def _png(figure: Figure) -> bytes:
    """With a palette, which a chart's few colours and their edges fit into: a third of the bytes."""
    drawn, buffer = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png", dpi=_DPI)
    Image.open(drawn).convert("RGB").quantize(64).save(buffer, format="png", optimize=True)
    return buffer.getvalue()
