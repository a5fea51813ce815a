"""The least time of an iteration, by its computation, bytes and dependencies, beside a record.

A piece of work takes at least the longest of its times on the tensor cores, memory, links and PCIe. Pieces may overlap:
a stage takes at least its pieces' time on the busiest of these resources. An iteration takes at least the larger of two
times: that of all pieces on the busiest resource, and that of the chain of pieces that wait for one another from one
lookup to the next. The chain is valid for batches that are not split. A benchmark's `work` counts only necessary work,
none that a better program could leave out. A program's other work (element-wise kernels that are not fused, sorts,
copies, waits) is not counted, so no program can be faster.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

from rich import box
from rich.table import Table
from rich.text import Text

from dlrm_bench.bench.limits.efficiency import efficiency_in_words, sizes_of
from dlrm_bench.bench.limits.floor import caveats_of_floor, work_of_kernel
from dlrm_bench.bench.profile.kernel_names import STAGES
from dlrm_bench.bench.records.limits import ALL_TO_ALLS, LARGE_COPY, LARGE_PRODUCT, MEMORY_RATE, Limits, best_rate
from dlrm_bench.bench.records.schema import RunRecord
from dlrm_bench.dlrm.benchmark import Piece
from dlrm_bench.dlrm.benchmarks import benchmark_of
from dlrm_bench.dlrm.runtime.gpu_types import GpuRates, gpu_type

RESOURCES = ("tensor cores", "memory", "links", "PCIe")


NO_BOUND = (
    "no bound: it needs a GPU with rates that are known (dlrm/runtime/gpu_types.py) or measured in this precision "
    "(--rates LIMITS), and products of 16 bits or more"
)


class Bound(NamedTuple):
    """Least times in milliseconds, of each stage and of the whole iteration."""

    pieces: list[Piece]
    rates: GpuRates
    precision: str
    stages: dict[str, float]
    resources: dict[str, float]
    """Time of each resource for all pieces."""
    chain: float

    @property
    def iteration(self) -> float:
        """The least time of an iteration."""
        return max(self.chain, *self.resources.values())

    def needs(self, pieces: Sequence[Piece]) -> dict[str, float]:
        """Returns the milliseconds of each of RESOURCES for the pieces."""
        per_second = (self.rates.flop[self.precision], self.rates.memory, self.rates.links, self.rates.pcie)
        amounts = [(piece.flop, piece.memory, piece.links, piece.pcie) for piece in pieces]
        totals = [sum(amount[i] for amount in amounts) for i in range(len(RESOURCES))]
        return {name: total / rate * 1e3 for name, total, rate in zip(RESOURCES, totals, per_second, strict=True)}


def bound_of(run: RunRecord, limits: Limits | None = None) -> Bound | None:
    """Returns the bound of a record's configuration on its machine; None if a rate is unknown (as are those of eight
    bits), or if the benchmark's work is not counted.

    limits: a limits record with measured rates; ValueError if it is of another GPU.
    """
    gpu, config = run["machine"]["gpu"], run["config"]
    benchmark = benchmark_of(config)
    if limits is not None and limits["machine"]["gpu"] != gpu:
        ran, measured = gpu or "CPUs", limits["machine"]["gpu"] or "CPUs"
        raise ValueError(f"{run['id']} ran on {ran}, but {limits['id']} is of {measured}")
    known = gpu_type(gpu)
    known_rates = known.rates if known else None
    rates = known_rates if limits is None else measured_rates(limits, known_rates)
    if rates is None or benchmark is None or benchmark.work is None or config["pipeline"].get("fp8"):
        return None
    if config["precision"] not in rates.flop:
        return None
    pieces = benchmark.work.pieces(benchmark.restored(config), config["world_size"], rates.cache, sizes_of(run))
    empty = Bound(pieces, rates, config["precision"], {}, {}, 0.0)
    chain = [piece for piece in pieces if piece.waits]
    return empty._replace(
        stages={stage: max(empty.needs([p for p in pieces if p.stage == stage]).values()) for stage in STAGES},
        resources=empty.needs(pieces),
        chain=sum(max(empty.needs([piece]).values()) for piece in chain),
    )


def with_batch(run: RunRecord, local_batch_size: int) -> RunRecord:
    """Returns the record as for another batch size, without measurements. ValueError for a batch size below 1."""
    if local_batch_size < 1:
        raise ValueError(f"--batch {local_batch_size}: at least one sample is needed")
    sizes = {"local_batch_size": local_batch_size, "global_batch_size": local_batch_size * run["config"]["world_size"]}
    nothing = {"latency_ms": None, "samples_per_second": None, "stages_ms": None, "kernels": None}
    changed: Any = {**run, **nothing, "id": f"{run['id']}, {local_batch_size} a rank", "config": run["config"] | sizes}
    return cast(RunRecord, changed)


def measured_rates(limits: Limits, known: GpuRates | None) -> GpuRates | None:
    """Returns the rates that a limits record measured at large sizes: its precision's products, memory, and PCIe.

    Known rates replace those that the record lacks, and links if known: an exchange by NCCL is slower than kernels that
    write into other GPUs' memory. None if a rate is neither measured nor known.
    """
    precision = str(limits["config"].get("precision"))
    found = {
        f"products in {precision}": best_rate(limits, LARGE_PRODUCT),
        "memory": best_rate(limits, MEMORY_RATE),
        "PCIe": best_rate(limits, LARGE_COPY),
        "links": None if known else max((best_rate(limits, name) or 0.0 for name in ALL_TO_ALLS), default=0.0) or None,
    }
    product, memory, pcie, links = found.values()
    if known is not None:
        memory, pcie, links = memory or known.memory, pcie or known.pcie, known.links
    if memory is None or pcie is None or links is None:
        return None
    measured = ", ".join(name for name, rate in found.items() if rate is not None)
    others = ", ".join(name for name, rate in found.items() if rate is None)
    return GpuRates(
        flop={**(known.flop if known else {}), **({precision: product} if product else {})},
        memory=memory,
        links=links,
        pcie=pcie,
        cache=known.cache if known else 0.0,
        source=f"rates measured by {limits['id']}: {measured or 'none'}"
        + (f"; {known.source}: {others}" if known and others else ""),
    )


def bound_table(run: RunRecord, limits: Limits | None = None) -> Table | None:
    """Returns a table of pieces, stages and the whole iteration beside the record's times; None without a bound.

    limits: as for bound_of.
    """
    bound = bound_of(run, limits)
    if bound is None:
        return None
    title = f"{run['id']}: least time of its computation, traffic and waits"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for column in ("work", "GFLOP", "memory MB", "links MB", "PCIe MB", "least ms", "bound by", "took ms", "times"):
        table.add_column(column, justify="left" if column in ("work", "bound by") else "right")
    for stage in dict.fromkeys((*STAGES, *(piece.stage for piece in bound.pieces))):
        own = [piece for piece in bound.pieces if piece.stage == stage]
        for piece in own:
            amounts = (piece.flop / 1e9, piece.memory / 1e6, piece.links / 1e6, piece.pcie / 1e6)
            cells = (f"{amount:.3g}" if amount else "" for amount in amounts)
            table.add_row(f"  {piece.name}", *cells, *_least(bound.needs([piece])), "", "")
        took, needs = (run["stages_ms"] or {}).get(stage), bound.needs(own)
        table.add_row(stage.replace("_", " "), *[""] * 4, *_least(needs), *_took(took, max(needs.values())))
    for name, ms in bound.resources.items():
        table.add_row(f"all pieces, {name}", *[""] * 4, f"{ms:.4f}", "", "", "")
    table.add_row(
        "chain: " + ", ".join(piece.name for piece in bound.pieces if piece.waits),
        *[""] * 4,
        f"{bound.chain:.4f}",
        "",
        "",
        "",
    )
    timed = run["host"] is None
    notes = [bound.rates.source]
    if limits is not None:
        notes += [f"warning: {caveat}" for caveat in caveats_of_floor(limits, run)]
    took = run["latency_ms"]["p50"] if run["latency_ms"] and timed else None
    table.add_row("iteration", *[""] * 4, f"{bound.iteration:.4f}", "", *_took(took, bound.iteration), style="bold")
    if timed:
        notes.append(efficiency_in_words(run) or "")
    table.caption = Text("\n".join(filter(None, notes)))
    table.caption_justify, table.caption_style = "left", "none"
    return table


class RooflinePoint(NamedTuple):
    """Kernels of one piece of work: FLOP per byte of memory, and FLOP per second."""

    name: str
    intensity: float
    """FLOP per byte."""
    flop_per_s: float
    us: float


def roofline_points(run: RunRecord) -> tuple[list[RooflinePoint], GpuRates] | None:
    """Returns a profiled run's pieces of work with known FLOP or bytes, and the GPU's rates; None without a bound or
    such pieces.

    Bytes of GEMMs are those of operands and results, each moved once; other bytes are the bound's. A lookup counts one
    operation for each number that it adds, an update five.
    """
    bound = bound_of(run)
    if bound is None or not run.get("kernels"):
        return None
    config = run["config"]
    benchmark = benchmark_of(config)
    assert benchmark is not None
    assert benchmark.work is not None  # there is a bound
    training, batch = benchmark.restored(config), config["local_batch_size"]
    tables = training.model.tables
    size = 2 if config["precision"] == "bf16" else 4
    shapes = benchmark.work.products(training, batch, sizes_of(run)).values()
    operands = float(sum(size * (m * k + k * n + m * n) for m, n, k in shapes))
    amounts = {"GEMMs": (float(sum(2 * m * n * k for m, n, k in shapes)), operands)}
    numbers = benchmark.work.table_work(training, batch, size, sizes_of(run)).ids * tables.columns
    by_name = {piece.name: piece for piece in bound.pieces}
    for name, piece, operations in (
        ("table lookup", "lookup", numbers),
        ("table update", "table update", 5 * numbers),  # sum, square, add, root and division, subtraction
    ):
        if by_name[piece].memory:
            amounts[name] = (operations, by_name[piece].memory)
    us: dict[str, float] = {}
    for kernel in run["kernels"] or ():
        name = work_of_kernel(kernel)
        if name in amounts:
            us[name] = us.get(name, 0.0) + kernel["us"]
    points = []
    for name, spent in us.items():
        flop, moved = amounts[name]
        points.append(RooflinePoint(name, flop / moved, flop / spent * 1e6, spent))
    return (points, bound.rates) if points else None


def _least(needs: Mapping[str, float]) -> tuple[str, str]:
    busiest = max(needs, key=lambda name: needs[name])
    return f"{needs[busiest]:.4f}", busiest if needs[busiest] else ""


def _took(ms: float | None, least: float) -> tuple[str, str]:
    return ("", "") if ms is None else (f"{ms:.4f}", f"{ms / least:.1f}" if least else "")
