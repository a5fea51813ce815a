"""The form of ladder.json, and reading a ladder: the folder with ladder.json and its members, the records of its
runs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from dlrm_bench.bench.records.json_file import read_form
from dlrm_bench.bench.records.record import RUN_JSON, Record, read_record

LADDER_JSON = "ladder.json"
LADDER_SCHEMA = 1
PLAN_JSON = "plan.json"
PLAN_SCHEMA = 1


class Plan(TypedDict):
    """The content of plan.json, which is written first and suffices to resume an interrupted ladder."""

    schema: int
    command: str
    rungs: "list[PlannedRung]"
    rounds: int
    """Number of rounds, or their maximum."""
    detect: float | None
    """Difference (0.02: 2 %) that ends the ladder once the rounds can find it; None for a fixed number of rounds."""
    minutes: float | None
    """Minutes, from the start of each command that runs it, within which another round must be expected to end; None
    for no limit."""
    seed: int
    processes: int
    launch: NotRequired[list[str]]
    """Command that starts each run, instead of `processes` ranks on this machine."""
    flags: list[str]
    """Flags of launch/dlrm.py for all rungs."""
    host: bool
    node: str
    """Host name and boot id of the machine."""
    source: dict[str, Any]
    """State of the source tree."""


class PlannedRung(TypedDict):
    """A rung of a plan."""

    name: str
    flags: list[str]
    note: str


class Ladder(TypedDict):
    """The content of ladder.json."""

    schema: int
    id: str
    created: str
    command: str
    rounds: int
    """Number of rounds that were run."""
    detect: NotRequired[float | None]
    """Difference (0.02: 2 %) that ended the ladder once the rounds could find it; None, or absent, for a fixed number
    of rounds."""
    seed: int
    rungs: "list[RungResult]"
    order: list[str]
    """Ids of all members in the order in which they ran."""


class RungResult(TypedDict):
    """A rung in ladder.json. A speed-up of 2 means half the time; intervals are 95 %, None after one round.

    Speed-ups, intervals and `detectable` restate over_first and over_previous for readers.
    """

    name: str
    flags: list[str]
    record: str
    """Id of the member with the middle median."""
    records: list[str]
    """Ids of the members, one per round, in order."""
    median_ms: float
    """Geometric mean of the members' medians."""
    speedup_vs_first: float
    speedup_vs_previous: float
    ci95: list[float] | None
    """Interval of speedup_vs_first."""
    ci95_vs_previous: list[float] | None
    loss_difference: float | None
    """Largest relative difference from the first rung's losses over the first 5 iterations."""
    p99_ms: NotRequired[float]
    """Geometric mean of the members' 99th percentiles. Older ladders lack this field and the following ones."""
    note: NotRequired[str]
    """The change that the rung makes, in a sentence; may be empty."""
    detectable: NotRequired[float | None]
    """Smallest difference from the first rung that the rounds find; None for the first rung, after one round, and if
    rounds agree to the last digit."""
    detectable_interval: NotRequired[list[float] | None]
    """95 % interval of `detectable`: the spread of a few rounds is poorly known."""
    over_first: NotRequired["Judged | None"]
    """The comparison with the first rung; None for the first rung itself. For older ladders it is computed when
    read."""
    over_previous: NotRequired["Judged | None"]
    """The comparison with the previous rung."""
    agrees_by_luck: NotRequired[str | None]
    """A sentence if the rounds agree better than their iterations predict, so that intervals are too narrow."""
    spread: NotRequired["RungSpread"]
    timed_s: NotRequired[float]
    """Seconds of timed iterations of the shortest member."""
    by_clock_ms: NotRequired[float]
    """Geometric mean of the members' elapsed time over iterations."""
    power_w: NotRequired[float | None]
    """Power of a GPU over the timed iterations in watts, median of the members."""
    sm_clock_mhz: NotRequired[float | None]
    """SM clock over the timed iterations, median of the members."""
    host: NotRequired["HostCost | None"]
    """None if no profiled run was requested, or if it failed."""


class Judged(TypedDict):
    """One comparison of two rungs of a ladder, without the part that a drift of the machine explains."""

    log: float
    """Natural logarithm of the rung's time over the other's."""
    error: float | None
    """Standard error of `log`; None after one round."""
    freedom: float | None
    """Degrees of freedom of Student's t."""
    p_value: float | None
    """p value of no difference, corrected for all comparisons of the ladder's table (Holm)."""
    proven: bool
    """Whether p_value is below 1 - confidence."""


class RungSpread(TypedDict):
    """Standard deviation that a level adds to the logarithm of a run's median: see bench/stats/variance.py."""

    iteration: float | None
    process: float | None
    machine: float | None


class HostCost(TypedDict):
    """Results of a rung's profiled run per iteration, mean over the ranks."""

    record: str
    """Id of the profiled run."""
    cpu_ms: float
    wall_ms: float
    """Time of an iteration without the profiler."""
    kernel_launches: float
    graph_launches: float
    stream_syncs: float
    d2h_copies: float
    gpu_idle_fraction: float | None
    """Share of the traced iterations: see bench/profile/trace.py. None without a GPU."""


def read_ladder(folder: Path, read: Callable[[Path], Record] = read_record) -> tuple[Ladder, dict[str, list[Record]]]:
    """Returns ladder.json in `folder` and the members of each rung by its name.

    read: reads a member. ValueError, naming the file, if it or a member is missing or damaged.
    """
    ladder = read_ladder_json(folder)
    members = {rung["name"]: [read(folder / record) for record in rung["records"]] for rung in ladder["rungs"]}
    return ladder, members


def members_of(folder: Path) -> dict[str, list[str]] | None:
    """Returns the ids of each rung's finished timed runs, by the rung's name; None if `folder` is not a ladder.

    Rungs of an interrupted ladder may differ in their number of runs. ValueError, naming the file, if ladder.json, or
    the plan of an interrupted ladder, is damaged.
    """
    if (folder / LADDER_JSON).exists():
        return {rung["name"]: rung["records"] for rung in read_ladder_json(folder)["rungs"]}
    if not (folder / PLAN_JSON).exists():
        return None
    plan = read_plan(folder)
    ids = {rung["name"]: [run_id(number, rung["name"]) for number in range(plan["rounds"])] for rung in plan["rungs"]}
    return {name: [member for member in of if (folder / member / RUN_JSON).exists()] for name, of in ids.items()}


def ended_by_precision(folder: Path) -> bool:
    """Whether the precision of the rounds determined their number in the ladder in `folder` (--rounds auto)."""
    ladder = (folder / LADDER_JSON).exists()
    return (read_ladder_json(folder).get("detect") if ladder else read_plan(folder)["detect"]) is not None


def run_id(number: int, rung: str) -> str:
    """Returns the id of a rung's timed run in round `number`, counted from 0."""
    return f"{number:02d}-{rung}"


def read_plan(folder: Path) -> Plan:
    """Returns plan.json in `folder`; ValueError, naming the file, if it is missing or damaged."""
    return read_form(folder / PLAN_JSON, Plan, (PLAN_SCHEMA,), "name the folder of an interrupted ladder")


def read_ladder_json(folder: Path) -> Ladder:
    """Returns ladder.json in `folder`, without its members; ValueError, naming the file, if it is missing or
    damaged."""
    unfinished = (folder / PLAN_JSON).exists()
    way_out = f"finish it with dlrm-bench ladder --resume {folder}" if unfinished else "name the folder of a ladder"
    ladder = read_form(folder / LADDER_JSON, Ladder, (LADDER_SCHEMA,), way_out)
    for rung in ladder["rungs"]:
        rung.setdefault("note", "")
        rung.setdefault("host", None)
    return ladder
