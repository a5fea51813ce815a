"""Measures the ceilings of this machine: one piece of work at a time, alone, on all ranks at once.

Each piece has the size that it has in the preset's iteration on one rank: copies, the dense network's GEMMs, all
collectives, the memory traffic of tables and dense weights. On a GPU each is captured in a CUDA graph of many
repetitions, so that launches cost nothing; the cost of launches is measured separately.
"""

import time
from collections.abc import Callable, Iterator
from math import prod
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from dlrm_bench.bench.config import RunConfig
from dlrm_bench.bench.records.limits import (
    ACTIVATIONS,
    ADAGRAD,
    ALL_GATHER,
    ALL_REDUCE,
    ATTENTION,
    BATCH_COPY,
    GRADIENTS,
    IDS,
    LARGE_COPY,
    LARGE_PRODUCT,
    LOOKUP,
    MEMORY_RATE,
    POOLED,
    REDUCE_SCATTER,
    UPDATE,
    Ceiling,
)
from dlrm_bench.dlrm.benchmark import UNMEASURED, SampleSizes, TableWork
from dlrm_bench.dlrm.benchmarks import PRESETS, named
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.kernels.stages import DENSE, DENSE_UPDATE

_MEASUREMENTS = 7  # the median is reported
_LAUNCHES = 100


def measure(config: RunConfig, ranks: Ranks, sizes: SampleSizes = UNMEASURED) -> Iterator[Ceiling]:
    """Yields all ceilings, one after another; all ranks work at the same time, as in training. Collective.

    sizes: of the samples, for the benchmark's `work`. ValueError if the benchmark does not count the work of an
    iteration.
    """
    benchmark = named(config.benchmark)
    work, batch, device = benchmark.work, config.local_batch_size, ranks.device
    if work is None:
        counted = ", ".join(name for name, (other, _) in PRESETS.items() if other.work is not None)
        raise ValueError(
            f"--preset {config.preset}: the work of {benchmark.title} is not counted: choose one of {counted}"
        )
    exchanged = torch.bfloat16 if config.precision == "bf16" else torch.float32
    of_tables = work.table_work(config, batch, exchanged.itemsize, sizes)
    pieces = work.pieces(config, 1, 0.0, sizes)
    timer = _Timer(ranks)

    batch_bytes = round(sum(piece.pcie for piece in pieces))
    host = torch.zeros(batch_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    gpu = torch.zeros(batch_bytes, dtype=torch.uint8, device=device)
    yield timer.time(BATCH_COPY, "input_dist", batch_bytes, "B", lambda: gpu.copy_(host, non_blocking=True))
    yield timer.time("device to host: one batch", None, batch_bytes, "B", lambda: host.copy_(gpu, non_blocking=True))

    of_ids = torch.int64 if config.model.tables.raw_ids else torch.int32
    yield from _collectives(timer, of_tables, work.dense_weights(config), ranks, of_ids, exchanged)
    for name, shape in work.products(config, batch, sizes).items():
        yield timer.time(name, DENSE, 2.0 * prod(shape), "FLOP", _gemm(shape, exchanged, device))

    large = 8192 if device.type == "cuda" else 256
    product = timer.time(LARGE_PRODUCT, None, 2.0 * large**3, "FLOP", _gemm((large, large, large), exchanged, device))
    yield product
    source = torch.zeros(large << 15, dtype=torch.uint8, pin_memory=device.type == "cuda")
    target = torch.empty_like(source, device=device)
    yield timer.time(LARGE_COPY, None, source.nbytes, "B", lambda: target.copy_(source, non_blocking=True))
    rates = [timer.time(name, None, 2.0 * _copied_bytes(device), "B", work) for name, work in _memory(device).items()]
    yield from rates
    rate = max(rates, key=lambda one: one["amount"] / one["ms"])
    memory = {of: sum(piece.memory for piece in pieces if piece.stage == of) for of in (DENSE, DENSE_UPDATE)}
    attention = sum(piece.flop for piece in pieces if piece.name == "attention")
    for name, stage, amount, of in (
        (LOOKUP, "embedding_forward", of_tables.lookup, rate),
        (UPDATE, "embedding_backward", of_tables.update, rate),
        (ACTIVATIONS, None, memory[DENSE], rate),  # while the GEMMs run, which move them
        (ADAGRAD, DENSE_UPDATE, memory[DENSE_UPDATE] + 4.0 * work.dense_weights(config), rate),  # and gradients
        (ATTENTION, DENSE, attention, product),
    ):
        if amount:
            yield Ceiling(name=name, stage=stage, ms=amount / of["amount"] * of["ms"], amount=amount, unit=of["unit"])
    yield from _launches(timer, device)


def _collectives(
    timer: "_Timer",
    of_tables: TableWork,
    dense_weights: int,
    ranks: Ranks,
    of_ids: torch.dtype,
    exchanged: torch.dtype,
) -> Iterator[Ceiling]:
    """Yields the ceilings of an iteration's collectives; ids have the dtype `of_ids`, looked-up vectors and gradients
    `exchanged`."""
    ids, pooled, device = round(of_tables.ids), round(of_tables.vectors), ranks.device
    for name, stage, count, dtype in (
        (IDS, "input_dist", ids, of_ids),
        (POOLED, "embedding_forward", pooled, exchanged),
        (GRADIENTS, "embedding_backward", pooled, exchanged),
    ):
        yield timer.time(name, stage, count * dtype.itemsize, "B", _all_to_all(count, dtype, ranks))
    part = torch.zeros(-(-dense_weights // ranks.world_size), dtype=exchanged, device=device)
    whole = part.repeat(ranks.world_size)
    yield timer.time(ALL_REDUCE, "dense_forward_backward", whole.nbytes, "B", lambda: dist.all_reduce(whole))
    if device.type == "cuda":  # gloo has no reduce-scatter
        yield timer.time(REDUCE_SCATTER, None, whole.nbytes, "B", lambda: dist.reduce_scatter_tensor(part, whole))
        yield timer.time(ALL_GATHER, None, whole.nbytes, "B", lambda: dist.all_gather_into_tensor(whole, part))


def _all_to_all(count: int, dtype: torch.dtype, ranks: Ranks) -> Callable[[], Any]:
    """Returns an exchange of about `count` elements, the same number between each pair of ranks."""
    sent = torch.zeros(max(1, count // ranks.world_size) * ranks.world_size, dtype=dtype, device=ranks.device)
    received = torch.empty_like(sent)
    return lambda: dist.all_to_all_single(received, sent)


def _gemm(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> Callable[[], Any]:
    m, n, k = shape
    # Values affect a GPU's power, and so its clock: zeros would give too high a rate.
    a, b = torch.randn(m, k, device=device, dtype=dtype), torch.randn(k, n, device=device, dtype=dtype)
    out = torch.empty(m, n, device=device, dtype=dtype)
    return lambda: torch.mm(a, b, out=out)


def _copied_bytes(device: torch.device) -> int:
    """Returns the size in bytes of a copy that no cache can hold."""
    return 1 << 30 if device.type == "cuda" else 1 << 26


def _memory(device: torch.device) -> dict[str, Callable[[], Any]]:
    """Returns functions that read and write _copied_bytes, by name.

    The fastest is a ceiling for kernels; the driver's own copy (2.8 TB/s on an H200) may be slower.
    """
    source = torch.zeros(_copied_bytes(device) // 4, device=device)
    target = torch.empty_like(source)
    return {
        f"{MEMORY_RATE}copy": lambda: target.copy_(source),
        f"{MEMORY_RATE}add in place": lambda: target.add_(1),
    }


def _launches(timer: "_Timer", device: torch.device) -> Iterator[Ceiling]:
    """Yields the host time of launching kernels one by one, and as a graph."""
    x = torch.zeros(1, device=device)

    def launch() -> None:
        for _ in range(_LAUNCHES):
            x.add_(1)

    yield timer.time_launching(f"launch: {_LAUNCHES} kernels", launch)
    if device.type == "cuda":
        graph = _captured(launch, 1)
        yield timer.time_launching(f"replay: a graph of {_LAUNCHES} kernels", graph.replay)


class _Timer:
    """Times work on all ranks at once; the slowest rank counts."""

    def __init__(self, ranks: Ranks) -> None:
        self._cuda = ranks.device.type == "cuda"
        self._repeats = 20 if self._cuda else 3

    def time(self, name: str, stage: str | None, amount: float, unit: str, work: Callable[[], Any]) -> Ceiling:
        """Times the work on the device. Collective."""
        work()
        if self._cuda:
            graph = _captured(work, self._repeats)
            times = [self._on_gpu(graph) for _ in range(_MEASUREMENTS)]
        else:
            times = [self._on_cpu(work) for _ in range(_MEASUREMENTS)]
        return Ceiling(name=name, stage=stage, ms=_slowest(median(times)) / self._repeats, amount=amount, unit=unit)

    def time_launching(self, name: str, work: Callable[[], Any]) -> Ceiling:
        """Times the host while it launches _LAUNCHES kernels, which the device finishes later. Collective."""
        work()
        times = []
        for _ in range(_MEASUREMENTS):
            self._start_together()
            begin = time.perf_counter()
            work()
            times.append((time.perf_counter() - begin) * 1000)
        return Ceiling(name=name, stage=None, ms=_slowest(median(times)), amount=_LAUNCHES, unit="launches")

    def _on_gpu(self, graph: torch.cuda.CUDAGraph) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._start_together()
        graph.replay()  # synchronises the ranks: their collectives wait for each other
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)

    def _on_cpu(self, work: Callable[[], Any]) -> float:
        self._start_together()
        begin = time.perf_counter()
        for _ in range(self._repeats):
            work()
        return (time.perf_counter() - begin) * 1000

    def _start_together(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()
        dist.barrier()


def _captured(work: Callable[[], Any], repeats: int) -> torch.cuda.CUDAGraph:
    """Returns a graph of `repeats` times the work, which the caller has run before, so that the graph initialises
    nothing."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(repeats):
            work()
    torch.cuda.synchronize()
    return graph


def _slowest(ms: float) -> float:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, ms)
    return max(everyone)
