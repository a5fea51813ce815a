from dataclasses import replace
from pathlib import Path

import pytest

from dlrm_bench.dlrm.config import ModelConfig
from dlrm_bench.dlrm.data.manifest import MANIFEST, Manifest, read_manifest


@pytest.fixture
def manifest(model: ModelConfig) -> Manifest:
    return Manifest(
        parameters={"seed": 1, "skew": 1.05},
        rows=list(model.rows),
        multi_hot_sizes=list(model.multi_hot_sizes),
        dense_in_features=2,
        samples_per_day=[4, 4],
        train_samples=4,
        eval_samples=2,
        best_auc=0.8612345678901234,
    )


def test_round_trip(tmp_path: Path, manifest: Manifest) -> None:
    assert read_manifest(tmp_path) is None
    manifest.write(tmp_path)
    assert read_manifest(tmp_path) == manifest
    assert [file.name for file in tmp_path.iterdir()] == [MANIFEST]


@pytest.mark.parametrize("content", ["", "[1]", "{}", '{"rows": [1]}'])
def test_other_files(tmp_path: Path, content: str) -> None:
    (tmp_path / MANIFEST).write_text(content)
    with pytest.raises(ValueError, match=f"{MANIFEST}: is not a manifest"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": [50, 3, 1, 999]}, "table rows differ: the data has 999 for feature 3 instead of 1000"),
        ({"rows": [50, 3]}, "table rows differ: the data has 2 features instead of 4"),
        ({"multi_hot_sizes": [3, 9, 2, 4]}, "multi-hot sizes differ: .*9 for feature 1 instead of 1"),
        ({"dense_in_features": 13}, "dense features differ: the data has 13.* instead of 2"),
    ],
)
def test_another_model(tmp_path: Path, model: ModelConfig, manifest: Manifest, change: dict, message: str) -> None:
    manifest.check_model(tmp_path, model, one_hot=False)
    with pytest.raises(ValueError, match=message):
        replace(manifest, **change).check_model(tmp_path, model, one_hot=False)
