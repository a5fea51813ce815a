"""Sources of a report: records, ladders, limits and MLPerf logs in folders; each is read and counted once."""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from dlrm_bench.bench.compare.sides import REFERENCE_LOGS, Side, read_side, side_of_records
from dlrm_bench.bench.ladder.analysis import read_judged_ladder
from dlrm_bench.bench.limits.efficiency import efficiency_of_runs
from dlrm_bench.bench.records.distinct import distinct, record_key
from dlrm_bench.bench.records.ladder import LADDER_JSON, Ladder
from dlrm_bench.bench.records.limits import LIMITS_JSON, Limits, read_limits
from dlrm_bench.bench.records.record import RUN_JSON, Record, read_record
from dlrm_bench.bench.records.schema import Efficiency, Machine
from dlrm_bench.dlrm.data.paths import why_not

Kind = Literal["ladder", "limits", "record", "logs", "unfinished"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A ladder's runs by rung, or the runs in no ladder by the name of their folder."""

    name: str
    """Name of the ladder's folder, which may be longer than the ladder's id."""
    folder: Path | None = None
    """Folder of the ladder."""
    ladder: Ladder | None
    origin: int = 0
    """Index of the report's path that contains the folder."""
    sides: dict[str, Side] = field(default_factory=dict)
    timed: dict[str, list[Record]] = field(default_factory=dict)
    """Runs of each rung, one per round."""
    profiled: dict[str, Record] = field(default_factory=dict)
    """Profiled runs; a rung may have none."""

    def records(self) -> Iterator[Record]:
        """Yields all runs, timed and profiled."""
        for records in self.timed.values():
            yield from records
        yield from self.profiled.values()

    def first(self) -> Record:
        """Returns one of the runs: those of a ladder share machine and preset."""
        return next(self.records())

    def efficiency(self) -> dict[str, Efficiency]:
        """Returns the efficiency of each configuration in time and power, medians of its runs; configurations without
        efficiency are absent."""
        found = {name: efficiency_of_runs([record.run for record in records]) for name, records in self.timed.items()}
        return {name: each for name, each in found.items() if each is not None}

    def title(self) -> str:
        """Returns machine and preset in words, and the size of a ladder."""
        if self.ladder is None:
            return "Runs in no ladder"
        run = self.first().run
        rounds = "1 round" if self.ladder["rounds"] == 1 else f"{self.ladder['rounds']} rounds"
        work = f"{run['config']['preset']}, {run['config']['local_batch_size']} samples per rank"
        return f"{machine_in_words(run['machine'])}, {work}: {len(self.timed)} rungs, {rounds}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Everything found, by kind."""

    ladders: list[Family] = field(default_factory=list)
    timed: list[Record] = field(default_factory=list)
    """Timed runs in no ladder, the newest first."""
    profiled: list[Record] = field(default_factory=list)
    """Profiled runs in no ladder, the newest first."""
    limits: list[Limits] = field(default_factory=list)
    logs: list[Side] = field(default_factory=list)
    unfinished: list[Path] = field(default_factory=list)
    """Folders of unfinished runs, with an MLPerf log and no record."""
    untimed: list[Path] = field(default_factory=list)
    """Folders of records without a latency: their runs ended within the warm-up."""
    copies: list[str] = field(default_factory=list)
    """Sentences on duplicates."""

    def notes(self) -> list[str]:
        """Returns sentences on omissions, with reasons."""
        unfinished = [f"{folder} is an unfinished run and is left out" for folder in self.unfinished]
        untimed = [f"{folder} ended within its warm-up and is left out" for folder in self.untimed]
        return [*unfinished, *untimed, *self.copies]


def machine_in_words(machine: Machine) -> str:
    """Returns '4 x H200', or 'CPU'; '2 nodes of 4 x H200' where there are several nodes."""
    nodes, gpus, name = machine["nodes"], machine["gpus"], str(machine["gpu"]).removeprefix("NVIDIA ")
    if nodes > 1 and gpus % nodes:
        return f"{nodes} nodes, {gpus} x {name} in all"
    one = f"{gpus // nodes} x {name}" if gpus else "CPU"
    return f"{nodes} nodes of {one}" if nodes > 1 else one


def find(paths: Sequence[Path]) -> list[tuple[Kind, Path]]:
    """Returns sources in or under `paths`, with their kind. No folder is entered twice, whatever links lead to it.

    ValueError names a path that does not exist.
    """
    entered: set[Path] = set()
    found: list[tuple[Kind, Path]] = []
    for path in paths:
        if not path.exists():
            raise ValueError(f"{path} {why_not(path)}: name records, ladders, limits, MLPerf logs, or folders of them")
        found += _find(path, entered)
    return found


def read_sources(found: Sequence[tuple[Kind, Path]], show: Callable[[int, Path], None]) -> Sources:
    """Reads what find() found; show(number, path) is called before each. ValueError names a damaged file."""
    sources = Sources()
    read = functools.cache(read_record)
    for number, (kind, path) in enumerate(found):
        show(number, path)
        if kind == "ladder":
            _add_ladder(path, read, sources)
        elif kind == "limits":
            _add_limits(read_limits(path), path, sources)
        elif kind == "record":
            record = read(path)
            if record.run["host"] is not None:
                sources.profiled.append(record)
            elif record.run["latency_ms"] is not None:
                sources.timed.append(record)
            else:
                sources.untimed.append(path)
        elif kind == "logs":
            sources.logs.append(read_side(path))
        else:
            sources.unfinished.append(path)
    return _without_copies(sources)


def _find(path: Path, entered: set[Path]) -> Iterator[tuple[Kind, Path]]:
    real = path.resolve()
    if real in entered:
        return
    entered.add(real)
    if path.is_file():
        yield "logs", path
    elif (path / LADDER_JSON).exists():
        yield "ladder", path
        yield from (("unfinished", member) for member in _folders(path) if _unfinished(member))
    elif (path / LIMITS_JSON).exists():
        yield "limits", path
    elif (path / RUN_JSON).exists():
        yield "record", path
    elif (any(path.glob("result_*.txt")) and (path / "system.json").exists()) or any(path.glob(REFERENCE_LOGS)):
        yield "logs", path
    elif _unfinished(path):
        yield "unfinished", path
    else:
        for folder in _folders(path):
            yield from _find(folder, entered)


def _folders(path: Path) -> list[Path]:
    """Returns the folders in `path`, links last."""
    return sorted((folder for folder in path.iterdir() if folder.is_dir()), key=lambda p: (p.is_symlink(), p.name))


def _unfinished(folder: Path) -> bool:
    return (folder / "result_0.txt").exists() and not (folder / RUN_JSON).exists()


def _add_ladder(path: Path, read: Callable[[Path], Record], sources: Sources) -> None:
    ladder, timed = read_judged_ladder(path, read)
    name = path.resolve().name
    same_name = sum(other.name == name or other.name.startswith(f"{name} (") for other in sources.ladders)
    runs = Family(
        name=f"{name} ({same_name + 1})" if same_name else name,
        folder=path,
        ladder=ladder,
        sides={name: side_of_records(name, records) for name, records in timed.items()},
        timed=timed,
        profiled={rung["name"]: read(path / rung["host"]["record"]) for rung in ladder["rungs"] if rung["host"]},
    )
    keys = _timed_keys(runs)
    for other in sources.ladders:
        if keys <= _timed_keys(other):
            sources.copies.append(f"{path} holds the same runs as the ladder {other.name}, and counts once")
            return
    sources.ladders.append(runs)


def _timed_keys(runs: Family) -> set[tuple[str, str, str]]:
    return {record_key(record) for records in runs.timed.values() for record in records}


def _add_limits(limits: Limits, path: Path, sources: Sources) -> None:
    for other in sources.limits:
        if {**limits, "id": ""} == {**other, "id": ""}:
            sources.copies.append(f"{path} holds the same limits as {other['id']}, and counts once")
            return
    # A page names everything by its folder.
    sources.limits.append({**limits, "id": path.resolve().name})


def _without_copies(sources: Sources) -> Sources:
    """Leaves out members of ladders that are stored elsewhere too, and records that are stored in several folders."""
    of_ladders = [record for runs in sources.ladders for record in runs.records()]
    alone, copies = distinct([*of_ladders, *sources.timed, *sources.profiled])
    sources.copies.extend(copies)
    # By identity: comparing records would compare their arrays.
    kept = {id(record) for record in alone}
    for records in (sources.timed, sources.profiled):
        records[:] = sorted(
            (record for record in records if id(record) in kept), key=lambda r: r.run["created"], reverse=True
        )
    return sources
