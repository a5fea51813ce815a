"""The presets, and MLPerf's figures in them (mlcommons/training, recommendation_v2)."""

import json
from dataclasses import asdict

import pytest

from dlrm_bench.bench.presets import PRESETS, preset
from dlrm_bench.dlrm.dcnv2.presets import MLPERF_MODEL, MLPERF_TARGET_AUC


def test_mlperf_model():
    assert sum(MLPERF_MODEL.rows) == 204_184_588
    assert MLPERF_MODEL.num_features == 26
    assert MLPERF_MODEL.ids_per_sample == 214
    assert MLPERF_MODEL.table_bytes == pytest.approx(104.5e9, rel=1e-3)
    assert MLPERF_MODEL.num_embeddings.count(40_000_000) == 5
    assert max(MLPERF_MODEL.multi_hot_sizes) == MLPERF_MODEL.multi_hot_sizes[20] == 100
    assert (MLPERF_MODEL.dense_in_features, *MLPERF_MODEL.bottom_mlp) == (13, 512, 256, 128)
    assert (MLPERF_MODEL.cross_layers, MLPERF_MODEL.cross_rank) == (3, 512)
    assert MLPERF_MODEL.top_mlp == (1024, 1024, 512, 256, 1)
    assert MLPERF_TARGET_AUC == 0.80275


@pytest.mark.parametrize(
    ("name", "local_batch", "on_ranks", "global_batch"),
    [
        ("mlperf-dcnv2", 6912, 8, 55_296),
        ("launch-bound", 512, 128, 65_536),
    ],
)
def test_presets_of_the_mlperf_model(name, local_batch, on_ranks, global_batch):
    config = preset(name)
    assert config.model is MLPERF_MODEL
    assert config.local_batch_size == local_batch
    assert config.local_batch_size * on_ranks == global_batch
    assert (config.optimizer.learning_rate, config.optimizer.eps) == (0.004, 1e-8)
    assert config.evaluations_per_epoch == 20
    assert config.data.train_days == 23


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_complete(name):
    config = preset(name)
    assert config.preset == name
    assert config == preset(name)
    json.dumps(asdict(config), default=str)


def test_smoke_is_small():
    config = preset("smoke")
    assert config.model.table_bytes < 2e6
    assert config.model.num_features == 26
    assert config.target_auc is not None


def test_an_unknown_preset_lists_the_known_ones():
    with pytest.raises(ValueError, match="'fast' is unknown") as raised:
        preset("fast")
    assert all(name in str(raised.value) for name in PRESETS)
