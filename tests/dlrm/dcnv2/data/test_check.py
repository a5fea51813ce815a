import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dlrm_bench.dlrm.data.checksums import checksum
from dlrm_bench.dlrm.dcnv2.config import DataConfig, ModelConfig
from dlrm_bench.dlrm.dcnv2.data import check as module
from dlrm_bench.dlrm.dcnv2.data.check import MLPERF_DAY_SAMPLES, DayFilesCheck, check, main
from dlrm_bench.dlrm.dcnv2.data.dataset import open_dataset
from dlrm_bench.dlrm.dcnv2.data.manifest import MANIFEST, MARKER, Manifest
from dlrm_bench.dlrm.dcnv2.presets import training

Writer = Callable[..., dict[str, np.ndarray]]
DAYS = (37, 5, 20, 31)


@pytest.fixture
def small(tmp_path: Path, model: ModelConfig, day_writer: Writer, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Days without a manifest, and a preset that fits them."""
    monkeypatch.setattr(module, "READ_SAMPLES", 8)
    monkeypatch.setattr(module, "training", lambda _: replace(training("smoke"), model=model))
    for day, samples in enumerate(DAYS):
        day_writer(tmp_path, day, samples, model)
    return tmp_path


@pytest.fixture
def known(small: Path, model: ModelConfig) -> Path:
    """The same with a manifest."""
    Manifest(
        parameters={},
        rows=list(model.rows),
        multi_hot_sizes=list(model.multi_hot_sizes),
        dense_in_features=2,
        samples_per_day=list(DAYS),
        train_samples=sum(DAYS[:-1]),
        eval_samples=16,
        best_auc=None,
        files={path.name: checksum(path) for path in small.glob("day_*")},
    ).write(small)
    return small


def findings(directory: Path, fast: bool = False, raw_ids: bool = False) -> list[str]:
    found = check(DayFilesCheck(directory=directory, fast=fast, raw_ids=raw_ids)).findings
    assert not any("\n" in line for line in found)
    return [line.removeprefix(f"{directory}/") for line in found]


def swap(a: Path, b: Path) -> None:
    first, second = a.read_bytes(), b.read_bytes()
    a.write_bytes(second)
    b.write_bytes(first)


@pytest.mark.parametrize("fast", [False, True])
def test_all_well(small: Path, known: Path, fast: bool) -> None:
    checked = check(DayFilesCheck(directory=known, fast=fast))
    assert (checked.findings, checked.days, checked.samples) == ([], 4, sum(DAYS))
    (small / MANIFEST).unlink()
    assert findings(small, fast) == []


def test_swapped_days(known: Path) -> None:
    for kind in ("dense", "labels"):
        swap(known / f"day_0_{kind}.npy", known / f"day_3_{kind}.npy")
    assert findings(known) == [
        f"day_{a}_{kind}.npy has the content of day_{b}_{kind}.npy: the files were swapped; restore their names"
        for a, b in ((0, 3), (3, 0))
        for kind in ("dense", "labels")
    ]


def test_one_changed_byte(known: Path) -> None:
    path = known / "day_2_sparse_multi_hot.npz"
    content = bytearray(path.read_bytes())
    content[-500] ^= 1
    path.write_bytes(content)
    assert findings(known) == [
        "day_2_sparse_multi_hot.npz was changed: its checksum differs from the manifest's: copy or generate it again"
    ]


def test_opening_notices(known: Path, model: ModelConfig) -> None:
    data = DataConfig(source="multi_hot", path=known, train_days=2)
    open_dataset(data, model, seed=0)
    (known / "day_3_dense.npy").write_bytes(b"not read by this run")
    open_dataset(data, model, seed=0)
    swap(known / "day_0_labels.npy", known / "day_1_labels.npy")
    with pytest.raises(
        ValueError,
        match=r"day_0_labels\.npy has the content of day_1_labels\.npy: .*\(one of 2 such files\).*-bench data check",
    ):
        open_dataset(data, model, seed=0)


def test_values_of_files_that_no_manifest_knows(small: Path) -> None:
    dense, labels, ids = (
        np.load(small / f"day_{day}_{kind}.npy") for day, kind in enumerate(("dense", "labels", "sparse"))
    )
    dense[20, 1] = np.nan
    labels[3] = 7
    ids[11, 3] = -4
    np.save(small / "day_0_dense.npy", dense)
    np.save(small / "day_1_labels.npy", labels)
    np.save(small / "day_2_sparse.npy", ids)
    assert findings(small, fast=True) == []
    assert [line.split(": copy")[0] for line in findings(small)] == [
        "day_0_dense.npy: dense feature 1 of sample 20 is nan, which is not finite",
        "day_1_labels.npy: the label of sample 3 is 7, neither 0 nor 1",
        "day_2_sparse.npy: id -4 of sample 11 (feature cat_3) is negative",
    ]


def test_shapes_types_and_missing_files(small: Path) -> None:
    np.save(small / "day_0_dense.npy", np.zeros((37, 3), dtype=np.float32))
    np.save(small / "day_1_labels.npy", np.zeros((5, 1), dtype=np.int64))
    (small / "day_2_sparse.npy").unlink()
    (small / "day_2_sparse_multi_hot.npz").unlink()
    (small / "day_3_sparse_multi_hot.npz").write_bytes((small / "day_3_sparse_multi_hot.npz").read_bytes()[:-100])
    found = findings(small)
    for line, start in zip(
        found,
        (
            "day_0_dense.npy: expected shape (N, 2)",
            "day_1_labels.npy: expected dtype int32, found int64",
            "day_2_sparse_multi_hot.npz does not exist, nor does day_2_sparse.npy: copy the missing day",
            "day_3_sparse_multi_hot.npz is not a complete zip file",
        ),
        strict=True,
    ):
        assert line.startswith(start)


def test_mlperfs_numbers_of_samples(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sum(MLPERF_DAY_SAMPLES[:23]) == 4_195_197_692
    assert (MLPERF_DAY_SAMPLES[23] + 1) // 2 == 89_137_319
    monkeypatch.setattr(module, "MLPERF_DAY_SAMPLES", DAYS)
    assert findings(small) == []
    monkeypatch.setattr(module, "MLPERF_DAY_SAMPLES", (37, 20, 5, 40, 6))
    swapped = "restore the days' names"
    assert findings(small) == [
        f"day_1_dense.npy has 5 samples, but MLPerf's set has 20: that is day 2's number: {swapped}",
        f"day_2_dense.npy has 20 samples, but MLPerf's set has 5: that is day 1's number: {swapped}",
        "day_3_dense.npy has 31 samples, but MLPerf's set has 40: copy or generate it again",
        "day_4_dense.npy does not exist, and MLPerf's set has 5 days: copy the missing day",
    ]
    monkeypatch.setattr(module, "MLPERF_DAY_SAMPLES", (9, 9, 9, 9))  # Another set altogether.
    assert findings(small) == []


def test_a_last_day_that_no_checksum_knows(known: Path) -> None:
    """As of `dlrm-bench data fill`, whose manifest has no checksums."""
    manifest = json.loads((known / MANIFEST).read_text())
    (known / MANIFEST).write_text(json.dumps(manifest | {"files": {}}))
    assert findings(known) == []
    for path in known.glob("day_3_*"):
        path.unlink()
    assert findings(known) == ["day_3_dense.npy does not exist, and the manifest has 4 days: copy the missing day"]


def test_unfinished_and_unreadable(small: Path, tmp_path: Path) -> None:
    (small / MARKER).touch()
    (small / MANIFEST).write_text("[[[")
    found = findings(small)
    assert found[0] == f"{MARKER}: the data set is unfinished: run the program that makes it again"
    assert found[1].startswith(f"{MANIFEST}: is not a manifest of this program")


def test_command_line(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(small)]) == 0
    assert capsys.readouterr().out == f"{small}: 4 days, 93 samples, all well\n"
    (small / "day_0_labels.npy").unlink()
    assert main([str(small), "--fast"]) == 2
    out = capsys.readouterr().out
    assert out.startswith(f"{small}/day_0_labels.npy does not exist")
    assert out.count("\n") == 1
    (small / "empty").mkdir()
    assert main([str(small / "empty")]) == 2
    assert "holds no day files" in capsys.readouterr().out
    assert main([str(small / "nowhere")]) == 2


def test_as_a_module(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dlrm_bench.dlrm.dcnv2.data.check", str(tmp_path / "nowhere")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert done.stderr == f"error: {tmp_path}/nowhere does not exist: name the directory of the day files\n"


def mlperf_findings(directory: Path) -> list[str]:
    found = check(DayFilesCheck(directory=directory, mlperf=True)).findings
    return [line.removeprefix(f"{directory}/") for line in found]


def test_mlperfs_own_set(known: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The manifest's numbers of samples do not count; MLPerf's do, whether or not one of them agrees."""
    md5 = {path.name: hashlib.md5(path.read_bytes()).hexdigest() for path in known.glob("day_*")}
    monkeypatch.setattr(module, "MLPERF_MD5", md5)
    monkeypatch.setattr(module, "MLPERF_DAY_SAMPLES", DAYS)
    assert mlperf_findings(known) == []
    swap(known / "day_0_labels.npy", known / "day_3_labels.npy")
    assert [line for line in mlperf_findings(known) if "MLPerf's" in line] == [
        f"day_{a}_labels.npy is not MLPerf's: its MD5 sum is {md5[f'day_{b}_labels.npy']} instead of "
        f"{md5[f'day_{a}_labels.npy']}: it is day_{b}_labels.npy; restore the files' names"
        for a, b in ((0, 3), (3, 0))
    ]
    swap(known / "day_0_labels.npy", known / "day_3_labels.npy")
    monkeypatch.setattr(module, "MLPERF_DAY_SAMPLES", (36, *DAYS[1:], 9))
    assert mlperf_findings(known) == [
        "day_0_dense.npy has 37 samples, but MLPerf's set has 36: copy or generate it again",
        "day_4_dense.npy does not exist, and MLPerf's set has 5 days: copy the missing day",
    ]


def test_raw_ids_may_be_anything(small: Path) -> None:
    for day in range(len(list(small.glob("day_*_labels.npy")))):
        (small / f"day_{day}_sparse.npy").unlink()
        path = small / f"day_{day}_sparse_multi_hot.npz"
        with np.load(path) as members:
            np.savez(path, **{name: -(members[name].astype(np.int64) << 40) for name in members})
    assert all(": expected dtype int32, found int64" in line for line in findings(small))
    assert findings(small, raw_ids=True) == []
    np.save(small / "day_1_labels.npy", np.load(small / "day_1_labels.npy") + 5)
    (found,) = findings(small, raw_ids=True)
    assert found.startswith("day_1_labels.npy: the label of sample 0")
