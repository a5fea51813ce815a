"""What a report is made from: records, twins, ladders, limits and MLPerf logs, found in folders and grouped."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dlrm_bench.bench.analysis.comparability import caveats
from dlrm_bench.bench.analysis.compare import Side, read_side, side_of_records
from dlrm_bench.bench.analysis.floor import Work, caveats_of_floor, check_same_work, work_of_kernels
from dlrm_bench.bench.records.kernel_names import short_kernel_name
from dlrm_bench.bench.records.ladder import LADDER_JSON, Ladder, read_ladder
from dlrm_bench.bench.records.limits import LIMITS_JSON, Limits, read_limits
from dlrm_bench.bench.records.record import RUN_JSON, Record, read_record


@dataclass(frozen=True, slots=True, kw_only=True)
class Material:
    """Everything found, by kind."""

    records: list[Record] = field(default_factory=list)
    """Timed runs that belong to no ladder."""
    twins: list[Record] = field(default_factory=list)
    """Those that belong to no ladder."""
    ladder_twins: list[tuple[Ladder, str, Record]] = field(default_factory=list)
    """With their rung."""
    ladders: list[tuple[Ladder, dict[str, Side], dict[str, list[Record]]]] = field(default_factory=list)
    """The newest first."""
    limits: list[Limits] = field(default_factory=list)
    logs: list[Side] = field(default_factory=list)


def collect(paths: Sequence[Path]) -> Material:
    """Reads everything in or under `paths`. ValueError, naming the file, if it is damaged, and if nothing is found."""
    material = Material()
    for path in paths:
        if not path.exists():
            raise ValueError(f"{path} does not exist: name records, ladders, limits, MLPerf logs, or folders of them")
        _collect(path, material)
    if not any((material.records, material.twins, material.ladders, material.limits, material.logs)):
        raise ValueError(f"nothing to report in {', '.join(map(str, paths))}: no record, ladder, limits or MLPerf log")
    material.ladders.sort(key=lambda ladder: ladder[0]["created"], reverse=True)
    return material


def _collect(path: Path, material: Material) -> None:
    if path.is_file():
        material.logs.append(read_side(path))
    elif (path / LADDER_JSON).exists():
        ladder, members = read_ladder(path)
        sides = {name: side_of_records(name, records) for name, records in members.items()}
        material.ladders.append((ladder, sides, members))
        for rung in ladder["rungs"]:
            if rung["host"]:
                material.ladder_twins.append((ladder, rung["name"], read_record(path / rung["host"]["record"])))
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


_OF_NO_LADDER = "records of no ladder"

Groups = dict[str, tuple[Side, list[Record]]]
"""Timed runs of the same thing, by a label."""


def groups(material: Material) -> Groups:
    """All there are: the rungs of each ladder, and other records by configuration and commit."""
    found: Groups = {}
    for ladder, sides, members in material.ladders:
        ladder_label = preset_of(members) if len(material.ladders) == 1 else ladder["id"]
        found |= {f"{ladder_label}: {name}": (side, members[name]) for name, side in sides.items()}
    return found | others(material)


def families(material: Material) -> dict[str, Groups]:
    """The groups of each ladder, by its id and their rung; then all others, if there are any."""
    found: dict[str, Groups] = {
        ladder["id"]: {name: (side, members[name]) for name, side in sides.items()}
        for ladder, sides, members in material.ladders
    }
    of_no_ladder = others(material)
    return found | ({_OF_NO_LADDER: of_no_ladder} if of_no_ladder else {})


def preset_of(members: dict[str, list[Record]]) -> str:
    """The preset of a ladder's members."""
    return str(next(iter(members.values()))[0].run["config"]["preset"])


def others(material: Material) -> Groups:
    """Those of records that belong to no ladder."""
    found: Groups = {}
    alike: dict[str, list[Record]] = {}
    for record in material.records:
        config = {k: v for k, v in record.run["config"].items() if k not in ("run_id", "results_dir")}
        alike.setdefault(f"{config} {record.run['machine']} {record.run['git']}", []).append(record)
    for records in alike.values():
        found[records[0].run["id"]] = (side_of_records(records[0].run["id"], records), records)
    return found


def twin_families(material: Material) -> dict[str, dict[str, Record]]:
    """The twins of each ladder that has any, by its id and their rung; then all others by id, if there are any."""
    found: dict[str, dict[str, Record]] = {}
    for ladder, rung, twin in material.ladder_twins:
        found.setdefault(ladder["id"], {})[rung] = twin
    of_no_ladder = {twin.run["id"]: twin for twin in material.twins}
    return found | ({_OF_NO_LADDER: of_no_ladder} if of_no_ladder else {})


def twins(material: Material) -> dict[str, Record]:
    """By rung or id; those of ladders first, by the ladder too where several have twins."""
    found = twin_families(material)
    several = len(found.keys() - {_OF_NO_LADDER}) > 1
    return {
        f"{family}: {name}" if several and family != _OF_NO_LADDER else name: twin
        for family, of_family in found.items()
        for name, twin in of_family.items()
    }


def works(material: Material) -> dict[str, tuple[str | None, list[Work]]]:
    """The kernels of each twin that has any, and the id of the limits beside them where there are some of its work.

    What makes the limits doubtful follows their id.
    """
    found: dict[str, tuple[str | None, list[Work]]] = {}
    for label, twin in twins(material).items():
        kernels = twin.run.get("kernels")
        precision = twin.run["config"]["precision"]
        fitting = [limits for limits in material.limits if same_work(limits, [twin])]
        # Of its precision, if there are any; of these the least doubtful, and the newest.
        limits = max(
            fitting,
            key=lambda x: (
                x["config"].get("precision") == precision,
                -len(caveats_of_floor(x, twin.run)),
                x["created"],
            ),
            default=None,
        )
        if limits is not None and kernels:
            beside = "; ".join((limits["id"], *caveats_of_floor(limits, twin.run)))
            found[label] = (beside, work_of_kernels(limits, twin.run))
        elif kernels:
            alone = [
                Work(name := short_kernel_name(k["name"]), [name], k["stage"], k["calls"], k["us"], None)
                for k in kernels
            ]
            found[label] = (None, alone)
    return found


def _all_records(material: Material) -> Iterator[Record]:
    yield from material.records
    yield from twins(material).values()
    for _, _, members in material.ladders:
        for records in members.values():
            yield from records


def all_doubts(material: Material) -> dict[str, list[str]]:
    """Every doubt, and the runs that it is about."""
    found: dict[str, list[str]] = {}
    for record in _all_records(material):
        for doubt in caveats(record):
            found.setdefault(doubt, []).append(record.run["id"])
    return found


def machines(material: Material) -> list[dict[str, Any]]:
    """Each machine once, whatever its clock at the time."""
    found: list[dict[str, Any]] = []
    for machine in (*(r.run["machine"] for r in _all_records(material)), *(x["machine"] for x in material.limits)):
        steady = {name: value for name, value in machine.items() if name != "sm_clock_mhz"}
        if steady not in found:
            found.append(steady)
    return found


def same_work(limits: Limits, records: Sequence[Record]) -> list[Record]:
    """Those whose work the limits were measured for."""
    same = []
    for record in records:
        try:
            check_same_work(limits, record.run)
        except ValueError:  # measured for another preset, or on CPUs
            continue
        same.append(record)
    return same
