"""One self-contained HTML page, and its pictures as PNG files, from records, ladders, limits and MLPerf logs.

dlrm-bench report results --out report

Folders are searched. Nothing is measured here, and every number on the page comes from a file that the page names.
"""

import base64
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from matplotlib.figure import Figure

from bench import plots
from bench.compare import Side, doubts, read_side, side_of_records
from bench.kernel_names import OTHER, STAGES
from bench.ladder import LADDER_JSON, Ladder, read_ladder
from bench.limits import LIMITS_JSON, Limits, check_same_work, read_limits
from bench.mlperf_log import LOG_COLUMNS, log_row, read_mlperf_log
from bench.record import RUN_JSON, Record, read_record

PAGE = "index.html"
_DPI = 200
_SERIES_SHOWN = 6


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
"""Computed from the logs in mlcommons/training_results_v4.0, v4.1 and v5.0 as bench.mlperf_log does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Material:
    """Everything found, by kind."""

    records: list[Record] = field(default_factory=list)
    """Timed runs that belong to no ladder."""
    twins: list[Record] = field(default_factory=list)
    ladders: list[tuple[Ladder, dict[str, Side], dict[str, list[Record]]]] = field(default_factory=list)
    limits: list[Limits] = field(default_factory=list)
    logs: list[Side] = field(default_factory=list)


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
    environment = Environment(loader=PackageLoader("bench"), autoescape=True, undefined=StrictUndefined)
    page = environment.get_template("report.html").render(
        material=material,
        pictures=pictures,
        encoded=encoded,
        groups=[(label, side, records, side.metrics()) for label, (side, records) in _groups(material).items()],
        machines=_machines(material),
        published=PUBLISHED,
        log_columns=LOG_COLUMNS,
        log_row=log_row,
        doubts=_doubts(material),
        stages=(*STAGES, OTHER),
        created=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
    )
    (out / PAGE).write_text(page, encoding="utf-8")
    return out / PAGE


def collect(paths: Sequence[Path]) -> Material:
    """Reads everything in or under `paths`. ValueError, naming the file, if it is damaged, and if nothing is found."""
    material = Material()
    for path in paths:
        if not path.exists():
            raise ValueError(f"{path} does not exist: name records, ladders, limits, MLPerf logs, or folders of them")
        _collect(path, material)
    if not any((material.records, material.twins, material.ladders, material.limits, material.logs)):
        raise ValueError(f"nothing to report in {', '.join(map(str, paths))}: no record, ladder, limits or MLPerf log")
    return material


def _collect(path: Path, material: Material) -> None:
    if path.is_file():
        material.logs.append(read_side(path))
    elif (path / LADDER_JSON).exists():
        ladder, sides = read_ladder(path)
        members = {rung["name"]: [read_record(path / record) for record in rung["records"]] for rung in ladder["rungs"]}
        material.ladders.append((ladder, sides, members))
    elif (path / LIMITS_JSON).exists():
        material.limits.append(read_limits(path))
    elif (path / RUN_JSON).exists():
        record = read_record(path)
        if record.run["host"] is not None:
            material.twins.append(record)
        elif record.run["latency_ms"] is not None:
            material.records.append(record)
    elif any(path.glob("result_*.txt")) and (path / "system.json").exists():  # without, it is a run that did not finish
        material.logs.append(read_side(path))
    else:
        for folder in sorted(folder for folder in path.iterdir() if folder.is_dir()):
            _collect(folder, material)


def _groups(material: Material) -> dict[str, tuple[Side, list[Record]]]:
    """Timed runs of the same thing: the rungs of each ladder, and other records by configuration and commit."""
    groups: dict[str, tuple[Side, list[Record]]] = {}
    for ladder, sides, members in material.ladders:
        preset = str(next(iter(members.values()))[0].run["config"]["preset"])
        for name, side in sides.items():
            key = f"{preset}: {name}" if len(material.ladders) == 1 else f"{ladder['id']}: {name}"
            groups[key] = (side, members[name])
    alike: dict[str, list[Record]] = {}
    for record in material.records:
        config = {k: v for k, v in record.run["config"].items() if k not in ("run_id", "results_dir")}
        alike.setdefault(f"{config} {record.run['machine']} {record.run['git']}", []).append(record)
    for records in alike.values():
        groups[records[0].run["id"]] = (side_of_records(records[0].run["id"], records), records)
    return groups


def _all_records(material: Material) -> Iterator[Record]:
    yield from material.records
    yield from material.twins
    for _, _, members in material.ladders:
        for records in members.values():
            yield from records


def _doubts(material: Material) -> dict[str, list[str]]:
    """Every doubt, and the runs that it is about."""
    found: dict[str, list[str]] = {}
    for record in _all_records(material):
        for doubt in doubts(record):
            found.setdefault(doubt, []).append(record.run["id"])
    return found


def _machines(material: Material) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for machine in (*(r.run["machine"] for r in _all_records(material)), *(x["machine"] for x in material.limits)):
        steady = {name: value for name, value in machine.items() if name != "sm_clock_mhz"}
        if steady not in found:
            found.append(steady)
    return found


def _distributions(material: Material) -> Iterator[Picture]:
    groups = _groups(material)
    if groups:
        series = {label: np.concatenate(side.series) for label, (side, _) in groups.items()}
        yield Picture(
            name="distributions",
            alt="Range, percentiles and median of the latency of an iteration, for each configuration",
            caption="Every iteration after the warm-up, slowest rank, all runs of a configuration together; no outlier "
            "is left out.",
            figure=plots.distributions(series),
        )


def _time_series(material: Material) -> Iterator[Picture]:
    for i, (label, (_, records)) in enumerate(list(_groups(material).items())[:_SERIES_SHOWN]):
        record = records[len(records) // 2]
        slowest = record.iterations_ms.max(axis=0)
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
    for name, field_name, place in (("stages_gpu", "stages_ms", "GPU"), ("stages_host", "host_stages_ms", "host")):
        on_gpu = {t.run["id"]: t.run for t in material.twins if place == "host" or t.run["gpu"] is not None}
        times: dict[str, Any] = {run_id: run.get(field_name) for run_id, run in on_gpu.items() if run.get(field_name)}
        if times:
            yield Picture(
                name=name,
                alt=f"Time of each stage on the {place}, stacked",
                caption=f"Time of each stage on the {place}, from instrumented twins. Stages that overlap add up to "
                "more than an iteration takes.",
                figure=plots.stages(times),
            )


def _waterfalls(material: Material) -> Iterator[Picture]:
    for i, (ladder, _, _) in enumerate(material.ladders):
        yield Picture(
            name=f"ladder_{i}",
            alt="Median latency of each rung and what it saves of the one before it",
            caption=f"{ladder['id']}: {ladder['rounds']} rounds, rungs interleaved.",
            figure=plots.waterfall(ladder),
        )


def _floors(material: Material) -> Iterator[Picture]:
    for i, limits in enumerate(material.limits):
        least = limits["floor_ms"]
        groups = _groups(material).items()
        same = [(label, side.metrics()["p50"]) for label, (side, records) in groups if _same_work(limits, records)]
        if same:
            yield Picture(
                name=f"floor_{i}",
                alt="Median latency of each configuration beside the floor of an iteration",
                caption=f"Median latency beside the floor of {limits['id']}.",
                figure=plots.above_floor([(label, least["iteration"], ms) for label, ms in same]),
            )
        for j, record in enumerate(_same_work(limits, material.twins)):
            times = record.run["stages_ms"] or {}
            yield Picture(
                name=f"floor_{i}_stages_{j}",
                alt=f"Stages of {record.run['id']} beside their floor",
                caption=f"Stages of {record.run['id']} beside the floor of {limits['id']}.",
                figure=plots.above_floor([(stage, least[stage], times[stage]) for stage in STAGES]),
            )


def _same_work(limits: Limits, records: Sequence[Record]) -> list[Record]:
    same = []
    for record in records:
        try:
            check_same_work(limits, record.run)
        except ValueError:  # measured for another preset
            continue
        same.append(record)
    return same


def _published(material: Material) -> Iterator[Picture]:
    rows = [(f"{p.system}, {p.source}, {p.global_batch_size}", p.ms_per_iteration, False) for p in PUBLISHED]
    for log in material.logs:
        rows.append((f"log {Path(log.label).name}, {log.global_batch_size}", log.metrics()["mean"], False))
    for label, (side, records) in _groups(material).items():
        machine = records[0].run["machine"]
        if machine["gpus"] and records[0].run["config"]["model"]["table_scale"] == 1.0:
            rows.append((f"{label}, {side.global_batch_size}", side.metrics()["mean"], True))
    yield Picture(
        name="published",
        alt="Milliseconds per iteration of published MLPerf results and of ours",
        caption="Name, software and round, global batch. Ours appear where they ran on GPUs with full-size tables.",
        figure=plots.published(rows),
    )


_SECTIONS = {
    "ladder": _waterfalls,
    "distributions": _distributions,
    "series": _time_series,
    "stages": _stages,
    "floor": _floors,
    "published": _published,
}


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=_DPI, pil_kwargs={"optimize": True})
    return buffer.getvalue()
