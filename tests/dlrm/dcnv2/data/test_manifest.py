import errno
import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from dlrm_bench.dlrm.dcnv2.config import ModelConfig
from dlrm_bench.dlrm.dcnv2.data.manifest import MANIFEST, MARKER, Manifest, read_manifest, sole_writer


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


@pytest.mark.parametrize("content", [b"", b"[1]", b"{}", b'{"rows": [1]}', b"\xff\x00" * 500, b"[" * 100_000])
def test_other_files(tmp_path: Path, content: bytes) -> None:
    (tmp_path / MANIFEST).write_bytes(content)
    with pytest.raises(ValueError, match=f"{MANIFEST}: is not a manifest") as caught:
        read_manifest(tmp_path)
    assert len(str(caught.value).replace(str(tmp_path), "")) < 300


@pytest.mark.parametrize(
    "change",
    [
        {"rows": "many"},
        {"rows": [1.5]},
        {"best_auc": "0.8"},
        {"train_samples": True},
        {"files": {"day_0_dense.npy": {"bytes": "4", "blake2b": "", "sample": ""}}},
    ],
)
def test_a_field_of_another_type(tmp_path: Path, manifest: Manifest, change: dict) -> None:
    (tmp_path / MANIFEST).write_text(json.dumps(asdict(manifest) | change))
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


def test_raw_ids_fit_tables_of_any_size(tmp_path: Path, model: ModelConfig, manifest: Manifest) -> None:
    raw = replace(manifest, rows=[1, 2, 3, 4], parameters=manifest.parameters | {"raw_ids": True})
    raw.check_model(tmp_path, replace(model, raw_ids=True), one_hot=False)
    with pytest.raises(ValueError, match=r"manifest\.json: the data has raw ids: add --model\.raw-ids"):
        raw.check_model(tmp_path, model, one_hot=False)
    with pytest.raises(ValueError, match=r"manifest\.json: the data has row numbers: leave --model\.raw-ids out"):
        manifest.check_model(tmp_path, replace(model, raw_ids=True), one_hot=False)
    more = replace(raw, multi_hot_sizes=[3, 9, 2, 4])
    with pytest.raises(ValueError, match="multi-hot sizes differ"):
        more.check_model(tmp_path, replace(model, raw_ids=True), one_hot=False)


def test_a_full_disk(tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match=rf"cannot write to {tmp_path} \(No space left on device; .* GB are free\)"),
        sole_writer(tmp_path),
    ):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert (tmp_path / MARKER).exists()
    with pytest.raises(PermissionError), sole_writer(tmp_path):
        raise PermissionError
