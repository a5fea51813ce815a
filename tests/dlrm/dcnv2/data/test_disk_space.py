import re
import shutil
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest

from dlrm_bench.bench.presets import preset
from dlrm_bench.dlrm.dcnv2.data import disk_space as module
from dlrm_bench.dlrm.dcnv2.data.check import MLPERF_DAY_SAMPLES
from dlrm_bench.dlrm.dcnv2.data.disk_space import disk_bytes, require_space, seconds
from dlrm_bench.dlrm.dcnv2.data.expansion import FOLDER
from dlrm_bench.dlrm.dcnv2.data.preprocess import PreprocessConfig, preprocess
from dlrm_bench.dlrm.dcnv2.data.preprocess_job import PreprocessJob
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


def test_a_small_input_takes_small_tables_and_little_time() -> None:
    model = preset("mlperf-dcnv2").model
    assert disk_bytes((3000, 2000, 1000), model, "both") < 20e6
    few, many = seconds((3000, 2000, 1000), model, "both"), seconds(MLPERF_DAY_SAMPLES, model, "both")
    assert 20 < few < 60  # 28 s, of which 27 skip the rows that no id reaches
    assert seconds((3000, 2000, 1000), model, "one_hot") < 1
    assert many == pytest.approx(12e-6 * sum(MLPERF_DAY_SAMPLES) + 30e-9 * 23.9e9 / 4, rel=0.01)
    assert seconds(MLPERF_DAY_SAMPLES, model, "both", workers=4) < many / 3.5


def test_disk_and_time_are_said_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_raw_days(tmp_path / "raw", (300, 300))
    config = PreprocessConfig(raw=tmp_path / "raw", out=tmp_path / "out", preset="smoke", table_scale=0.01)
    preprocess(config)
    first = capsys.readouterr().err.splitlines()[0]
    assert re.fullmatch(r"about 600 samples take up to 0\.00\d+ GB of disk and some 1 s in all", first)
    preprocess(config)
    assert capsys.readouterr().err == ""


def test_small_inputs_leave_no_tables_and_the_same_files(tmp_path: Path) -> None:
    write_raw_days(tmp_path / "raw", (300, 300))
    model = preset("smoke").model
    for name in ("small", "whole"):
        with pytest.MonkeyPatch.context() as patch:
            if name == "whole":
                patch.setattr(PreprocessJob, "_rows_reached", lambda job, feature: model.rows[feature])
            preprocess(PreprocessConfig(raw=tmp_path / "raw", out=tmp_path / name, preset="smoke"))
    days = sorted(path.name for path in (tmp_path / "small").glob("day_*"))
    assert len(days) == 8
    assert all((tmp_path / "small" / day).read_bytes() == (tmp_path / "whole" / day).read_bytes() for day in days)
    assert not (tmp_path / "small" / FOLDER).exists()
    assert (tmp_path / "whole" / FOLDER).exists()


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
    with pytest.raises(ValueError, match=r"out has 0\.0 GB free, but about 0\.0 GB are needed .*--formats one_hot"):
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
