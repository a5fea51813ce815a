"""Measures the rate at which one rank's batches are built, on an otherwise idle machine: dlrm-bench data speed --preset
mlperf-dlrmv4 DIR

Reader threads build batches as in a run; one consumer takes them in order and drops them. Compare the rate with the
samples per second of a run; files in the page cache give the rate of building, a first pass over cold files the disk's.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro

from dlrm_bench.dlrm.data.loader import Prefetcher
from dlrm_bench.dlrm.dlrmv4.config import Deal
from dlrm_bench.dlrm.dlrmv4.data.builder import BatchBuilder
from dlrm_bench.dlrm.dlrmv4.data.cache import Cache, find_cache
from dlrm_bench.dlrm.dlrmv4.data.deal import RankSamples
from dlrm_bench.dlrm.dlrmv4.data.item_maps import ItemMaps
from dlrm_bench.dlrm.dlrmv4.data.order import Order
from dlrm_bench.dlrm.dlrmv4.data.windows import WindowIndex
from dlrm_bench.dlrm.runtime.command_line import exit_status
from dlrm_bench.dlrm.runtime.parsed import options_of


@dataclass(kw_only=True, slots=True, frozen=True)
class SpeedConfig:
    """Building, measured."""

    directory: Annotated[Path, tyro.conf.Positional]
    """Folder of data."""
    local_batch_size: int = 1024
    """Samples of a rank's batch."""
    world_size: int = 8
    """Number of ranks among which a window's samples are distributed; the first one's are built."""
    first_window: int = 0
    """First window; the last one evaluates, and is left out."""
    deal: Deal = "stride"
    """Dealing of samples to the ranks (--data.deal)."""
    reader_threads: int = 2
    """Threads that build."""
    seconds: float = 10.0
    """Time of the measurement."""

    def __post_init__(self) -> None:
        for flag in ("local_batch_size", "world_size", "reader_threads", "seconds"):
            if not getattr(self, flag) > 0:
                raise ValueError(f"--{flag.replace('_', '-')} is {getattr(self, flag)}: choose more than 0")


@dataclass(frozen=True, slots=True)
class Speed:
    """The result of one rank."""

    batches: int
    """Batches that were timed."""
    samples_per_s: float
    cpu_us: float
    """CPU time of the process for a sample, in microseconds."""
    events: float
    """Events of a history, at the mean."""
    mean_mb: float
    """MB of a batch."""
    max_mb: float
    """MB of the largest."""


def speed(config: SpeedConfig) -> Speed:
    """Returns the speed of one rank; ValueError if the data cannot be read or have too few samples."""
    cache = Cache.open(find_cache(config.directory))
    index = WindowIndex.open(cache)
    if not 0 <= config.first_window < len(index) - 1:
        raise ValueError(
            f"--first-window is {config.first_window}, and {config.directory} has {len(index) - 1} windows to train "
            "on, counted from 0: choose one of them, or data of more days"
        )
    order = Order(index, config.first_window, len(index) - 1, config.world_size, config.local_batch_size)
    if len(order) < 3:
        raise ValueError(
            f"{config.directory} has {len(order)} batches of {config.world_size} x {config.local_batch_size} samples "
            f"from window {config.first_window} on: lower --local-batch-size, --world-size or --first-window"
        )
    samples = RankSamples(BatchBuilder(cache, ItemMaps.open(config.directory)), order, 0, config.deal)
    warm = 2
    for step in range(warm):
        samples.build(step)  # compiles
    sizes, tokens = [], 0
    ahead = 2 * config.reader_threads
    with Prefetcher(range(warm, len(order)), samples.build, ahead, config.reader_threads) as batches:
        begin, cpu = time.perf_counter(), time.process_time()
        for packed in islice(batches, len(order) - warm):
            sizes.append(packed.layout.end)
            tokens += packed.tokens
            if time.perf_counter() - begin > config.seconds:
                break
        count = len(sizes) * config.local_batch_size
        wall, cpu = time.perf_counter() - begin, time.process_time() - cpu
    mb = np.array(sizes) / 1e6
    return Speed(len(sizes), count / wall, 1e6 * cpu / count, tokens / count, mb.mean(), mb.max())


def main(args: Sequence[str] | None = None) -> int:
    """Command line entry; returns the exit status."""
    return exit_status(lambda: _run(args))


def _run(args: Sequence[str] | None) -> int:
    config = options_of(SpeedConfig, args, "data speed", __doc__)
    found = speed(config)
    print(
        f"{found.batches} batches of {config.local_batch_size}, {config.reader_threads} threads: "
        f"{found.samples_per_s:,.0f} samples/s, {found.cpu_us:.1f} us of CPU a sample, {found.events:,.0f} events a "
        f"history, {found.mean_mb:.2f} MB a batch, at most {found.max_mb:.2f}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
