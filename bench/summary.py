"""Prints the result of a run, and gives its exit status."""

from collections.abc import Mapping
from statistics import median
from typing import Any

import torch.distributed as dist
from rich import box
from rich.console import Console
from rich.table import Table

from dlrm_bench.bench.limits.efficiency import efficiency_in_words
from dlrm_bench.bench.mlperf.log import check_compliance
from dlrm_bench.bench.records.schema import Evaluations, LatencySummary, RunRecord
from dlrm_bench.bench.run import Outcome
from dlrm_bench.bench.run_files import LOG_NAME
from dlrm_bench.dlrm.benchmarks import benchmark_of
from dlrm_bench.dlrm.runtime.ranks import Ranks

# In addition to those of every command, in dlrm/runtime/command_line.py.
EXIT_TARGET_MISSED = 3
EXIT_NOT_COMPLIANT = 4


def print_summary(outcome: Outcome, ranks: Ranks) -> int:
    """Prints latency and, if there was a target, the AUC and the compliance checker's verdict, on global rank 0.

    Returns the exit status, the same on every rank: 0 if the run had no target or reached it with a compliant log, 3 if
    it missed its target, 4 if the checker refuses the log for another reason than data that are not MLPerf's.
    Collective: no rank may exit, which makes torchrun end the others, while rank 0 still prints.
    """
    status = [_print(outcome) if ranks.rank == 0 else 0]
    dist.broadcast_object_list(status, src=0)
    return status[0]


def _print(outcome: Outcome) -> int:
    record, training = outcome.record, outcome.record["training"]
    assert training is not None
    missed = training["status"] == "aborted"
    console = Console(width=120)
    if record["latency_ms"] is not None:
        console.print(_latency_table(record, record["latency_ms"]))
        if record["latency_ms"].get("steady") is False:
            console.print(
                "not steady   between two eighths of the timed iterations the median changed by "
                f"{record['latency_ms']['drift']:+.1%}: time longer (--max-time)"
            )
    else:
        console.print(f"no latency: the run ended within its {record['warmup_iterations']} warm-up iterations")
    checkpoints = record.get("checkpoints")
    if checkpoints is not None and checkpoints["resumed"] is not None:
        resumed = checkpoints["resumed"]
        samples = f" ({resumed['samples']:,} samples)" if "samples" in resumed else ""
        console.print(
            f"resumed from {resumed['run_id']}, after iteration {resumed['iteration']:,}{samples}",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
    for in_words in (tiers_in_words, dynamic_rows_in_words, snapshots_in_words, conditions_in_words):
        for line in in_words(record):
            console.print(line)
    if training["status"] == "no_target":
        console.print("finished     all iterations; no target AUC was set, so nothing was evaluated")
    status = EXIT_TARGET_MISSED if missed else 0
    if training["target"] is not None:
        best = training["best_auc"]
        reached = "missed" if missed else "reached"
        auc = "none, as no evaluation was due" if training["auc"] is None else f"{training['auc']:.5f}"
        console.print(
            f"AUC          {auc}, target {training['target']:.5f} {reached} after "
            f"{training['epoch_num']:.3f} epochs" + (f"; best of any model {best:.5f}" if best is not None else "")
        )
        if "evaluations" in training:
            console.print(evaluations_in_words(training["evaluations"]))
        status = status or _check_log(outcome, console)
    console.print(f"record       {outcome.folder}", soft_wrap=True)
    return status


def evaluations_in_words(evaluations: Evaluations) -> str:
    """Returns a line on a run's evaluations: their number and samples, the median duration, and its rate."""
    samples, seconds = evaluations["samples"], median(evaluations["seconds"])
    return (
        f"evaluations  {len(evaluations['seconds'])} of {samples:,} samples, {seconds:.3f} s each (median): "
        f"{samples / seconds:,.0f} samples/s"
    )


def _check_log(outcome: Outcome, console: Console) -> int:
    """Prints the compliance checker's verdict on the log, if MLPerf has rules for the benchmark; returns the exit
    status."""
    benchmark = benchmark_of(outcome.record["config"])
    if benchmark is None or benchmark.ruleset is None:
        return 0
    ruleset = benchmark.ruleset.version
    verdict = check_compliance(outcome.folder / LOG_NAME, ruleset, benchmark.ruleset.pinned_to_data)
    if verdict.of_data:
        console.print(
            f"compliance   all passes except {', '.join(verdict.of_data)}: MLPerf training ruleset {ruleset} accepts "
            "only those of MLPerf's own data",
            soft_wrap=True,
        )
        return 0
    console.print(f"compliance   {'SUCCESS' if verdict.passed else 'FAILURE'} (MLPerf training ruleset {ruleset})")
    if verdict.passed:
        return 0
    console.print(verdict.output, markup=False, highlight=False)
    return EXIT_NOT_COMPLIANT


def tiers_in_words(record: RunRecord) -> list[str]:
    """Returns a sentence on the table rows that came from host memory, if tables are in two tiers of memory."""
    tiers = record["pipeline"].get("table_tiers")
    if not tiers:
        return []
    data, batches = record["config"]["data"], tiers[0]["batches"]
    moved, in_place = (sum(of_rank[key] for of_rank in tiers) / batches for key in ("moved", "in_place"))
    fixed = sum(of_rank.get("fixed_host_rows", 0) for of_rank in tiers)
    distinct = data["random_batches"] if data.get("source") == "random" else batches
    repeats = f"; the {distinct} random batches repeat, and rows then stay: raise --data.random-batches"
    return [
        f"table tiers  a batch had {moved:,.0f} rows brought from host memory, and used {in_place:,.0f} there"
        + (f", besides those of {fixed:,} that always stay there" if fixed else "")
        + (repeats if distinct < batches else "")
    ]


def dynamic_rows_in_words(record: RunRecord) -> list[str]:
    """Returns a sentence on the rows that were made when they were first named, of a run with --dynamic-rows."""
    ranks = record["pipeline"].get("dynamic_rows")
    if not ranks:
        return []
    used, places = max((rows["used"], rows["places"]) for rows in ranks)
    made, evicted, returned = (sum(rows[name] for rows in ranks) for name in ("made", "evicted", "returned"))
    lost = f", {evicted:,} lost their places, of which {returned:,} were named again" if evicted else ""
    return [f"dynamic rows {made:,} made{lost}; the fullest rank uses {used:,} of {places:,} places"]


def snapshots_in_words(record: RunRecord) -> list[str]:
    """Returns a sentence on the snapshots that a run took in memory, if any."""
    checkpoints = record.get("checkpoints")
    if checkpoints is None or not (taken := checkpoints.get("snapshots")):
        return []
    pauses = sorted(snapshot["paused_s"] for snapshot in taken)
    left_out = checkpoints.get("left_out", 0)
    return [
        f"snapshots    {len(taken)} of {taken[0]['gb']:.3g} GB in memory; training paused for {pauses[0]:.3g} to "
        f"{pauses[-1]:.3g} s"
        + (f"; {left_out} more were due while the only one was not yet on disk" if left_out else "")
    ]


def conditions_in_words(record: RunRecord) -> list[str]:
    """Returns sentences on the state of the GPUs: throttling, and their efficiency in time and power."""
    conditions = record.get("conditions")
    if not conditions:
        return []
    lines = []
    if conditions["throttled"]:
        reasons = sorted({span["reason"] for span in conditions["throttling"]})
        ranks = {span["rank"] for span in conditions["throttling"]}
        clock = conditions["sm_clock_mhz"]
        lines.append(
            f"throttled    {len(ranks)} GPU(s): {', '.join(reasons)}"
            + (f"; SM clock {clock[0]:.0f} to {clock[2]:.0f} MHz" if clock else "")
        )
    efficiency = efficiency_in_words(record)
    if efficiency is not None:
        lines.append(f"efficiency   {efficiency}")
    return lines


def pipeline_label(options: Mapping[str, Any]) -> str:
    """Returns the name of a record's pipeline and, for TorchRec's pipelines, the schedule."""
    return f"{options['name']}, {options['schedule']}" if "schedule" in options else str(options["name"])


def _latency_table(record: RunRecord, latency: LatencySummary) -> Table:
    config = record["config"]
    variant = pipeline_label(config["pipeline"])
    title = f"{record['id']}: {variant}; latency of an iteration (slowest rank), ms"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for column in ("ranks", "global batch", "n", "p50", "95 % interval", "p90", "p99", "mean", "by clock", "samples/s"):
        table.add_column(column, justify="right", no_wrap=True)
    interval = latency["ci95"]
    table.add_row(
        str(config["world_size"]),
        str(config["global_batch_size"]),
        str(latency["n"]),
        f"{latency['p50']:.3f}",
        "too short" if interval is None else f"{interval[0]:.3f}..{interval[1]:.3f}",
        *(f"{latency[name]:.3f}" for name in ("p90", "p99", "mean", "by_clock")),
        f"{record['samples_per_second']:,.0f}",
    )
    return table
