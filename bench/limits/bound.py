"""The least time of an iteration, from what it computes and moves and from what depends on what, beside a record.

A piece of work takes at least as long as the slowest of the tensor cores, memory, links and PCIe needs for its share.
Pieces may overlap: a stage takes at least what the busiest of these needs for all of its pieces, and an iteration at
least the larger of two: what the busiest needs for all pieces, and the chain of pieces that wait for one another from
one lookup to the next. The chain holds for batches that are not cut into parts. What a program does beyond this
(element-wise kernels that are not fused, sorts, copies, waits) is no part of it, so nothing can be faster:

- table rows count once, however often they are named, and those of the batch before only as far as the GPU's cache
  cannot hold them; what the update reads that the lookup has read, likewise;
- activations count as far as the cache cannot hold them, and nothing element-wise that fits around a GEMM;
- tables of less than 10 MB need no exchange: every rank could have a copy.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

from rich import box
from rich.table import Table
from rich.text import Text

from dlrm_bench.bench.limits.efficiency import efficiency_in_words, restored
from dlrm_bench.bench.limits.floor import work_of_kernel
from dlrm_bench.bench.profile.kernel_names import STAGES
from dlrm_bench.bench.records.limits import LARGE_COPY, LARGE_PRODUCT, MEMORY_RATE, Limits, best_rate
from dlrm_bench.bench.records.schema import RunRecord
from dlrm_bench.dlrm.config import DataConfig, ModelConfig
from dlrm_bench.dlrm.dcnv2.work import dense_weights, gemm_shapes, mlp_widths, rows_named

RESOURCES = ("tensor cores", "memory", "links", "PCIe")
_COPIED_TO_ALL = 10e6  # bytes of a table that every rank could have whole
_OF_TWO = "dense forward/backward or dense update"  # which of the two has it, pipelines differ in
_CHAIN = ("lookup", "exchange of pooled vectors", "products", "exchange of gradients", "table update")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """The most that a GPU does in a second."""

    flop: Mapping[str, float]
    """FLOP, by precision of the run."""
    memory: float
    """Bytes."""
    links: float
    """Bytes that leave a GPU for others of its node."""
    pcie: float
    """Bytes from the host."""
    cache: float
    """Bytes that the L2 cache holds."""


# tensor cores, bf16: 798e12, the most that an 8192-cubed product of random numbers reached; tf32 and fp32: data sheet
# (H200 SXM, dense). memory: 4.3e12, a copy, read plus written; an addition in place over 1 GiB reached 4.23e12. links:
# 18 NVLinks of 26.6 GB/s. PCIe: generation 5, 16 lanes, before its encoding.
_H200 = Rates(
    flop={"bf16": 798e12, "tf32": 494.7e12, "fp32": 67e12},
    memory=4.3e12,
    links=478.8e9,
    pcie=64e9,
    cache=60e6,
)
_KNOWN = {"NVIDIA H200": _H200}


class Piece(NamedTuple):
    """Work of an iteration on one rank; amounts are FLOP and bytes."""

    name: str
    stage: str
    flop: float = 0.0
    memory: float = 0.0
    links: float = 0.0
    pcie: float = 0.0


class Bound(NamedTuple):
    """Least milliseconds, by stage and for the whole."""

    pieces: list[Piece]
    rates: Rates
    precision: str
    stages: dict[str, float]
    resources: dict[str, float]
    """What each needs for all pieces."""
    chain: float

    @property
    def iteration(self) -> float:
        """The least time of an iteration."""
        return max(self.chain, *self.resources.values())

    def needs(self, pieces: Sequence[Piece]) -> dict[str, float]:
        """Milliseconds that each of RESOURCES needs for the pieces."""
        per_second = (self.rates.flop[self.precision], self.rates.memory, self.rates.links, self.rates.pcie)
        amounts = [(piece.flop, piece.memory, piece.links, piece.pcie) for piece in pieces]
        totals = [sum(amount[i] for amount in amounts) for i in range(len(RESOURCES))]
        return {name: total / rate * 1e3 for name, total, rate in zip(RESOURCES, totals, per_second, strict=True)}


def bound_of(run: RunRecord, limits: Limits | None = None) -> Bound | None:
    """The bound of a record's configuration on its GPUs; None where their rates are not known (those of eight bits are
    not), and without GPUs.

    limits: whose measured rates count; ValueError if they are of another GPU.
    """
    gpu, config = run["machine"]["gpu"], run["config"]
    rates = _KNOWN.get(gpu or "")
    if rates is None or config["data"].get("variable_lengths") or config["pipeline"].get("fp8"):
        return None
    if limits is not None:
        if limits["machine"]["gpu"] != gpu:
            raise ValueError(f"{run['id']} ran on {gpu}, and {limits['id']} is of {limits['machine']['gpu']}")
        rates = measured_rates(limits, rates)
    pieces = pieces_of(config, rates)
    empty = Bound(pieces, rates, config["precision"], {}, {}, 0.0)
    chain = [piece for piece in pieces if piece.name in _CHAIN]
    return empty._replace(
        stages={stage: max(empty.needs([p for p in pieces if p.stage == stage]).values()) for stage in STAGES},
        resources=empty.needs(pieces),
        chain=sum(max(empty.needs([piece]).values()) for piece in chain),
    )


def with_batch(run: RunRecord, local_batch_size: int) -> RunRecord:
    """The record as it would be of another batch size, without anything measured. ValueError if that is none."""
    if local_batch_size < 1:
        raise ValueError(f"--batch {local_batch_size}: at least one sample is needed")
    sizes = {"local_batch_size": local_batch_size, "global_batch_size": local_batch_size * run["config"]["world_size"]}
    nothing = {"latency_ms": None, "samples_per_second": None, "stages_ms": None, "kernels": None}
    changed: Any = {**run, **nothing, "id": f"{run['id']}, {local_batch_size} a rank", "config": run["config"] | sizes}
    return cast(RunRecord, changed)


def measured_rates(limits: Limits, known: Rates) -> Rates:
    """Rates with what a limits record measured at large sizes: its precision's products, memory, and PCIe.

    Links are not among them: an exchange by NCCL is slower than kernels that write into other GPUs' memory.
    """
    precision = str(limits["config"].get("precision"))
    product = best_rate(limits, LARGE_PRODUCT)
    return replace(
        known,
        flop={**known.flop, precision: product} if product else known.flop,
        memory=best_rate(limits, MEMORY_RATE) or known.memory,
        pcie=best_rate(limits, LARGE_COPY) or known.pcie,
    )


def pieces_of(config: Mapping[str, Any], rates: Rates) -> list[Piece]:
    """The pieces of an iteration of a record's configuration, on one rank that has its share of everything."""
    model, data = restored(ModelConfig, config["model"]), restored(DataConfig, {**config["data"], "path": None})
    batch, ranks = config["local_batch_size"], config["world_size"]
    size, dim = 2 if config["precision"] == "bf16" else 4, model.embedding_dim
    input_dist, lookup, dense, backward, update = STAGES
    away = (ranks - 1) / ranks
    exchanged = [rows * dim * 4 >= _COPIED_TO_ALL for rows in model.rows]
    ids = batch * sum(hot for hot, needed in zip(model.multi_hot_sizes, exchanged, strict=True) if needed)
    pooled = batch * sum(exchanged) * dim * size * away
    columns = {"adagrad": dim, "rowwise_adagrad": 1, "sgd": 0}[config.get("optimizer", {}).get("embedding", "adagrad")]
    rows, row, state = rows_named(model, data, batch * ranks), 4.0 * dim, 4.0 * columns
    held = rates.cache / (row + state)
    moved = rows.new / ranks + max(0.0, (rows.distinct - rows.new) / ranks - held)
    weights = dense_weights(model)
    saved = batch * size * _saved(model)
    gemms = gemm_shapes(model, batch)
    in_chain = {name: 2.0 * m * n * k for name, (m, n, k) in gemms.items() if _waits(name)}
    beside = sum(2.0 * m * n * k for name, (m, n, k) in gemms.items() if not _waits(name))
    return [
        Piece("copy of the batch", input_dist, pcie=batch * 4.0 * (model.ids_per_sample + model.dense_in_features + 1)),
        Piece("exchange of ids", input_dist, links=ids * 4.0 * away),
        Piece(_CHAIN[0], lookup, memory=moved * row),
        Piece(_CHAIN[1], lookup, links=pooled),
        Piece(_CHAIN[2], dense, flop=sum(in_chain.values())),
        Piece("bottom MLP's products and weight gradients", dense, flop=beside),
        Piece("activations kept for the backward", dense, memory=2.0 * max(0.0, saved - rates.cache)),
        Piece(_CHAIN[3], backward, links=pooled),
        Piece(_CHAIN[4], backward, memory=max(0.0, moved * row - rates.cache) + moved * (row + 2.0 * state)),
        Piece("exchange of dense gradients and weights", _OF_TWO, links=2.0 * away * weights * size),
        Piece("dense update", update, memory=2.0 * max(0.0, 8.0 * weights / ranks - rates.cache)),
    ]


def bound_table(run: RunRecord, limits: Limits | None = None) -> Table | None:
    """Pieces, stages and the whole iteration beside what the record took; None where there is no bound.

    limits: as of bound_of.
    """
    bound = bound_of(run, limits)
    if bound is None:
        return None
    title = f"{run['id']}: least time by what is computed, moved and waited for"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for column in ("work", "GFLOP", "memory MB", "links MB", "PCIe MB", "least ms", "bound by", "took ms", "times"):
        table.add_column(column, justify="left" if column in ("work", "bound by") else "right")
    for stage in (*STAGES, _OF_TWO):
        own = [piece for piece in bound.pieces if piece.stage == stage]
        for piece in own:
            amounts = (piece.flop / 1e9, piece.memory / 1e6, piece.links / 1e6, piece.pcie / 1e6)
            cells = (f"{amount:.3g}" if amount else "" for amount in amounts)
            table.add_row(f"  {piece.name}", *cells, *_least(bound.needs([piece])), "", "")
        took, needs = (run["stages_ms"] or {}).get(stage), bound.needs(own)
        table.add_row(stage.replace("_", " "), *[""] * 4, *_least(needs), *_took(took, max(needs.values())))
    for name, ms in bound.resources.items():
        table.add_row(f"all pieces, {name}", *[""] * 4, f"{ms:.4f}", "", "", "")
    table.add_row("chain: " + ", ".join(_CHAIN), *[""] * 4, f"{bound.chain:.4f}", "", "", "")
    timed = run["host"] is None
    took = run["latency_ms"]["p50"] if run["latency_ms"] and timed else None
    table.add_row("iteration", *[""] * 4, f"{bound.iteration:.4f}", "", *_took(took, bound.iteration), style="bold")
    if timed:
        table.caption = Text(efficiency_in_words(run) or "")
        table.caption_justify, table.caption_style = "left", "none"
    return table


class RooflinePoint(NamedTuple):
    """Kernels that do one piece of work: what they compute for a byte of memory, and what a second of them computes."""

    name: str
    intensity: float
    """FLOP a byte."""
    flop_per_s: float
    us: float


def roofline_points(run: RunRecord) -> tuple[list[RooflinePoint], Rates] | None:
    """Work of a profiled run whose FLOP or bytes are known, and the GPU's rates; None where there is neither.

    Bytes are those that GEMMs' operands and results have if each is moved once, and the bound's otherwise; a lookup
    counts an operation for each number that it adds up, an update five.
    """
    bound = bound_of(run)
    if bound is None or not run.get("kernels"):
        return None
    config = run["config"]
    model, batch = restored(ModelConfig, config["model"]), config["local_batch_size"]
    size = 2 if config["precision"] == "bf16" else 4
    shapes = gemm_shapes(model, batch).values()
    operands = float(sum(size * (m * k + k * n + m * n) for m, n, k in shapes))
    amounts = {"GEMMs": (float(sum(2 * m * n * k for m, n, k in shapes)), operands)}
    numbers = float(batch * model.ids_per_sample * model.embedding_dim)
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
    return points, bound.rates


def _least(needs: Mapping[str, float]) -> tuple[str, str]:
    busiest = max(needs, key=lambda name: needs[name])
    return f"{needs[busiest]:.4f}", busiest if needs[busiest] else ""


def _took(ms: float | None, least: float) -> tuple[str, str]:
    return ("", "") if ms is None else (f"{ms:.4f}", f"{ms / least:.1f}" if least else "")


def _waits(gemm: str) -> bool:
    """Whether the next lookup waits for a product: not for weight gradients, nor for those of the bottom MLP."""
    return "weight gradient" not in gemm and "bottom" not in gemm


def _saved(model: ModelConfig) -> int:
    """Numbers a sample that the backward needs, those left out that it can make again from others."""
    width = (model.num_features + 1) * model.embedding_dim
    bottom, top = mlp_widths(model)
    return model.cross_layers * (width + model.cross_rank) + sum(bottom[1:]) + sum(top[1:-1])
