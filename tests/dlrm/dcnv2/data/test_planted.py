import fcntl
import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from dlrm_bench.dlrm.data.batch import feature_blocks
from dlrm_bench.dlrm.data.distributions import raw_ids
from dlrm_bench.dlrm.dcnv2.config import DataConfig
from dlrm_bench.dlrm.dcnv2.data import planted
from dlrm_bench.dlrm.dcnv2.data.dataset import open_dataset
from dlrm_bench.dlrm.dcnv2.data.manifest import MANIFEST, MARKER
from dlrm_bench.dlrm.dcnv2.data.planted import MOST, PlantedConfig, generate, main
from dlrm_bench.dlrm.dcnv2.data.preprocess import PreprocessConfig, preprocess
from dlrm_bench.dlrm.dcnv2.data.raw_tsv import raw_days, read_blocks
from dlrm_bench.dlrm.dcnv2.presets import training

MODEL = training("smoke").model


@pytest.fixture
def config(tmp_path: Path) -> PlantedConfig:
    return PlantedConfig(path=tmp_path / "set", days=3, samples_per_day=3001)


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.glob("day_*.npy")}


def test_both_formats_hold_the_same_samples(config: PlantedConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planted, "CHUNK", 1000)
    path, manifest, written = generate(config)
    assert written
    assert manifest.train_samples == 6002
    assert manifest.eval_samples == 1501
    assert not (path / MARKER).exists()
    multi_hot, one_hot = (
        open_dataset(DataConfig(source=source, path=path, train_days=2), MODEL, seed=0)  # type: ignore[arg-type]
        for source in ("multi_hot", "one_hot")
    )
    assert multi_hot.best_auc == manifest.best_auc
    for method in ("train_batches", "eval_batches"):
        batches = list(zip(*(getattr(d, method)(0, 1, 1000) for d in (multi_hot, one_hot)), strict=True))
        assert batches
        for a, b in batches:
            np.testing.assert_array_equal(a.ids, b.ids)
            np.testing.assert_array_equal(a.dense, b.dense)
            np.testing.assert_array_equal(a.labels, b.labels)


def test_tables_of_twice_the_rows(config: PlantedConfig) -> None:
    path, manifest, _ = generate(replace(config, table_scale=2.0, skew=0.0))
    doubled = replace(MODEL, table_scale=2.0)
    assert manifest.rows == list(doubled.rows)
    assert max(doubled.rows) == 2 * max(MODEL.rows)
    data = DataConfig(source="multi_hot", path=path, train_days=2)
    (batch,) = open_dataset(data, doubled, seed=0).train_batches(0, 1, 6002)
    for block, rows in zip(feature_blocks(batch.ids, MODEL.multi_hot_sizes), doubled.rows, strict=True):
        assert 0.99 * rows - 1 <= block.max() < rows
    with pytest.raises(ValueError, match="table rows"):
        open_dataset(data, MODEL, seed=0)


def test_best_auc_is_that_of_the_true_probabilities(config: PlantedConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    probabilities = []
    true_probabilities = planted.Teacher.probabilities

    def spy(self: planted.Teacher, dense: np.ndarray, ids: list[np.ndarray]) -> np.ndarray:
        probabilities.append(true_probabilities(self, dense, ids))
        return probabilities[-1]

    monkeypatch.setattr(planted.Teacher, "probabilities", spy)
    path, manifest, _ = generate(config)
    labels = np.load(path / "day_2_labels.npy")[:1501, 0]
    assert manifest.best_auc == pytest.approx(roc_auc_score(labels, probabilities[-1][:1501]), abs=1e-12)
    assert 0.8 < manifest.best_auc < 0.92
    assert abs(labels.mean() - config.base_rate) < 0.05


def test_first_ids_are_skewed_as_asked(config: PlantedConfig, tmp_path: Path) -> None:
    shares = []
    for skew in (0.0, 1.0, 2.0):
        path, _, _ = generate(replace(config, skew=skew, path=tmp_path / str(skew)))
        shares.append((np.load(path / "day_0_sparse.npy")[:, 0] == 0).mean())
    assert shares[0] < 0.005
    assert 0.05 < shares[1] < 0.2
    assert shares[2] > 0.4


def test_the_seed_decides_and_a_second_start_does_nothing(config: PlantedConfig, tmp_path: Path) -> None:
    path, manifest, _ = generate(config)
    before = contents(path)
    assert generate(config) == (path, manifest, False)
    assert contents(path) == before
    same, _, _ = generate(replace(config, path=tmp_path / "same"))
    assert contents(same) == before
    other, _, _ = generate(replace(config, path=tmp_path / "other", seed=1))
    assert contents(other)["day_0_labels.npy"] != before["day_0_labels.npy"]


def test_other_parameters_need_overwrite(config: PlantedConfig) -> None:
    path, _, _ = generate(config)
    before = contents(path)
    other = replace(config, days=2)
    with pytest.raises(ValueError, match=r"made with days 3, not 2: choose another PATH, .*--overwrite"):
        generate(other)
    assert contents(path) == before
    assert not (path / MARKER).exists()
    _, _, written = generate(replace(other, overwrite=True))
    assert written
    assert not (path / "day_2_dense.npy").exists()


@pytest.mark.parametrize("where", ["write_multi_hot", "exact_auc"])
def test_an_interrupted_generator_starts_again(
    config: PlantedConfig, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    path = config.path
    assert path is not None
    with monkeypatch.context() as patch:
        patch.setattr(planted.criteo if where == "write_multi_hot" else planted, where, interrupt)
        with pytest.raises(KeyboardInterrupt):
            generate(replace(config, seed=3, days=4))
    assert not (path / MANIFEST).exists()
    with pytest.raises(ValueError, match="unfinished"):
        open_dataset(DataConfig(source="multi_hot", path=path, train_days=2), MODEL, seed=0)
    _, _, written = generate(config)
    assert written
    assert not (path / "day_3_dense.npy").exists()
    open_dataset(DataConfig(source="multi_hot", path=path, train_days=2), MODEL, seed=0)


def test_a_marker_left_beside_a_complete_set_goes_away(config: PlantedConfig) -> None:
    path, _, _ = generate(config)
    (path / MARKER).touch()
    _, _, written = generate(config)
    assert not written
    assert not (path / MARKER).exists()


def test_two_generators_at_once(config: PlantedConfig) -> None:
    assert config.path is not None
    config.path.mkdir()
    with (config.path / MARKER).open("a") as marker:
        fcntl.flock(marker, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="another process is generating"):
            generate(config)


def test_foreign_day_files_are_left_alone(config: PlantedConfig) -> None:
    assert config.path is not None
    config.path.mkdir()
    precious = config.path / "day_0_sparse.npy"
    precious.write_text("terabytes")
    with pytest.raises(ValueError, match="did not make"):
        generate(replace(config, overwrite=True))
    assert precious.read_text() == "terabytes"
    assert [file.name for file in config.path.iterdir()] == [precious.name]


@pytest.mark.parametrize(
    ("change", "flag"),
    [
        ({"days": 1}, "--days is 1: choose at least 2"),
        ({"samples_per_day": 2}, "--samples-per-day is 2: choose at least 3"),
        ({"base_rate": 1.0}, "--base-rate"),
        ({"base_rate": math.nan}, "--base-rate"),
        ({"signal": math.nan}, "--signal is nan: choose 0 <= signal <= 100"),
        ({"signal": math.inf}, "--signal is inf"),
        ({"skew": math.nan}, "--skew is nan"),
        ({"skew": -1.0}, "--skew is -1.0: choose 0 <= skew <= 100"),
    ],
)
def test_bad_flags(change: dict[str, float], flag: str) -> None:
    with pytest.raises(ValueError, match=flag):
        PlantedConfig(**change)  # type: ignore[arg-type]


def test_evaluation_samples_of_one_label_are_refused(config: PlantedConfig) -> None:
    with pytest.raises(ValueError, match=r"--samples-per-day is 4: all 2 .* label 0, .*choose at least 20000"):
        generate(replace(config, samples_per_day=4, base_rate=0.001))


@pytest.mark.filterwarnings("error")
def test_the_largest_skew_and_signal(config: PlantedConfig) -> None:
    generate(replace(config, skew=MOST, signal=MOST, days=2))


def test_a_preset_without_a_directory() -> None:
    with pytest.raises(ValueError, match="name the directory to write: preset mlperf-dcnv2 has none"):
        generate(PlantedConfig(preset="mlperf-dcnv2"))


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, flags = str(tmp_path / "set"), ["--days", "2"]
    command = [sys.executable, "-m", "dlrm_bench.dlrm.dcnv2.data.planted", folder, *flags, "--samples-per-day", "500"]
    first = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert first.returncode == 0, first.stderr
    assert first.stdout.startswith("wrote")
    best = json.loads((tmp_path / "set" / MANIFEST).read_text())["best_auc"]
    assert re.search(r"best AUC (\S+)", first.stdout)[1] == f"{best:.5f}"  # type: ignore[index]
    assert main([folder, *flags, "--samples-per-day", "501"]) == 2
    assert capsys.readouterr().err.startswith("error: ")
    assert main([__file__, *flags]) == 2
    assert capsys.readouterr().err == f"error: {__file__}: File exists\n"


@pytest.mark.parametrize("raw", ["tsv", "tsv.gz"])
def test_raw_days_hold_the_same_samples(config: PlantedConfig, tmp_path: Path, raw: str) -> None:
    path, manifest, _ = generate(replace(config, path=tmp_path / "raw", raw=raw))  # type: ignore[arg-type]
    files, _, _ = generate(config)
    days = raw_days(path)
    assert [day.suffix for day in days] == [".gz" if raw == "tsv.gz" else ""] * 3
    assert set(manifest.files) == {day.name for day in days}
    blocks = list(read_blocks(days[1]))
    dense = np.concatenate([block.dense for block in blocks])
    np.testing.assert_allclose(np.log1p(dense), np.load(files / "day_1_dense.npy"), rtol=1e-6)
    one_hot = np.load(files / "day_1_sparse.npy")
    for feature in range(26):
        hashes = np.concatenate([block.hashes[feature] for block in blocks])
        pairs = np.unique(np.stack([hashes, one_hot[:, feature]]), axis=1)
        assert len(np.unique(pairs[0])) == len(np.unique(pairs[1])) == pairs.shape[1]  # one to one
        assert (hashes[one_hot[:, feature] == 0] == 0).all()
    assert 0.8 < manifest.best_auc < 0.92
    again, _, written = generate(replace(config, path=tmp_path / "raw", raw=raw))  # type: ignore[arg-type]
    assert (again, written) == (path, False)


def test_raw_days_keep_the_best_auc_through_preprocessing(config: PlantedConfig, tmp_path: Path) -> None:
    raw, generated, _ = generate(replace(config, path=tmp_path / "raw", raw="tsv"))
    manifest, _ = preprocess(PreprocessConfig(raw=raw, out=tmp_path / "out", preset="smoke"))
    assert manifest.best_auc == generated.best_auc
    assert manifest.samples_per_day == [3001] * 3
    data = DataConfig(source="multi_hot", path=tmp_path / "out", train_days=2)
    assert open_dataset(data, MODEL, seed=0).best_auc == generated.best_auc
    (raw / "day_2").write_bytes((raw / "day_1").read_bytes())
    with pytest.raises(ValueError, match="day_2 has the content of day_1: the files were swapped"):
        preprocess(PreprocessConfig(raw=raw, out=tmp_path / "other", preset="smoke"))
    (raw / MARKER).touch()
    with pytest.raises(ValueError, match="raw holds an unfinished data set"):
        preprocess(PreprocessConfig(raw=raw, out=tmp_path / "other", preset="smoke"))


def test_raw_days_take_criteos_features(monkeypatch: pytest.MonkeyPatch, config: PlantedConfig) -> None:
    smoke = training("smoke")
    narrow = replace(smoke, model=replace(smoke.model, dense_in_features=5))
    monkeypatch.setattr(planted, "training", lambda _: narrow)
    with pytest.raises(
        ValueError, match=r"--raw tsv: Criteo's raw days have 13 dense and 26 .* preset smoke has 5 and 26"
    ):
        generate(replace(config, raw="tsv"))


def test_raw_ids_are_those_of_the_same_samples(config: PlantedConfig, tmp_path: Path) -> None:
    path, manifest, _ = generate(config)
    of_raw, raw_manifest, written = generate(replace(config, path=tmp_path / "raw", raw_ids=True))
    assert written
    assert raw_manifest.raw_ids
    assert raw_manifest.best_auc == manifest.best_auc
    assert {file.name for file in of_raw.glob("day_*sparse*")} == {f"day_{i}_sparse_multi_hot.npz" for i in range(3)}
    data = DataConfig(source="multi_hot", path=path, train_days=2)
    numbered = open_dataset(data, MODEL, seed=0)
    raw = open_dataset(replace(data, path=of_raw), replace(MODEL, raw_ids=True), seed=0)
    assert raw.best_auc == manifest.best_auc
    for method in ("train_batches", "eval_batches"):
        for a, b in zip(*(getattr(d, method)(0, 1, 1000) for d in (numbered, raw)), strict=True):
            np.testing.assert_array_equal(a.dense, b.dense)
            np.testing.assert_array_equal(a.labels, b.labels)
            blocks = zip(*(feature_blocks(batch.ids, MODEL.multi_hot_sizes) for batch in (a, b)), strict=True)
            for feature, (rows, ids) in enumerate(blocks):
                valid = slice(0, a.num_valid)
                np.testing.assert_array_equal(raw_ids(rows[valid].numpy(), salt=feature), ids[valid])
    assert not generate(replace(config, path=of_raw, raw_ids=True))[2]
    with pytest.raises(ValueError, match=r"made with raw_ids True, not None: .*--overwrite"):
        generate(replace(config, path=of_raw))
    with pytest.raises(ValueError, match="--raw tsv: Criteo's raw days have no --raw-ids"):
        replace(config, raw="tsv", raw_ids=True)
