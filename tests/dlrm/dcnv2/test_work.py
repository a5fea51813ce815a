from dataclasses import replace

import numpy as np
import pytest

from dlrm_bench.dlrm.config import DataConfig
from dlrm_bench.dlrm.data.batch import feature_blocks
from dlrm_bench.dlrm.dcnv2.data.random_batches import RandomDataset
from dlrm_bench.dlrm.dcnv2.network import DenseNetwork
from dlrm_bench.dlrm.dcnv2.presets import MLPERF_MODEL, SMOKE_MODEL
from dlrm_bench.dlrm.dcnv2.work import dense_weights, flop_per_sample, rows_named


def test_sizes_of_the_mlperf_model() -> None:
    assert dense_weights(MLPERF_MODEL) == 16_044_545
    assert dense_weights(SMOKE_MODEL) == sum(p.numel() for p in DenseNetwork(SMOKE_MODEL).parameters())
    assert flop_per_sample(MLPERF_MODEL) == pytest.approx(96e6, rel=0.01)


@pytest.mark.parametrize("ids", ["expanded", "uniform"])
def test_rows_that_random_batches_name(ids: str) -> None:
    data, model = DataConfig(random_ids=ids, random_batches=2), replace(MLPERF_MODEL, table_scale=0.01)  # type: ignore[arg-type]
    batches = RandomDataset(data, model, seed=1).train_batches(0, 1, 2048)
    named = []
    for batch in (next(batches), next(batches)):
        blocks = feature_blocks(batch.ids, model.multi_hot_sizes)
        named.append([np.unique(block.numpy()) for block in blocks])
    distinct = sum(len(rows) for rows in named[1])
    new = sum(len(np.setdiff1d(now, before)) for before, now in zip(*named, strict=True))
    rows = rows_named(model, data, 2048)
    assert rows.ids == 2048 * 214
    assert rows.distinct == pytest.approx(distinct, rel=0.02)
    assert rows.new == pytest.approx(new, rel=0.05)
