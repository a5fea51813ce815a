"""Families of runs that a report shows together: each ladder, and the runs in no ladder, in the order of the page.

The page opens with the ladder that the user names, or with the newest ladder that proves a gain. Families of the folder
named first, the user's own, come before those of other folders.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from dlrm_bench.bench.compare.comparability import caveats
from dlrm_bench.bench.compare.sides import side_of_records
from dlrm_bench.bench.ladder.analysis import proven
from dlrm_bench.bench.limits.floor import Work, caveats_of_floor, check_same_work, work_of_kernels
from dlrm_bench.bench.profile.kernel_names import short_kernel_name
from dlrm_bench.bench.records.limits import Limits
from dlrm_bench.bench.records.record import Record
from dlrm_bench.bench.report.sources import Family, Sources, machine_in_words

NO_LADDER = "runs in no ladder"
_MOMENTARY = ("cpu_mhz", "sm_clock_mhz")
"""Readings of a machine that differ from run to run."""
_T = TypeVar("_T")


def families(sources: Sources, paths: Sequence[Path] = (), first: Path | None = None) -> list[Family]:
    """Returns the headline ladder, the others, newest first within each kind of machine, and runs in no ladder.

    paths: the folders named for the report; ladders of earlier folders come first. first: the folder of the headline
    ladder. By default it is a ladder of the first folder that has any: the newest whose last rung is proven faster than
    its first, or else the newest. ValueError if `first` is not a ladder of the sources.
    """
    by_folder = {
        folder.resolve(): replace(each, name=_name(each.name, folder, paths), origin=_origin(folder, paths))
        for each in sources.ladders
        if (folder := each.folder) is not None
    }
    if first is not None and first.resolve() not in by_folder:
        raise ValueError(f"--first {first} is not a ladder of the report: name a ladder's folder in one of its paths")
    ladders = sorted(by_folder.values(), key=_created, reverse=True)
    ladders.sort(key=lambda family: (family.origin, *_kind(family)))
    if ladders:
        named = None if first is None else by_folder[first.resolve()]
        headline = named or max(ladders, key=lambda each: (-each.origin, _proves_a_gain(each), _created(each)))
        ladders = [headline, *(family for family in ladders if family is not headline)]
    alone = _in_no_ladder(sources, paths)
    return [*ladders, alone] if alone.timed or alone.profiled else ladders


def all_doubts(shown: Sequence[Family]) -> dict[str, dict[str, int]]:
    """Returns every reason to doubt a run, with the number of affected runs by family name."""
    found: dict[str, Counter[str]] = {}
    for family in shown:
        for record in family.records():
            for doubt in caveats(record):
                found.setdefault(doubt, Counter())[family.name] += 1
    return {doubt: dict(runs) for doubt, runs in found.items()}


def machines(shown: Sequence[Family], sources: Sources) -> dict[str, list[dict[str, Any]]]:
    """Returns the distinct machines, regardless of their clocks at the time, by their description in words."""
    found: dict[str, list[dict[str, Any]]] = {}
    every = [record.run["machine"] for family in shown for record in family.records()]
    for machine in (*every, *(limits["machine"] for limits in sources.limits)):
        steady = {name: value for name, value in _lasting(machine).items() if value is not None}
        alike = found.setdefault(f"{machine_in_words(machine)}, {machine['cpu']}, {machine['cores']} cores", [])
        if steady not in alike:
            alike.append(steady)
    return found


def works(family: Family, sources: Sources) -> dict[str, tuple[str | None, list[Work]]]:
    """Returns the kernels of each profiled run, and the name of limits that were measured for the same work, if any.

    Caveats of the limits follow their name.
    """
    found: dict[str, tuple[str | None, list[Work]]] = {}
    for label, profiled in family.profiled.items():
        kernels = profiled.run.get("kernels")
        precision = profiled.run["config"]["precision"]
        fitting = [limits for limits in sources.limits if same_work(limits, [profiled])]
        # Limits of the run's precision are preferred, then those with the fewest caveats, then the newest.
        limits = max(
            fitting,
            key=lambda x: (
                x["config"].get("precision") == precision,
                -len(caveats_of_floor(x, profiled.run)),
                x["created"],
            ),
            default=None,
        )
        if limits is not None and kernels:
            beside = "; ".join((limits["id"], *caveats_of_floor(limits, profiled.run)))
            found[label] = (beside, work_of_kernels(limits, profiled.run))
        elif kernels:
            alone = [Work(short_kernel_name(k["name"]), k["stage"], k["calls"], k["us"], None) for k in kernels]
            found[label] = (None, alone)
    return found


def same_work(limits: Limits, records: Sequence[Record]) -> list[Record]:
    """Returns the records whose work the limits were measured for."""
    same = []
    for record in records:
        try:
            check_same_work(limits, record.run)
        except ValueError:  # measured for another preset, or on CPUs
            continue
        same.append(record)
    return same


def _name(name: str, folder: Path, paths: Sequence[Path]) -> str:
    """Returns the name of a ladder's folder, after the name of its parent unless the parent is a folder of the
    report."""
    above = folder.resolve().parent
    roots = {path.resolve() for path in paths}
    deeper = above not in roots and any(above.is_relative_to(root) for root in roots)
    return f"{above.name}/{name}" if deeper else name


def _origin(folder: Path, paths: Sequence[Path]) -> int:
    """Returns the index of the first path that contains a folder; that of the last path if none does."""
    inside = [folder.resolve().is_relative_to(path.resolve()) for path in paths]
    return inside.index(True) if True in inside else max(0, len(paths) - 1)


def _proves_a_gain(family: Family) -> bool:
    """Whether the last rung is proven to be faster than the first one."""
    assert family.ladder is not None
    last = family.ladder["rungs"][-1]
    return last["name"] in proven(family.ladder, "first") and last["speedup_vs_first"] > 1


def _created(family: Family) -> str:
    assert family.ladder is not None
    return family.ladder["created"]


def _kind(family: Family) -> tuple[int, str]:
    """Returns a sort key that puts machines with the most GPUs first."""
    machine = family.first().run["machine"]
    return -machine["gpus"], machine_in_words(machine)


def _in_no_ladder(sources: Sources, paths: Sequence[Path]) -> Family:
    """Groups timed runs of one configuration, machine and commit under the name of the newest."""
    by_program: dict[str, list[Record]] = {}
    for record in sorted(sources.timed, key=lambda record: _origin(record.folder, paths)):
        config = {k: v for k, v in record.run["config"].items() if k not in ("run_id", "results_dir")}
        by_program.setdefault(f"{config} {_lasting(record.run['machine'])} {record.run['git']}", []).append(record)
    timed = _by_name([(records[0], records) for records in by_program.values()])
    return Family(
        name=NO_LADDER,
        ladder=None,
        timed=timed,
        sides={name: side_of_records(name, records) for name, records in timed.items()},
        profiled=_by_name([(record, record) for record in sources.profiled]),
    )


def _lasting(machine: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a machine without its momentary readings."""
    return {name: value for name, value in machine.items() if name not in _MOMENTARY}


def _by_name(runs: Sequence[tuple[Record, _T]]) -> dict[str, _T]:
    """Names each value by the folder of its record; repeated names get a number."""
    found: dict[str, _T] = {}
    for record, value in runs:
        name = record.folder.resolve().name
        taken = sum(other == name or other.startswith(f"{name} (") for other in found)
        found[f"{name} ({taken + 1})" if taken else name] = value
    return found
