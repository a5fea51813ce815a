"""Compares ways to exchange table rows with host memory: python -m dlrm_bench.kernels.benchmark.exchanges [rows of an
exchange]. Takes half a minute on a GPU with 5 GB of host memory.

- kernel: a kernel that reads and writes host memory, as in training (kernels/embedding/tiered_rows.py), the same with
  several warps on few multiprocessors (blocks x warps), and the same in Triton.
- host threads: they gather the incoming rows in pinned memory, the copy engine moves these to the device and the
  leaving rows to pinned memory, and the threads scatter those. Without threads: the copies and the device's part alone,
  of rows that somebody has gathered, the upper limit.

Each exchange is of other rows of the host, at random places of 4 GiB. Rates are of exchanges one after another, alone
and while products of two matrices, which fill the GPU, follow one another on another stream.
"""

from __future__ import annotations

import gc
import mmap
import re
import sys
import time
from argparse import ArgumentParser
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import numba
import torch
from torch import Tensor

from dlrm_bench.kernels._cuda import available
from dlrm_bench.kernels.benchmark.graph_time import captured
from dlrm_bench.kernels.embedding.tiered_rows import ExchangeRows, Tiers, exchange_rows, triton_exchange_rows

_ROWS, _COLUMNS = 1 << 22, 128
_EXCHANGED = 20_159  # missing rows of 6,912 samples per GPU on two GPUs, half of the rows on the device, by simulation
_SETS = 16  # of rows, exchanged in turn: more than a CPU's cache holds
_THREADS = (2, 4, 8, 16)
_BLOCKS = ((4, 32), (8, 16), (16, 8), (16, 16), (32, 4), (132, 1))
"""Blocks, and warps of each, beside those that exchanges have."""
_WARM_S, _SECONDS = 0.2, 0.6
_IN_FLIGHT = 2


@numba.njit(nogil=True)  # type: ignore[untyped-decorator]
def gather(rows: Any, at: Any, out: Any) -> None:
    """out[k] = rows[at[k]]. rows, out: fp32 [any, n]; at: integers [N]."""
    for k in range(len(at)):
        out[k] = rows[at[k]]


@numba.njit(nogil=True)  # type: ignore[untyped-decorator]
def scatter(rows: Any, at: Any, new: Any) -> None:
    """rows[at[k]] = new[k], as in `gather`; `at` is distinct."""
    for k in range(len(at)):
        rows[at[k]] = new[k]


class Registered:
    """Host memory that the device accesses, fp32 [rows, 2, columns], in pages of 2 MB if the kernel has them, or of 4
    KB."""

    def __init__(self, rows: int, columns: int, device: torch.device, huge: bool) -> None:
        size = rows * 2 * columns * 4
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
        self.tensor = torch.frombuffer(memory, dtype=torch.float32).view(rows, 2, columns).zero_()
        self._registered = device.type == "cuda"
        if self._registered:
            status = torch.cuda.cudart().cudaHostRegister(self.tensor.data_ptr(), size, 0)
            assert int(status) == 0, f"{size} bytes of host memory cannot be registered: {status}"

    def huge_share(self) -> float:
        """Returns the share of the memory that is in huge pages."""
        text, address = Path("/proc/self/smaps").read_text(), self.tensor.data_ptr()
        for mapping in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", text):
            first, last = (int(end, 16) for end in mapping.split(" ", 1)[0].split("-"))
            if first <= address < last:
                return 1024 * int(re.findall(r"AnonHugePages: +(\d+)", mapping)[0]) / (last - first)
        raise AssertionError("the memory is mapped")

    def free(self) -> None:
        """Unregisters the memory."""
        if self._registered:
            torch.cuda.cudart().cudaHostUnregister(self.tensor.data_ptr())


class CopiedRows:
    """Exchanges of device[on_device[k]] with host[in_host[k]] by the copy engine, from and to memory that host threads
    gather and scatter."""

    def __init__(self, tiers: Tiers, on_device: Tensor, threads: int) -> None:
        """on_device: int64 [N], distinct, of every exchange. threads: 0 neither gathers nor scatters."""
        self._threads = threads
        parts = on_device.chunk(2 * max(1, threads))  # a thread gathers one while the other one is copied
        self._parts = [_Part(tiers, places) for places in parts]
        self._pool = ThreadPoolExecutor(max(1, threads))

    def exchange(self, in_host: Tensor) -> None:
        """Exchanges rows, and returns when all are in place. in_host: int64 [N] on the host, distinct."""
        pairs = list(zip(self._parts, in_host.split([part.size for part in self._parts]), strict=True))
        workers = [pairs[first : first + 2] for first in range(0, len(pairs), 2)]
        for _ in self._pool.map(self._exchange, workers):
            pass

    def _exchange(self, pairs: Sequence[tuple[_Part, Tensor]]) -> None:
        for part, in_host in pairs:
            if self._threads:
                gather(part.host, in_host.numpy(), part.incoming.numpy())
            part.launch()
        for part, in_host in pairs:
            part.wait()
            if self._threads:
                scatter(part.host, in_host.numpy(), part.leaving.numpy())

    def close(self) -> None:
        """Ends the threads, and frees memory."""
        self._pool.shutdown()
        for part in self._parts:
            part.staging.free()


class _Part:
    """Some rows of an exchange, on a stream of their own."""

    def __init__(self, tiers: Tiers, places: Tensor) -> None:
        device, (self.size, elements) = places.device, (len(places), tiers.device[0].numel())
        self.staging = Registered(2 * self.size, elements // 2, device, huge=True)
        self.incoming, self.leaving = self.staging.tensor.view(2, self.size, elements).unbind()
        """fp32 [size, elements] in pinned memory."""
        self.host = tiers.host.view(-1, elements).numpy()
        rows, (came, left) = (
            tiers.device.view(-1, elements),
            torch.empty(2, self.size, elements, device=device).unbind(),
        )

        def move() -> None:
            came.copy_(self.incoming, non_blocking=True)
            torch.index_select(rows, 0, places, out=left)
            rows.index_copy_(0, places, came)
            self.leaving.copy_(left, non_blocking=True)

        self._held = (move, came, left, places)  # a graph holds none of its tensors
        self._move, self._stream = move, None
        if device.type == "cuda":
            self._move, self._stream = captured(move).replay, torch.cuda.Stream(device)

    def launch(self) -> None:
        """Starts the copies."""
        with torch.cuda.stream(self._stream):
            self._move()

    def wait(self) -> None:
        """Waits for the copies."""
        if self._stream is not None:
            self._stream.synchronize()


class _Launched:
    """Work of the device, launched on a stream of its own, a few calls ahead."""

    def __init__(self, launch: Callable[[], object], priority: int = 0) -> None:
        self._launch, self._stream = launch, torch.cuda.Stream(priority=priority)
        self._in_flight: deque[torch.cuda.Event] = deque()

    def __call__(self) -> None:
        with torch.cuda.stream(self._stream):
            self._launch()
            event = torch.cuda.Event(blocking=True)
            event.record()
        self._in_flight.append(event)
        if len(self._in_flight) > _IN_FLIGHT:
            self._in_flight.popleft().synchronize()


def rates(works: Sequence[Callable[[], None]], warm_s: float = _WARM_S, seconds: float = _SECONDS) -> list[float]:
    """Returns the calls per second of each work, while all of them run over and over, each in a thread of its own, at
    least twice."""
    begin = time.perf_counter() + warm_s
    end = begin + seconds

    def repeat(work: Callable[[], None]) -> float:
        done, first, last = 0, 0.0, 0.0
        while last < end or done < 2:
            work()
            last = time.perf_counter()
            if last >= begin:
                first, done = first or last, done + 1
        return (done - 1) / (last - first)

    with ThreadPoolExecutor(len(works)) as pool:
        return list(pool.map(repeat, works))


def _in_turn(calls: Sequence[Callable[[], object]]) -> Callable[[], None]:
    """Returns a function that makes one call after another, over and over."""
    turn = cycle(calls)

    def call() -> None:
        next(turn)()

    return call


def _ways(tiers: Tiers, rows: int) -> Iterator[tuple[str, Callable[[], None], Callable[[], None]]]:
    """Yields the name of each way, an exchange, and what ends it."""
    on_device = torch.randperm(len(tiers.device), device="cuda")[:rows]
    in_host = [torch.randperm(len(tiers.host))[:rows] for _ in range(_SETS)]
    bounds = torch.tensor([0, rows], dtype=torch.int32, device="cuda")
    places, sets = on_device.int(), [of.int().cuda() for of in in_host]  # graphs hold none of their tensors

    def on_few(blocks: int, warps: int, *arguments: Any) -> None:
        ExchangeRows(*arguments).cuda(blocks, warps)

    kernels: list[tuple[str, Callable[..., None]]] = [
        ("kernel", exchange_rows),
        ("kernel, Triton", triton_exchange_rows),
    ]
    if available():
        kernels += [(f"kernel, {blocks} x {warps}", partial(on_few, blocks, warps)) for blocks, warps in _BLOCKS]
    for name, exchange in kernels:
        graphs = [captured(partial(exchange, tiers, places, of, bounds)) for of in sets]
        yield name, _Launched(_in_turn([graph.replay for graph in graphs])), torch.cuda.synchronize
    for threads in (0, *_THREADS):
        copied = CopiedRows(tiers, on_device, threads)
        name = f"{threads} host threads" if threads else "copies alone"
        yield name, _in_turn([partial(copied.exchange, of) for of in in_host]), copied.close


def main(rows: int) -> None:
    """Prints the rates of each way."""
    a, b = torch.randn(2, 8192, 4096, device="cuda", dtype=torch.bfloat16).unbind()
    products = _Launched(lambda: [torch.mm(a, b.t()) for _ in range(2)], priority=-1)
    (alone,) = rates([products])
    print(f"{rows} rows of 1 KB per exchange; products alone: {1e3 / alone:.2f} ms for two of 0.55 TFLOP each, bf16")
    print(f"{'':32} {'alone':>15} {'beside products':>16}   products")
    print(f"{'pages':14} {'way':17} {'rows/us':>8} {'GB/s':>6} {'rows/us':>9} {'GB/s':>6}   slower, ms lost a M rows")
    for huge in (False, True):
        _print_rates(huge, rows, products, alone)
        gc.collect()  # what is captured and what it uses refer to each other


def _print_rates(huge: bool, rows: int, products: Callable[[], None], alone: float) -> None:
    """Prints the rates of each way in pages of one size. alone: the rate of the products."""
    device, gb = torch.device("cuda"), 2e-9 * 2 * 4 * _COLUMNS * rows  # of rows and state, both directions
    host = Registered(_ROWS, _COLUMNS, device, huge)
    pages = f"{host.huge_share():.0%} of 2 MB"
    tiers = Tiers(torch.zeros(_ROWS, 2, _COLUMNS, device=device), host.tensor)
    for name, exchange, end in _ways(tiers, rows):
        exchange()  # compiles
        (once,), (beside, with_it) = rates([exchange]), rates([exchange, products])
        lost = (1 - with_it / alone) / (beside * rows) * 1e9
        print(
            f"{pages:14} {name:17} {once * rows / 1e6:8.1f} {once * gb:6.1f} {beside * rows / 1e6:9.1f} "
            f"{beside * gb:6.1f} {alone / with_it - 1:8.1%} {lost:16.2f}",
            flush=True,
        )
        end()
    torch.cuda.synchronize()
    host.free()


if __name__ == "__main__":
    parser = ArgumentParser(prog="python -m dlrm_bench.kernels.benchmark.exchanges", description=__doc__)
    parser.add_argument(
        "rows", nargs="?", type=int, default=_EXCHANGED, help=f"rows per exchange, 1 to {_ROWS} (default: %(default)s)"
    )
    asked = parser.parse_args().rows
    if not 0 < asked <= _ROWS:
        sys.exit(f"error: an exchange of {asked} rows: choose 1 to {_ROWS}, the rows in host memory")
    if not torch.cuda.is_available():
        sys.exit("error: exchanges with host memory need a CUDA GPU, and this machine has none")
    main(asked)
