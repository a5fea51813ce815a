"""Changes since an earlier diagnosis: findings that are new, gone or moved, and the quality of its predictions."""

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from . import cuda_calls as cuda
from . import judge
from .diagnosis import Diagnosis
from .findings import Finding
from .remedies import PART_NAMES, Part, in_input_dist, without_twice

_MORE = 0.5
"""Minimum growth of a finding, in calls per iteration, to be reported."""


Identity = tuple[str | None, ...]
"""Identity of a finding in two versions of a script: its kind, and functions, as its lines may have moved."""
Names = Mapping[str, str]
"""Paths of files as the earlier diagnosis has them."""


@dataclass(frozen=True, slots=True)
class Change:
    """A difference of two diagnoses."""

    finding: Finding
    """The later finding; the earlier one if it is gone."""
    count: float
    """Calls an iteration more than before, or fewer."""
    ms: float
    """Milliseconds an iteration more than before, or fewer."""


class Comparison(NamedTuple):
    """A diagnosis beside an earlier one."""

    new: list[Change]
    gone: list[Change]
    moved_ms: float
    """Milliseconds an iteration by which waits at unchanged places have grown: the time of a removed wait may have
    moved there."""
    before_ms: float
    after_ms: float
    gone_ms: float
    """Time of the gone findings in the earlier iteration."""
    gone_parts: list[str]
    """Parts that count as gone: the dense network's if CUDA graphs are replayed that were not before, the input dist's
    if none of its reads and lists remains."""
    predicted_ms: float
    """The earlier iteration without it; the GPU's work is a floor of it."""

    def new_syncs(self) -> list[Change]:
        """New findings that stop the host."""
        return [change for change in self.new if change.finding["kind"] in judge.WAITING]


def identity(finding: Finding, names: Names) -> Identity:
    """Returns the identity of a finding in both diagnoses, its kind first: all but its line numbers."""
    library, caller = finding["library"], finding["called_from"]
    file = finding["file"]
    return (
        finding["kind"],
        None if file is None else names.get(file, file),
        finding["function"],
        names.get(library["file"], library["file"]) if library else None,
        library["function"] if library else None,
        caller["function"] if caller else None,
    )


def compare(before: Diagnosis, after: Diagnosis) -> Comparison:
    """Returns new, gone and moved findings, costliest first. ValueError if only one of the two has a GPU."""
    if before["device"] != after["device"]:
        raise ValueError(
            f"--baseline was made on {before['device']}, this diagnosis on {after['device']}: make both on one kind"
        )
    old = _grouped(before["findings"], {})
    now = _grouped(after["findings"], _earlier_names(_files(before["findings"]), _files(after["findings"])))
    new, gone, moved = [], [], 0.0
    for key in {**old, **now}:
        were, are = old.get(key, []), now.get(key, [])
        count = sum(f["count"] for f in are) - sum(f["count"] for f in were)
        ms = sum(f["ms"] or 0.0 for f in are) - sum(f["ms"] or 0.0 for f in were)
        if count >= _MORE:
            new.append(Change(are[0], count, ms))
        elif count <= -_MORE:
            gone.append(Change(were[0], count, ms))
        elif key[0] in judge.WAITING:
            moved += ms
    parts = _gone_parts(before, after)
    gone_ms = without_twice([_with_ms(change) for change in gone], parts)
    return Comparison(
        new=sorted(new, key=lambda change: -change.ms),
        gone=sorted(gone, key=lambda change: change.ms),
        moved_ms=moved,
        before_ms=before["iteration_ms"],
        after_ms=after["iteration_ms"],
        gone_ms=gone_ms,
        gone_parts=[PART_NAMES[part] for part in parts],
        predicted_ms=max(before["iteration_ms"] - gone_ms, before["parts"]["gpu_ms"]),
    )


def _gone_parts(before: Diagnosis, after: Diagnosis) -> dict[Part, float]:
    gone: list[Part] = []
    if _graph_launches(after) >= _graph_launches(before) + 1:
        gone.append("dense_ms")
    if any(map(in_input_dist, before["findings"])) and not any(map(in_input_dist, after["findings"])):
        gone.append("input_dist_ms")
    return {part: before["parts"][part] for part in gone if before["parts"][part]}


def _with_ms(change: Change) -> Finding:
    return {**change.finding, "ms": -change.ms}


def _graph_launches(diagnosis: Diagnosis) -> float:
    return max((rank["calls"].get(cuda.GRAPH_LAUNCH, 0.0) for rank in diagnosis["ranks"]), default=0.0)


def _grouped(findings: Sequence[Finding], names: Names) -> dict[Identity, list[Finding]]:
    groups: defaultdict[Identity, list[Finding]] = defaultdict(list)
    for finding in findings:
        groups[identity(finding, names)].append(finding)
    return groups


def _files(findings: Sequence[Finding]) -> set[str]:
    files = {finding["file"] for finding in findings} | {f["library"]["file"] for f in findings if f["library"]}
    return {file for file in files if file is not None}


def _earlier_names(before: set[str], after: set[str]) -> Names:
    """Returns the earlier name of each later file that has another one now.

    Paths begin at the working directory where a file is below it: in another directory a file has a longer name, or
    only the end of its old one. A file that both diagnoses have is itself; of several ends, the longest decides.
    """
    pairs = [(old, new) for old in before - after for new in after - before if _is_end(old, new) or _is_end(new, old)]
    names: dict[str, str] = {}
    for old, new in sorted(pairs, key=lambda pair: (-min(len(path) for path in pair), pair)):
        if new not in names and old not in names.values():
            names[new] = old
    return names


def _is_end(path: str, of: str) -> bool:
    return of.endswith(os.sep + path)
