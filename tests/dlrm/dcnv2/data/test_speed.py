import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlrm_bench.dlrm.dcnv2.data.fill import FillConfig, fill
from dlrm_bench.dlrm.dcnv2.data.speed import SpeedConfig, main


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("filled") / "files"
    fill(FillConfig(directory=directory, preset="smoke", gb=0.001, days=2))
    return directory


def test_says_what_each_batch_size_takes(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Over many epochs of it, and again without the page cache."""
    arguments = [str(files), "--preset", "smoke", "--local-batch-sizes", "50", "200", "--seconds", "0.05"]
    for more in ([], ["--cold"]):
        assert main([*arguments, *more]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line.split()[0] for line in lines] == ["50", "200"]
        assert all("GB/s" in line and ("cold" in line) == bool(more) for line in lines)


def test_ranks_read_at_once(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--preset", "smoke", "--local-batch-sizes", "50", "--seconds", "0.05", "--ranks", "2"]
    assert main([str(files), *arguments]) == 0
    assert "2 ranks of 2 threads" in capsys.readouterr().out


def test_an_error_of_one_rank_ends_the_others(files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = Path(shutil.copytree(files, tmp_path / "files"))
    labels = np.load(copy / "day_0_labels.npy")
    labels[60] = 7  # in the first batch of rank 1
    np.save(copy / "day_0_labels.npy", labels)
    arguments = ["--preset", "smoke", "--local-batch-sizes", "50", "--seconds", "0.05", "--ranks", "2"]
    assert main([str(copy), *arguments]) == 2
    assert "the label of sample 60 is 7" in capsys.readouterr().err


def killed_on_rank_1(rank: int, *_: Any) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_rank_is_named(
    files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dlrm_bench.dlrm.dcnv2.data.speed._read", killed_on_rank_1)
    assert main([str(files), "--preset", "smoke", "--local-batch-sizes", "50", "--ranks", "2"]) == 2
    said = "error: a worker process was killed, most likely because memory ran out: free memory, or lower --ranks"
    assert said in capsys.readouterr().err


def test_files_of_another_model(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(files), "--preset", "mlperf-dcnv2"]) == 2
    assert "table rows differ" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "values"),
    [("--ranks", {"ranks": 0}), ("--seconds", {"seconds": 0.0}), ("--local-batch-sizes", {"local_batch_sizes": (0,)})],
)
def test_bad_flags(flag: str, values: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=flag):
        SpeedConfig(directory=Path("nowhere"), **values)  # type: ignore[arg-type]
