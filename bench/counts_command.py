"""dlrm-bench data counts FILE --samples N --preset ...: counts how often the ids of a benchmark's samples name each
row."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
from tyro.conf import Positional

from dlrm_bench.bench.config import RunConfig
from dlrm_bench.bench.flags import parse_run
from dlrm_bench.bench.forwarded import split_forwarded, take_flag
from dlrm_bench.dlrm.benchmarks import PRESETS, named
from dlrm_bench.dlrm.data.steps import step
from dlrm_bench.dlrm.runtime.parsed import options_of
from dlrm_bench.dlrm.tables.row_counts import write_counts


@dataclass(kw_only=True, slots=True, frozen=True)
class CountsConfig:
    """Counts how often the ids of the first training samples name each row of each table, for --table-counts.

    Flags from --preset on are flags of launch/dlrm.py and select model, data and seed; PATH and --samples come before
    them. A run draws random batches once and reuses them: the batches of rank 0 are counted first, then those of rank
    1, and so on.
    """

    file: Positional[Path]
    """File to write (.npz); an existing file is replaced."""
    samples: int = 1_000_000
    """Number of samples to count, in whole batches of --local-batch-size; fewer if the data end before."""

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ValueError(f"--samples is {self.samples}: count at least one")


def run_counts(words: Sequence[str]) -> int:
    """Counts as the command line asks; returns the exit status."""
    own, flags = split_forwarded(words)
    if flags and not own:
        raise ValueError("name the file to write before --preset: dlrm-bench data counts FILE --preset ...")
    wanted = options_of(CountsConfig, own, "data counts")
    preset, others = take_flag(flags, "--preset")
    # Counting is not a run: it needs no length and no target, and the pipeline makes no difference.
    length = ("--iterations", "1", "--warmup-iterations", "0", "--target-auc", "None")
    config = parse_run(preset or "smoke", "torchrec", [*length, *others], "", prints=True)
    samples = count_rows(config, wanted.samples, wanted.file)
    size = wanted.file.stat().st_size / 1e6
    print(f"wrote {wanted.file}: {size:.1f} MB, counts of {samples:,} samples; use it with --table-counts")
    return 0


def count_rows(config: RunConfig, samples: int, file: Path) -> int:
    """Writes the counts of about `samples` samples; returns their exact number. ValueError if the benchmark's batches
    do not give the tables' ids."""
    benchmark, tables = named(config.benchmark), config.model.tables
    if benchmark.table_ids is None:
        others = ", ".join(name for name, (other, _) in PRESETS.items() if other.table_ids is not None)
        raise ValueError(
            f"--preset {config.preset}: {benchmark.title}'s batches do not hold the ids of its tables in the form that "
            f"counts need; choose one of {others}"
        )
    counts = [np.zeros(rows, dtype=np.uint32) for rows in tables.rows]
    counted, batches = 0, -(-samples // config.local_batch_size)
    with step(f"count {file}", batches * config.local_batch_size, "M samples") as advance:
        for batch in islice(_batches(config), batches):
            for of_table, ids in zip(counts, benchmark.table_ids(config, batch), strict=True):
                np.add.at(of_table, ids, np.uint32(1))
            counted += batch.num_valid
            advance(batch.num_valid)
    fields = {name: getattr(config.data, name) for name in config.data.sample_fields}
    write_counts(file, tables, counts, counted, {"preset": config.preset, "seed": config.seed, **fields})
    return counted


def _batches(config: RunConfig) -> Iterator[Any]:
    """Yields the training's batches, each random batch once."""
    data = named(config.benchmark).parts().open_data(config)
    if not config.data.is_random:
        yield from data.train_batches(0, 1, config.local_batch_size)
        return
    pool, _ = config.data.batches_in_memory
    for rank in count():
        yield from islice(data.train_batches(rank, rank + 1, config.local_batch_size), pool)
