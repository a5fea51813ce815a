"""Cross-cutting: with counts, the rows that are named most are on the device at first, and losses stay equal."""

from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from dlrm_bench.bench.counts_command import count_rows
from dlrm_bench.dlrm.dcnv2.data.random_batches import RandomDataset
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.dlrm.tables.row_counts import write_counts
from tests.pipeline.static.test_tiers import CONFIG, MODEL, STEPS
from tests.pipelines import changed, static_pipeline

BATCHES = CONFIG.data.random_batches


def train(ranks: Ranks, counts: Path | None) -> tuple[list[float], int]:
    """Losses, and rows that were in host memory when a batch named them."""
    config = changed(CONFIG, table_memory="0.2", table_counts=counts)
    pipeline = static_pipeline(config, ranks)
    data = RandomDataset(config.data, config.model, config.seed)
    batches = iter(list(islice(data.train_batches(ranks.rank, ranks.world_size, config.local_batch_size), STEPS)))
    losses = [float(pipeline.train_step(batches)) for _ in range(STEPS)]
    missed = pipeline.describe()["table_tiers"][ranks.rank]["misses"]
    pipeline.close()
    return losses, missed


def train_all(ranks: Ranks, own: Path, other: Path) -> list[tuple[list[float], int]]:
    return [train(ranks, counts) for counts in (None, own, other)]


def test_counts_choose_the_first_rows_on_the_device(run_ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    own, other = tmp_path / "own", tmp_path / "other"
    assert count_rows(CONFIG, 2 * BATCHES * CONFIG.local_batch_size, own) == 2 * BATCHES * CONFIG.local_batch_size
    # Of what is named least.
    write_counts(other, MODEL.tables, [np.arange(rows, dtype=np.uint32) for rows in MODEL.rows], 1000, {})
    for (plain, first), (counted, fewest), (wrong, most) in run_ranks(2, train_all, own, other):
        assert plain == counted == wrong
        assert fewest < first < most
