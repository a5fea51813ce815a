"""A rank's file for the doctor: the times of its iterations, and the calls of a few of them.

rank<R>.json, and beside it a Chrome trace, rank<R>_trace.json.gz: iterations under the profiler alone, and then
iterations whose calls are marked by line. Times of all ranks of a node are on one clock: those in rank<R>.json are
Python's perf_counter (Linux, CLOCK_MONOTONIC), those of the trace Kineto's, since 1970 or a common later base.
"""

import json
from pathlib import Path
from typing import Any, NotRequired, TypedDict

MARK = "doctor:"
"""Name of the range around a marked call in the trace, followed by the call's number."""
MARKED_ITERATION = "marked iteration"
"""Name of the range around an iteration whose calls are marked."""
SCHEMA = 3

SETTLING = 2
"""Iterations with an instrument on that are discarded, because its start slows them down."""
TRACED = 5
"""Iterations in the trace that gives costs."""
MARKED = 4
"""Iterations whose calls are marked; shapes that change are found among them."""


def iterations_needed(warmup: int, iterations: int) -> int:
    """Iterations that a script has to make for an examination."""
    return warmup + iterations + SETTLING + iterations + SETTLING + TRACED + SETTLING + MARKED


class Frame(TypedDict):
    """A line of Python."""

    file: str
    line: int
    function: str
    text: str


class About(TypedDict, total=False):
    """Properties of a call that matter to a finding."""

    pinned: bool
    """Whether the host memory that a copy reads is page-locked."""
    names_device: bool
    """Whether a copy is asked for by a device's name, and not for another type alone."""
    gathers: bool
    """Whether the index holds a tensor or list, so that it makes no view."""
    mask: bool
    """Whether the index holds a tensor of booleans."""
    from_list: bool
    """Whether a tensor was made of Python's numbers."""
    shape: list[int]
    """Shape of the result."""


class Call(TypedDict):
    """A call of torch."""

    iteration: int
    name: str
    stack: int
    """Its number in the file's stacks."""
    start_us: float
    us: float
    """Time in it, without that which marks of calls within it took."""
    within: int | None
    """Number of the marked call that made it; None if there is none."""
    about: About
    main: bool
    """Whether on the thread of the training loop."""


class Window(TypedDict):
    """A span of iterations, which begins and ends with the device idle."""

    iterations: int
    ms: float
    """Wall time of an iteration."""


class Marked(Window):
    """The window in which each call of torch is marked by line."""

    marks_ms: float
    """Time of an iteration that the marks themselves took."""
    starts_us: list[float]
    """Beginning of each iteration, and the last one's end, on the clock of the calls."""


class Plain(Window):
    """The window without instruments."""

    times_ms: list[float]
    """Host time from one beginning of an iteration to the next."""
    cpu_ms: float
    """CPU time of the whole process, an iteration."""
    thread_ms: float
    """CPU time of the thread of the training loop, an iteration."""
    threads_ms: dict[str, float]
    """CPU time of the other threads, by name, an iteration."""
    hook_us: float
    """Time that the doctor's own code took, an iteration."""


class Stacks(TypedDict):
    """Samples of the stack of the training loop's thread."""

    period_us: float
    """Time that the sampler sleeps between two samples."""
    own_us: float
    """Time that taking the samples took, of all of them."""
    frames: list[Frame]
    stacks: list[list[int]]
    """Numbers in `frames`, the innermost first."""
    samples: list[tuple[float, int, float, float, float]]
    """(time, number in `stacks`, time that it stands for, time within it that the loop's thread ran, time within it
    that the thread could have run and had no core), microseconds.

    The last is 0 where the sampler cannot tell it from blocking."""


class Sampled(Window, Stacks):
    """The window in which nothing but the sampler runs."""

    starts_us: list[float]
    """Beginning of each iteration, and the last one's end, on the clock of the samples."""


class RankFile(TypedDict):
    """rank<R>.json."""

    schema: int
    rank: int
    local_world_size: int
    world_size: int
    device: str
    """cpu or cuda."""
    gpu: str | None
    versions: dict[str, str]
    found_by: str
    steps: int
    """Iterations that the script made until the file was written."""
    complete: bool
    reduced: bool
    """Whether only reads of values were marked, because the script compiles functions."""
    libraries: list[str]
    """Folders of installed packages and of Python's own modules."""
    loop: list[Frame]
    """Stack at which an iteration begins, innermost frame first."""
    keeps_out: NotRequired[list[str]]
    """Changes that the pipeline's model needs before one CUDA graph can hold its iteration."""
    plain: NotRequired[Plain]
    sampled: NotRequired[Sampled]
    traced: NotRequired[Window]
    marked: NotRequired[Marked]
    stacks: list[list[Frame]]
    """Innermost frame first."""
    operators: NotRequired[list[int]]
    """Numbers of the stacks whose call an operator makes, such as `a @ b`, `x[i]` or `if t:`."""
    calls: list[Call]


def rank_path(folder: Path, rank: int) -> Path:
    """Returns the path of a rank's file."""
    return folder / f"rank{rank}.json"


def trace_path(folder: Path, rank: int) -> Path:
    """Returns the path of a rank's trace."""
    return folder / f"rank{rank}_trace.json.gz"


def read_rank_files(folder: Path) -> list[RankFile]:
    """Returns all files of ranks in the folder, by rank. ValueError for one that is damaged or of another version."""
    files: list[RankFile] = []
    for path in folder.glob("rank*.json"):
        try:
            content: Any = json.loads(path.read_text(encoding="utf-8"))
            if content["schema"] != SCHEMA:
                raise ValueError(f"schema {content['schema']} and not {SCHEMA}: the doctor's versions differ")
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is no rank's file: {error}") from error
        files.append(content)
    return sorted(files, key=lambda file: file["rank"])
