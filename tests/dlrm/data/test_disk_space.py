import shutil
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest

from dlrm_bench.bench.presets import preset
from dlrm_bench.dlrm.data import disk_space as module
from dlrm_bench.dlrm.data.disk_space import disk_bytes, require_space
from dlrm_bench.dlrm.dcnv2.data.check import MLPERF_DAY_SAMPLES
from dlrm_bench.dlrm.dcnv2.data.preprocess import PreprocessConfig, preprocess
from dlrm_bench.dlrm.dcnv2.data.raw_tsv import rows_per_byte
from tests.dlrm.dcnv2.data.raw_days import write_raw_days

Usage = namedtuple("Usage", "free")
MODEL = replace(preset("smoke").model, table_scale=0.01)


def test_mlperfs_set() -> None:
    """Its files alone: 912 bytes a sample multi-hot, 160 one-hot, of which 56 both have; 23.9 GB of tables."""
    rows = MLPERF_DAY_SAMPLES
    model = preset("mlperf-dcnv2").model
    tables = 23.9e9
    assert disk_bytes(rows, model, "multi_hot") == pytest.approx(sum(rows) * 912 + tables, rel=0.02)
    assert disk_bytes(rows, model, "both") == pytest.approx(sum(rows) * (912 + 104) + tables, rel=0.02)
    assert disk_bytes(rows, model, "one_hot") == pytest.approx(sum(rows) * 185, rel=0.02)


@pytest.mark.parametrize("zipped", [(), (0,)])
def test_rows_are_estimated_from_the_beginning(tmp_path: Path, zipped: tuple[int, ...]) -> None:
    write_raw_days(tmp_path, (300,), zipped=zipped)
    (file,) = tmp_path.iterdir()
    assert rows_per_byte(file) * file.stat().st_size == pytest.approx(300)


def test_what_does_not_fit_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_raw_days(tmp_path / "raw", (300, 300))
    raw, out = [tmp_path / "raw" / "day_0", tmp_path / "raw" / "day_1"], tmp_path / "deep" / "out"
    needed = disk_bytes([300, 300], MODEL, "both")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0.9 * needed))
    with pytest.raises(ValueError, match=r"out has 0\.0 GB free, and about 0\.0 GB will be needed .*--formats one_hot"):
        preprocess(PreprocessConfig(raw=tmp_path / "raw", out=out, preset="smoke", table_scale=0.01))
    assert not out.parent.exists()
    out.mkdir(parents=True)
    (out / "before").write_bytes(bytes(int(0.1 * needed)))
    require_space(out, raw, MODEL, "both", 1)
    assert module.MARGIN < 1


def test_the_estimate_bounds_what_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looked at whenever a day is written, and at the end."""
    from dlrm_bench.dlrm.dcnv2.data import preprocess_job

    rows = (900, 800, 700, 900)
    write_raw_days(tmp_path / "raw", rows)
    out = tmp_path / "out"
    sizes: list[int] = []

    def measuring(*arguments: object) -> object:
        sizes.append(sum(path.stat().st_size for path in out.rglob("*") if path.is_file()))
        return checksum(*arguments)  # type: ignore[arg-type]

    checksum = preprocess_job.checksum
    monkeypatch.setattr(preprocess_job, "checksum", measuring)
    preprocess(PreprocessConfig(raw=tmp_path / "raw", out=out, preset="smoke", table_scale=0.01))
    fixed = 60_000  # headers, and the state's small files
    assert 0.5 * disk_bytes(rows, MODEL, "both") < max(sizes) < disk_bytes(rows, MODEL, "both") + fixed
