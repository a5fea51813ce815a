"""A ladder: rungs run one after another, round after round, so that the machine's drift affects all rungs equally.

dlrm-bench ladder --preset launch-bound [--field value ...]

Every run has fresh processes (bench/ladder/launching.py), here or where --launch starts them, so no rung inherits
another's memory, graphs or communicators. Each round runs every rung once on the same batches (equal --seed), in an
order drawn from the seed; the next round reverses the order, so that a linear drift cancels. Rungs are compared round
by round. With --host, a profiled run of each rung follows the last round. plan.json, ladder.json and the runs' records
and output stay together in one folder. plan.json and the finished runs suffice to resume an interrupted ladder.
"""

import contextlib
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from dlrm_bench.bench import ROOT
from dlrm_bench.bench.ladder.analysis import host_cost, rung_results
from dlrm_bench.bench.ladder.comparisons import precision_of
from dlrm_bench.bench.ladder.launching import MEASURE, run_by, run_forked
from dlrm_bench.bench.machine import cpu
from dlrm_bench.bench.machine.source import git_state, source_hash
from dlrm_bench.bench.records.json_file import json_text, write_whole
from dlrm_bench.bench.records.ladder import (
    LADDER_JSON,
    LADDER_SCHEMA,
    PLAN_JSON,
    PLAN_SCHEMA,
    HostCost,
    Ladder,
    Plan,
    PlannedRung,
    read_ladder,
    read_ladder_json,
    read_plan,
    run_id,
)
from dlrm_bench.bench.records.record import RUN_JSON, Record, read_record
from dlrm_bench.bench.stats.repetitions import balanced_orders
from dlrm_bench.dlrm.benchmark import Rung
from dlrm_bench.dlrm.data.lock import locked
from dlrm_bench.dlrm.runtime.command_line import FailedError

FEWEST_ROUNDS = 6
"""Number of rounds after which --rounds auto first checks its precision. It checks again after every second round, when
a linear drift has cancelled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """Number of rounds of a ladder, or their maximum, and the conditions that end it sooner; see Plan."""

    most: int
    detect: float | None = None
    minutes: float | None = None


def make_plan(
    rungs: Sequence[Rung],
    rounds: Rounds,
    *,
    processes: int,
    seed: int,
    flags: Sequence[str],
    command: str,
    host: bool = False,
    launch: Sequence[str] = (),
) -> Plan:
    """Returns the plan of a ladder on this machine; the arguments are the fields of Plan."""
    plan = Plan(
        schema=PLAN_SCHEMA,
        command=command,
        rungs=[PlannedRung(name=rung.name, flags=list(rung.flags), note=rung.note) for rung in rungs],
        rounds=rounds.most,
        detect=rounds.detect,
        minutes=rounds.minutes,
        seed=seed,
        processes=processes,
        flags=list(flags),
        host=host,
        node=this_node(),
        source={**git_state(ROOT)},
    )
    if launch:
        plan["launch"] = list(launch)
    return plan


def plan_to_resume(folder: Path) -> Plan:
    """Returns the plan of the interrupted ladder in `folder`, of which runs or profiled runs are missing.

    ValueError if it has finished, or was begun on another machine or by other program files: rounds of one ladder are
    compared with each other.
    """
    plan = read_plan(folder)
    if (folder / LADDER_JSON).exists() and not (plan["host"] and None in _host_costs(folder).values()):
        raise ValueError(
            f"{folder} is a finished ladder. Adding rounds until something is proven could prove anything: run a new "
            "ladder, with --rounds auto if the number is not known"
        )
    if plan["node"] != this_node():
        raise ValueError(f"{folder} was started on {plan['node']}, but this is {this_node()}: run a new ladder here")
    if plan["source"].get("source") != source_hash(ROOT):  # a commit of texts alone leaves the program as it was
        raise ValueError(
            f"{folder} was started from other source code ({plan['source']}): check that out, or run a new ladder"
        )
    return plan


def run_ladder(plan: Plan, folder: Path, say: Callable[[str], None] = lambda text: None) -> Iterator[str]:
    """Runs the rest of a plan and writes folder/ladder.json; yields each run's id when it has ended.

    folder: exists, and is empty or holds the interrupted ladder; an unfinished run is put aside and run again. Where
    it holds ladder.json, its rounds have ended, and missing profiled runs are all that is made. say:
    gets a sentence after each round on the differences that the rounds find. FailedError, with its output, if a timed
    run fails; ValueError if one ends within its warm-up, if the program's files change between timed runs, or if
    another command is running the ladder. The records made so far stay, and notes of the exception name them, whatever
    ends the ladder. A profiled run that fails leaves its log, and its rung without a host block.
    """
    rungs = [Rung(rung["name"], tuple(rung["flags"]), rung["note"]) for rung in plan["rungs"]]
    members: dict[str, list[Record]] = {rung.name: [] for rung in rungs}
    host_costs: dict[str, HostCost | None] = {}
    order: list[str] = []
    begun, made = time.monotonic(), 0
    if not (folder / PLAN_JSON).exists():  # its lock would be that of the file replaced
        write_whole(folder / PLAN_JSON, json_text(plan))
    only = locked(folder / PLAN_JSON, "another command runs this ladder: wait for its end")

    def write() -> None:
        ladder = Ladder(
            schema=LADDER_SCHEMA,
            id=folder.name,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            command=plan["command"],
            rounds=len(order) // len(rungs),
            detect=plan["detect"],
            seed=plan["seed"],
            rungs=rung_results(rungs, members, host_costs, by_precision=plan["detect"] is not None),
            order=order,
        )
        write_whole(folder / LADDER_JSON, json_text(ladder))

    with only, _naming_what_is_kept(folder, order):
        if (folder / LADDER_JSON).exists():
            ladder, members = read_ladder(folder)
            order += ladder["order"]
            host_costs |= _host_costs(folder)
            yield from order
        else:
            for number, in_turn in enumerate(balanced_orders(len(rungs), plan["rounds"], plan["seed"])):
                for rung in (rungs[i] for i in in_turn):
                    member = run_id(number, rung.name)
                    made += not (folder / member / RUN_JSON).exists()
                    members[rung.name].append(_run_or_read(plan, rung, folder, member))
                    order.append(member)
                    yield member
                seconds = (time.monotonic() - begun) * (1 + len(rungs) / made) if made else 0.0
                if _enough(plan, members, number + 1, seconds, say):
                    break
            write()
        for rung in rungs if plan["host"] else ():
            if host_costs.get(rung.name) is None:
                host_costs[rung.name] = _profile(plan, rung, folder)
                write()
            yield profiled_run_id(rung.name)


def _profile(plan: Plan, rung: Rung, folder: Path) -> HostCost | None:
    """Returns the results of a rung's profiled run, an existing one or one made now; None where it fails, which must
    not cost the hours of timed rounds. The reason is then in its log."""
    run = folder / profiled_run_id(rung.name)
    log = folder / f"{run.name}.log"
    try:
        if not (run / RUN_JSON).exists():
            put_aside(run)
            flags = ["host", *plan["flags"], *rung.flags, "--results-dir", str(folder), "--run-id", run.name]
            run_forked(flags, plan["processes"], log, MEASURE)
        return host_cost(read_record(run))
    except FailedError:
        return None
    except ValueError as error:  # of this process, so not in the ranks' output
        with log.open("a", encoding="utf-8") as file:
            file.write(f"{error}\n")
        return None


def _host_costs(folder: Path) -> dict[str, HostCost | None]:
    """Returns the results of each rung's profiled run in ladder.json, by its name; None where it is missing."""
    return {rung["name"]: rung["host"] for rung in read_ladder_json(folder)["rungs"]}


def profiled_run_id(rung: str) -> str:
    """Returns the id of a rung's profiled run; the output of the run is in the file of this name with .log."""
    return f"host-{rung}"


def _run_or_read(plan: Plan, rung: Rung, folder: Path, member: str) -> Record:
    """Returns the record of a run, which is made now unless it exists. ValueError if other program files made it."""
    run = folder / member
    if not (run / RUN_JSON).exists():
        put_aside(run)
        flags, output = [*plan["flags"], *rung.flags], folder / f"{member}.log"
        if "launch" not in plan:
            run_forked([*flags, "--results-dir", str(folder), "--run-id", member], plan["processes"], output)
            return _timed(read_record(run))  # run_forked has compared the files
        # The command may change the directory.
        run_by(plan["launch"], [*flags, "--results-dir", str(folder.resolve()), "--run-id", member], output)
    record = read_record(run)
    if record.run["git"].get("source") != plan["source"].get("source"):
        raise ValueError(
            f"{run} was made by other program files than this ladder ({record.run['git']}, not {plan['source']}): "
            f"restore those of the ladder, move {run.name} out of {folder} and resume, or run a new ladder"
        )
    return _timed(record)


def put_aside(unfinished: Path) -> None:
    """Renames the folder of an unfinished run, if there is one: runs never write into an existing folder."""
    if unfinished.exists():
        taken = len(list(unfinished.parent.glob(f"{unfinished.name}.unfinished-*")))
        unfinished.rename(f"{unfinished}.unfinished-{taken + 1}")


def _enough(
    plan: Plan, members: dict[str, list[Record]], rounds: int, seconds: float, say: Callable[[str], None]
) -> bool:
    """Whether no other round follows; reports which differences the rounds find. seconds: from the start of this
    command to the expected end of another round; 0 if it has made no run yet."""
    if plan["minutes"] is not None and seconds > plan["minutes"] * 60 and rounds < plan["rounds"]:
        say(f"another round would end after --max-minutes {plan['minutes']:g}: the ladder ends with {rounds} rounds")
        return True
    if plan["detect"] is None or rounds < 2:
        return False
    precision = precision_of(members, plan["detect"])
    say(precision.in_words(rounds, plan["detect"]))
    return rounds >= FEWEST_ROUNDS and rounds % 2 == 0 and precision.detectable[1] <= plan["detect"]


def this_node() -> str:
    """Returns the host name and, on Linux, the random id of this boot, which distinguishes hosts of one name."""
    return f"{platform.node()} (boot {cpu.boot_id()})"


@contextlib.contextmanager
def _naming_what_is_kept(folder: Path, order: Sequence[str]) -> Iterator[None]:
    """Adds a note to an exception on the timed runs that are kept; `order` holds the ids of the finished runs."""
    try:
        yield
    except BaseException as error:
        if order:
            kept = f"finished runs, kept in {folder}: {', '.join(order)}"
            error.add_note(f"{kept}; resume with dlrm-bench ladder --resume {folder}")
        raise


def _timed(record: Record) -> Record:
    """Returns the record. ValueError if it has no latency, at once instead of after hours of other runs."""
    if record.run["latency_ms"] is None:
        raise ValueError(
            f"{record.folder} ended after {len(record.losses)} iterations, within its warm-up: lower "
            f"--warmup-iterations ({record.run['warmup_iterations']}), or raise --target-auc"
        )
    return record
