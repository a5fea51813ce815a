"""Cross-cutting: from raw days to a trained model: a generator's planted signal is found again after preprocessing."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dlrm_bench.bench.presets import preset
from dlrm_bench.dlrm.data.batch import feature_blocks
from dlrm_bench.dlrm.data.metrics import exact_auc
from dlrm_bench.dlrm.dcnv2.config import DataConfig, OptimizerConfig
from dlrm_bench.dlrm.dcnv2.data.dataset import open_dataset
from dlrm_bench.dlrm.dcnv2.data.planted import PlantedConfig, generate
from dlrm_bench.dlrm.dcnv2.data.preprocess import PreprocessConfig, preprocess
from tests.plain_dlrm import PlainDLRM

SCALE, SKEW = 0.1, 2.0
"""Few rows and few frequent ids, so that one short epoch sees enough of each."""


@pytest.mark.slow
def test_raw_days_train_to_the_planted_auc(tmp_path: Path) -> None:
    raw, out = tmp_path / "raw", tmp_path / "out"
    generate(PlantedConfig(path=raw, raw="tsv.gz", days=3, samples_per_day=25_000, table_scale=SCALE, skew=SKEW))
    preprocess(PreprocessConfig(raw=raw, out=out, preset="smoke", table_scale=SCALE))
    run = preset("smoke")
    run = replace(run, model=replace(run.model, table_scale=SCALE), optimizer=OptimizerConfig(learning_rate=0.03))
    data = DataConfig(source="multi_hot", path=out, train_days=2)
    dataset, plain = open_dataset(data, run.model, seed=0), PlainDLRM(run)
    for batch in dataset.train_batches(0, 1, 256):
        plain.train_step([batch])
    logits, labels = [], []
    with torch.no_grad():
        for batch in dataset.eval_batches(0, 1, 2500):
            assert batch.num_valid == 2500
            logits.append(plain.logits(batch.dense, feature_blocks(batch.ids, run.model.multi_hot_sizes)))
            labels.append(batch.labels)
    auc = exact_auc(torch.cat(logits), torch.cat(labels))
    assert dataset.best_auc is not None
    assert dataset.best_auc - 0.045 < auc < dataset.best_auc + 0.005
