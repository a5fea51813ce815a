"""Measures the rate at which ranks read day files, values checked, on an otherwise idle machine: dlrm-bench data speed
DIR

Each rank reads as in a run: --data.reader-threads threads fill batches, in pinned memory if there is a GPU, and one
consumer takes them in order. Ranks are processes that start together. Compare the rate with the samples per second of a
run; with files in the page cache the rate is the reader's, with --cold the disk's.
"""

import multiprocessing
import os
import sys
import time
from collections.abc import Generator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from threading import BrokenBarrierError
from typing import Annotated, Any, Literal

import torch
import tyro

from dlrm_bench.dlrm.data.batch import Batch
from dlrm_bench.dlrm.data.loader import Prefetcher
from dlrm_bench.dlrm.data.workers import no_worker_killed
from dlrm_bench.dlrm.dcnv2.config import DataConfig, ModelConfig
from dlrm_bench.dlrm.dcnv2.data import criteo
from dlrm_bench.dlrm.dcnv2.data.dataset import FileDataset
from dlrm_bench.dlrm.dcnv2.presets import training
from dlrm_bench.dlrm.runtime.command_line import exit_status
from dlrm_bench.dlrm.runtime.parsed import options_of

_barrier: Any = None
"""Barrier of the ranks, if there are several."""


@dataclass(kw_only=True, slots=True, frozen=True)
class SpeedConfig:
    """Measures reading speed."""

    directory: Annotated[Path, tyro.conf.Positional]
    """Directory of the day files; all days but the last are read."""
    preset: str = "mlperf-dcnv2"
    """The preset whose tables and features the files fit."""
    table_scale: float | None = None
    """Factor on the preset's table rows, as --model.table-scale of the run; by default the preset's own."""
    source: Literal["multi_hot", "one_hot"] = "multi_hot"
    """Kind of files, as --data.source of the run."""
    local_batch_sizes: tuple[int, ...] = (512, 6912)
    """Samples of a rank's batch; each size is measured in turn."""
    reader_threads: int = 2
    """Reader threads per rank, like --data.reader-threads."""
    ranks: int = 1
    """Number of ranks that read at once."""
    seconds: float = 3.0
    """Time of each measurement."""
    cold: bool = False
    """Ask the system to drop the files from its page cache first."""

    def __post_init__(self) -> None:
        for flag in ("ranks", "reader_threads", "seconds"):
            if not getattr(self, flag) > 0:
                raise ValueError(f"--{flag.replace('_', '-')} is {getattr(self, flag)}: choose more than 0")
        if min(self.local_batch_sizes, default=0) < 1:
            raise ValueError("--local-batch-sizes: every size must be at least 1")


@dataclass(frozen=True, slots=True)
class Speed:
    """The result of one rank."""

    batch_us: float
    """Microseconds from batch to batch."""
    cpu_us: float
    """CPU time of the process per batch, in microseconds."""
    gb_per_s: float
    """GB/s that reach this rank from the files; for 1-hot files, after expansion."""


def speed(config: SpeedConfig, local_batch_size: int) -> list[Speed]:
    """Returns the speed of each rank; ValueError for bad files, as in a run."""
    run = training(config.preset)
    model = run.model if config.table_scale is None else replace(run.model, table_scale=config.table_scale)
    days = sum(1 for _ in config.directory.glob("day_*_dense.npy"))
    data = DataConfig(
        source=config.source,
        path=config.directory,
        train_days=max(1, days - 1),
        reader_threads=config.reader_threads,
    )
    if config.cold:
        _drop(config.directory, data.train_days)
    arguments = (data, model, config.ranks, local_batch_size, config.seconds)
    if config.ranks == 1:
        return [_read(0, *arguments)]
    context = multiprocessing.get_context("spawn")
    start = (context.Barrier(config.ranks),)
    with no_worker_killed("free memory, or lower --ranks, --local-batch-sizes or --reader-threads"):
        with ProcessPoolExecutor(config.ranks, context, initializer=_join, initargs=start) as pool:
            ranks = [pool.submit(_read, rank, *arguments) for rank in range(config.ranks)]
        for rank in sorted(ranks, key=lambda rank: isinstance(rank.exception(), BrokenBarrierError)):
            rank.result()  # raises a rank's own error, not that of the ranks that waited for it
    return [rank.result() for rank in ranks]


def _join(barrier: Any) -> None:
    global _barrier
    _barrier = barrier


def _read(rank: int, data: DataConfig, model: ModelConfig, ranks: int, size: int, seconds: float) -> Speed:
    try:
        return _timed(rank, data, model, ranks, size, seconds)
    except BaseException:
        if _barrier is not None:
            _barrier.abort()  # the others would wait there without end
        raise


def _timed(rank: int, data: DataConfig, model: ModelConfig, ranks: int, size: int, seconds: float) -> Speed:
    dataset = FileDataset(data, model)
    pin = torch.cuda.is_available()
    count = 0
    with closing(_over_and_over(dataset, rank, ranks, size, pin, data)) as batches:
        for _ in islice(batches, 2 * data.prefetch_batches):  # until memory is allocated and all threads are busy
            pass
        if _barrier is not None:
            _barrier.wait()
        begun, cpu = time.perf_counter(), time.process_time()
        while time.perf_counter() - begun < seconds:
            next(batches)
            count += 1
        took, cpu = time.perf_counter() - begun, time.process_time() - cpu
    sample_bytes = 4 * (model.dense_in_features + 1 + model.ids_per_sample)
    return Speed(took * 1e6 / count, cpu * 1e6 / count, count * size * sample_bytes / took / 1e9)


def _over_and_over(
    dataset: FileDataset, rank: int, ranks: int, size: int, pin: bool, data: DataConfig
) -> Generator[Batch, None, None]:
    """Yields the batches of epoch after epoch."""
    batches = dataset.train_batches(rank, ranks, size, pin)
    while True:
        with Prefetcher(batches, lambda batch: batch, data.prefetch_batches, data.reader_threads) as epoch:
            yield from epoch


def _drop(directory: Path, train_days: int) -> None:
    kinds = (criteo.dense_file, criteo.labels_file, criteo.multi_hot_file, criteo.one_hot_file)
    for path in (kind(directory, day) for day in range(train_days) for kind in kinds):
        if path.exists():
            with path.open("rb") as file:
                os.fsync(file.fileno())  # pages not yet on disk would stay in the cache
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main(args: Sequence[str] | None = None) -> int:
    """Command line entry; returns the exit status."""
    return exit_status(lambda: _run(args))


def _run(args: Sequence[str] | None) -> int:
    config = options_of(SpeedConfig, args, "data speed", __doc__)
    for size in config.local_batch_sizes:
        speeds = speed(config, size)
        slowest = max(speeds, key=lambda each: each.batch_us)
        print(
            f"{size} samples a rank, {config.ranks} ranks of {config.reader_threads} threads"
            f"{', cold' if config.cold else ''}: {slowest.batch_us:.0f} us a batch, {slowest.gb_per_s:.2f} GB/s and "
            f"{size / slowest.batch_us:.2f} M samples/s of the slowest rank, {sum(s.gb_per_s for s in speeds):.2f} "
            f"GB/s of all; {slowest.cpu_us:.0f} us of CPU time a batch",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
