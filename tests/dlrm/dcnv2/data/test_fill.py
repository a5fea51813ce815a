import math
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlrm_bench.dlrm.dcnv2.config import DataConfig
from dlrm_bench.dlrm.dcnv2.data.dataset import open_dataset
from dlrm_bench.dlrm.dcnv2.data.fill import FillConfig, fill, main
from dlrm_bench.dlrm.dcnv2.presets import training

MODEL = training("smoke").model


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("filled") / "files"
    assert main([str(directory), "--preset", "smoke", "--gb", "0.001", "--days", "2"]) == 0
    return directory


def test_a_run_reads_all_of_it(filled: Path) -> None:
    dataset = open_dataset(DataConfig(source="multi_hot", path=filled, train_days=1), MODEL, seed=0)
    assert dataset.best_auc is None
    assert dataset.train_samples is not None
    assert len(list(dataset.train_batches(0, 1, 100))) == dataset.train_samples // 100
    list(dataset.eval_batches(0, 1, 100))
    assert 0.8e6 < sum(file.stat().st_size for file in filled.iterdir()) < 1.1e6


def test_ids_repeat_as_their_first_id_does(filled: Path) -> None:
    feature = MODEL.multi_hot_sizes.index(4)
    with np.load(filled / "day_0_sparse_multi_hot.npz") as days:
        ids = days[f"{feature}.npy" if f"{feature}.npy" in days.files else str(feature)]
    firsts, bags = np.unique(ids[:, 0]), np.unique(ids, axis=0)
    assert 10 < len(firsts) == len(bags) < len(ids) / 2


def test_a_directory_in_use_is_left_alone(filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(filled)]) == 2
    assert "is not empty: name a directory that does not exist" in capsys.readouterr().err


def killed(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_worker_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dlrm_bench.dlrm.dcnv2.data.fill._write_day", killed)
    directory = tmp_path / "files"
    assert main([str(directory), "--preset", "smoke", "--gb", "0.001", "--days", "2"]) == 2
    said = f"error: a worker process was killed, most likely because memory ran out: remove {directory}, and free"
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "values"),
    [
        *(("--days", {"days": 1}), ("--gb", {"gb": 0.0}), ("--gb", {"gb": math.inf}), ("--seed", {"seed": -1})),
        *(("--skew", {"skew": math.nan}), ("--skew", {"skew": -3.0}), ("--skew", {"skew": math.inf})),
    ],
)
def test_bad_flags(flag: str, values: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=flag):
        fill(FillConfig(directory=Path("nowhere"), **values))  # type: ignore[arg-type]
