"""A ladder: rungs run one after another, round after round, so that the machine's drift affects all of them equally.

dlrm-bench ladder --preset launch-bound [--field value ...]

Every run has fresh processes of its own (bench/ladder/launching.py), so no rung inherits another's memory, graphs or
communicators. Each round runs every rung once on the same batches (equal --seed), in an order drawn from the seed that
the next round runs backwards, so that a linear drift cancels. A rung is compared with another round by round. With
--host a profiled run of each rung follows the last round.
ladder.json and the members' records and output stay together in one folder.
"""

import contextlib
import json
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from dlrm_bench.bench.analysis.ladder import host_cost, rung_results
from dlrm_bench.bench.ladder.launching import MEASURE, run_forked
from dlrm_bench.bench.ladder.rungs import Rung
from dlrm_bench.bench.records.ladder import LADDER_JSON, LADDER_SCHEMA, HostCost, Ladder
from dlrm_bench.bench.records.record import Record, read_record
from dlrm_bench.bench.records.repetitions import balanced_orders


def draw_order(rungs: Sequence[Rung], rounds: int, seed: int) -> list[tuple[int, Rung]]:
    """Pairs (round, rung) in the order to run them: every rung once in each round, balanced over pairs of rounds."""
    return [(r, rungs[i]) for r, order in enumerate(balanced_orders(len(rungs), rounds, seed)) for i in order]


def run_ladder(
    rungs: Sequence[Rung],
    *,
    folder: Path,
    processes: int,
    rounds: int,
    seed: int,
    flags: Sequence[str],
    command: str,
    host: bool = False,
) -> Iterator[str]:
    """Runs everything and writes folder/ladder.json; yields the id of each run when it has ended.

    folder: exists and is empty. flags: flags of launch/dlrm.py for all rungs; a rung's own flags come after them. host:
    do one profiled run of each rung too, after all timed runs. FailedError, with its output, if a timed run fails;
    ValueError if one ends within its warm-up. The records made so far stay, and notes of the exception name them,
    whatever ends the ladder. A profiled run that fails leaves its log, and its rung without a host block.
    """
    members: dict[str, list[Record]] = {rung.name: [] for rung in rungs}
    host_costs: dict[str, HostCost | None] = {}
    order: list[str] = []

    def write() -> None:
        ladder = Ladder(
            schema=LADDER_SCHEMA,
            id=folder.name,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            command=command,
            rounds=rounds,
            seed=seed,
            rungs=rung_results(rungs, members, host_costs),
            order=order,
        )
        (folder / LADDER_JSON).write_text(json.dumps(ladder, indent=2) + "\n", encoding="utf-8")

    with _naming_what_is_kept(folder, order):
        for round_number, rung in draw_order(rungs, rounds, seed):
            run_id = f"{round_number:02d}-{rung.name}"
            place = ["--results-dir", str(folder), "--run-id", run_id]
            run_forked([*flags, *rung.flags, *place], processes, folder / f"{run_id}.log")
            members[rung.name].append(_timed(read_record(folder / run_id)))
            order.append(run_id)
            yield run_id
        write()
        for rung in rungs if host else ():
            run_id = profiled_run_id(rung.name)
            place = ["--results-dir", str(folder), "--run-id", run_id]
            try:
                run_forked(["host", *flags, *rung.flags, *place], processes, folder / f"{run_id}.log", MEASURE)
                host_costs[rung.name] = host_cost(read_record(folder / run_id))
            except ValueError:  # must not cost the hours of timed rounds
                host_costs[rung.name] = None
            write()
            yield run_id


@contextlib.contextmanager
def _naming_what_is_kept(folder: Path, order: Sequence[str]) -> Iterator[None]:
    """Notes on an exception which timed runs are kept; `order` holds the ids of those that have ended."""
    try:
        yield
    except BaseException as error:
        if order:
            error.add_note(f"finished before, and kept in {folder}: {', '.join(order)}")
        raise


def _timed(record: Record) -> Record:
    """The record, if it has a latency; else ValueError, at once and not after hours of other runs."""
    if record.run["latency_ms"] is None:
        raise ValueError(
            f"{record.folder} ended after {len(record.losses)} iterations, within its warm-up: lower "
            f"--warmup-iterations ({record.run['warmup_iterations']}), or raise --target-auc"
        )
    return record


def profiled_run_id(rung: str) -> str:
    """Id of a rung's profiled run; its output is in the file of this name with .log."""
    return f"host-{rung}"
