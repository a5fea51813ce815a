"""Kernels of profiled runs beside the times of the same work alone, measured by `dlrm-bench limits`."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rich import box
from rich.table import Table

from dlrm_bench.bench.profile.kernel_names import GEMM, short_kernel_name
from dlrm_bench.bench.records.limits import (
    ACTIVATIONS,
    ADAGRAD,
    ALL_GATHER,
    ALL_REDUCE,
    ATTENTION,
    BATCH_COPY,
    GRADIENTS,
    IDS,
    LOOKUP,
    POOLED,
    REDUCE_SCATTER,
    UPDATE,
    Ceiling,
    Limits,
)
from dlrm_bench.bench.records.schema import Kernel, RunRecord
from dlrm_bench.dlrm.benchmarks import benchmark_of

WORK_SHOWN = 10

# Work done by several kernels: (name, pattern of the kernels' names, stage or None, ceilings whose sum is the best
# time).
_WORK: tuple[tuple[str, re.Pattern[str], str | None, tuple[str, ...]], ...] = (
    ("GEMMs", re.compile(rf"^{GEMM}"), None, ("GEMM: ",)),
    ("all-to-all of ids", re.compile("^NCCL SendRecv"), "input_dist", (IDS,)),
    ("all-to-all of pooled vectors", re.compile("^NCCL SendRecv"), "embedding_forward", (POOLED,)),
    ("all-to-all of their gradients", re.compile("^NCCL SendRecv"), "embedding_backward", (GRADIENTS,)),
    ("reduce-scatter", re.compile("^NCCL ReduceScatter"), "dense_forward_backward", (REDUCE_SCATTER,)),
    ("all-reduce", re.compile("^NCCL AllReduce"), None, (ALL_REDUCE,)),
    ("all-gather", re.compile("^NCCL AllGather"), "dense_update", (ALL_GATHER,)),
    ("dense exchange and update", re.compile("^sharded_adagrad"), "dense_update", (REDUCE_SCATTER, ALL_GATHER)),
    ("table lookup", re.compile(r"embedding\w*_forward|^(pooled_lookup|gather_rows)"), "embedding_forward", (LOOKUP,)),
    (
        "table update",
        re.compile(r"embedding\w*_backward|^(sorted_adagrad|row_wise_adagrad|distinct_sums)"),
        "embedding_backward",
        (UPDATE,),
    ),
    ("attention", re.compile("^(silu|last_query)_attention"), "dense_forward_backward", (ATTENTION,)),
    (
        "norms, gates and the tokens' input",
        re.compile("^((swish_|gated_)?norm|token_input):"),
        "dense_forward_backward",
        (ACTIVATIONS,),
    ),
    ("dense update", re.compile(r"^flat_ada|^_adagrad_of_tensors|^multi_tensor"), "dense_update", (ADAGRAD,)),
    ("copy of the batch", re.compile("^Memcpy HtoD|^fetch"), "input_dist", (BATCH_COPY,)),
)


def limits_table(limits: Limits) -> Table:
    """Returns the ceilings as a table, with one row for all GEMMs of a network."""
    table = Table(title=f"{limits['id']}: ceilings of one rank", title_justify="left", box=box.SIMPLE_HEAD)
    for column in ("work", "stage", "ms", "amount", "rate"):
        table.add_column(column, justify="left" if column in ("work", "stage") else "right", no_wrap=True)
    for ceiling in _grouped(limits["ceilings"]):
        amount, unit, stage = ceiling["amount"], ceiling["unit"], ceiling["stage"] or ""
        scale, prefix = (1e12, "T") if unit == "FLOP" else (1e9, "G") if unit == "B" else (1e3, "k")
        size = f"{amount / 1e6:,.2f} M{unit}" if unit != "launches" else f"{amount:g} launches"
        rate = f"{amount / ceiling['ms'] * 1000 / scale:,.2f} {prefix}{unit}/s"
        table.add_row(ceiling["name"], stage.replace("_", " "), f"{ceiling['ms']:.4f}", size, rate)
    return table


class Work(NamedTuple):
    """Kernels that together do one piece of work, per iteration, and its best possible time."""

    name: str
    stage: str
    """Stage of the longest kernel."""
    calls: float
    us: float
    best_us: float | None
    """Best time; None if no ceiling is known."""


def work_of_kernels(limits: Limits, run: RunRecord) -> list[Work]:
    """Returns the kernels of a profiled run, grouped by their work, longest first, with the ceilings of `limits`.

    A kernel whose work has no ceiling forms a group by itself. ValueError as for check_same_work.
    """
    check_same_work(limits, run)
    groups: dict[tuple[str, str | None, tuple[str, ...]], list[Kernel]] = {}
    for kernel in run.get("kernels") or ():
        kernel = Kernel(**{**kernel, "name": short_kernel_name(kernel["name"])})
        for name, pattern, stage, ceilings in _WORK:
            if pattern.search(kernel["name"]) and stage in (None, kernel["stage"]):
                groups.setdefault((name, stage, ceilings), []).append(kernel)
                break
        else:
            groups.setdefault((kernel["name"], kernel["stage"], ()), []).append(kernel)
    same_precision = limits["config"].get("precision") == run["config"]["precision"]
    # If ranks share the dense update, all-reduce and update handle parts, whose sizes were not measured.
    shared = any(REDUCE_SCATTER in ceilings for _, _, ceilings in groups)
    unknown = ((ALL_REDUCE,), (ADAGRAD,)) if shared else ()
    work = []
    for (name, _, ceilings), kernels in groups.items():
        known = ceilings not in unknown and (same_precision or ceilings in ((IDS,), (BATCH_COPY,)))
        best = sum(c["ms"] for c in limits["ceilings"] if known and c["name"].startswith(ceilings)) * 1000
        calls, us = (sum(kernel[field] for kernel in kernels) for field in ("calls", "us"))
        work.append(Work(name, kernels[0]["stage"], calls, us, best or None))
    return sorted(work, key=lambda each: -each.us)


def work_of_kernel(kernel: Kernel) -> str:
    """Returns the name of a kernel's work; for unknown work the kernel's short name."""
    name = short_kernel_name(kernel["name"])
    known = (work for work, pattern, stage, _ in _WORK if pattern.search(name) and stage in (None, kernel["stage"]))
    return next(known, name)


def work_table(limits: Limits, run: RunRecord) -> Table | None:
    """Returns the ten longest pieces of work of a profiled run, with their ceilings; None if the record has no kernels.

    ValueError as for work_of_kernels.
    """
    work = work_of_kernels(limits, run)
    if not work:
        return None
    title = f"{run['id']}: longest kernels of an iteration beside {limits['id']}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for column in ("work", "stage", "calls", "us", "at best", ""):
        table.add_column(column, justify="left" if column in ("work", "stage") else "right", overflow="fold")
    for each in work[:WORK_SHOWN]:
        table.add_row(each.name, each.stage.replace("_", " "), f"{each.calls:g}", f"{each.us:.1f}", *best_cells(each))
    return table


def best_cells(work: Work) -> tuple[str, str]:
    """Returns two cells of a table: the ceiling in microseconds, and the ratio of the work's time to it."""
    return ("not known", "") if work.best_us is None else (f"{work.best_us:.1f}", f"{work.us / work.best_us:.1f} x")


def check_same_work(limits: Limits, run: RunRecord) -> None:
    """Raises ValueError, naming the field, if the limits were measured for other work than the record's.

    Smaller differences are left to caveats_of_floor.
    """
    config = limits["config"]
    for name in ("world_size", "local_batch_size", "model"):
        same = config[name] == run["config"].get(name) or (name == "model" and _need_the_same(config, run["config"]))
        if not same:
            raise ValueError(f"{run['id']} has another {name} than {limits['id']}: measure limits with its flags")
    ran, measured = (x["machine"]["gpu"] or "CPUs" for x in (run, limits))
    if (ran == "CPUs") != (measured == "CPUs"):
        raise ValueError(
            f"{run['id']} ran on {ran}, but {limits['id']} is of {measured}: measure limits on the record's machine"
        )


def _need_the_same(measured: Mapping[str, Any], ran: Mapping[str, Any]) -> bool:
    """Whether two recorded configurations need the same products and tables, however else their models differ, for
    example in the code that computes them."""
    benchmark = benchmark_of(ran)
    if benchmark is None or benchmark.work is None or benchmark_of(measured) is not benchmark:
        return False
    if not ("model" in measured and "model" in ran):
        return False
    one, other = benchmark.restored(measured), benchmark.restored(ran)
    shapes = [benchmark.work.products(each, 1024) for each in (one, other)]
    return one.model.tables == other.model.tables and shapes[0] == shapes[1]


def caveats_of_floor(limits: Limits, run: RunRecord) -> list[str]:
    """Returns reasons why the floor may not apply to a record that check_same_work accepts.

    A field that only one of the two has is no reason.
    """
    ran, measured = run["machine"], limits["machine"]
    config = run["config"]
    found = []
    for name, of_run, of_floor in (
        ("precision", config["precision"], limits["config"].get("precision")),
        ("table optimizer", config.get("optimizer", {}).get("embedding"), limits["config"].get("table_optimizer")),
        ("GPU", ran["gpu"], measured["gpu"]),
        ("CPU", None if ran["gpu"] else ran["cpu"], measured["cpu"]),
        ("host", " + ".join(ran.get("hosts", ())), " + ".join(measured.get("hosts", ()))),
    ):
        if of_run and of_floor and of_run != of_floor:
            found.append(f"{name} {of_run}, beside limits of {of_floor}")
    if config["pipeline"].get("fp8"):
        found.append("products in eight bits, beside limits without any")
    return found


def _grouped(ceilings: Sequence[Ceiling]) -> Iterator[Ceiling]:
    groups: dict[str, Ceiling] = {}
    for ceiling in ceilings:
        network = ceiling["name"].split()[1] if ceiling["name"].startswith("GEMM") else None
        name = f"GEMMs: {network}" if network else ceiling["name"]
        if name in groups:
            groups[name]["ms"] += ceiling["ms"]
            groups[name]["amount"] += ceiling["amount"]
        else:
            groups[name] = Ceiling(**{**ceiling, "name": name})
    yield from groups.values()
