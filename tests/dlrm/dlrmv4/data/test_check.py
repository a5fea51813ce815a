"""The check finds what is wrong, in the file where it is."""

import dataclasses
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from dlrm_bench.dlrm.data.check import CheckConfig
from dlrm_bench.dlrm.dlrmv4.data import check as module
from dlrm_bench.dlrm.dlrmv4.data.cache import Cache, find_cache
from dlrm_bench.dlrm.dlrmv4.data.check import check, main
from dlrm_bench.dlrm.dlrmv4.data.generate import GenerateConfig, generate
from dlrm_bench.dlrm.dlrmv4.data.limits import Rows
from dlrm_bench.dlrm.dlrmv4.data.mlperf_checksums import MD5, SHA256
from dlrm_bench.dlrm.dlrmv4.data.windows import WindowIndex


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("made") / "data"
    generate(GenerateConfig(out=out, users=60, items=300, artists=40, albums=90, days=5, history=30))
    return out


@pytest.fixture
def made(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "data"))


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE", 700)


def test_all_is_well(made, root, capsys):
    assert check(CheckConfig(directory=made)).findings == []
    assert check(CheckConfig(directory=root)).findings == []
    assert main([str(made)]) == 0
    assert "all well" in capsys.readouterr().out


def test_a_user_beyond_the_benchmarks_table_is_named(made, monkeypatch):
    monkeypatch.setattr(module, "Rows", lambda: Rows(uid=60))
    (finding,) = check(CheckConfig(directory=made)).findings
    assert re.search(r"has user 60, and MLPerf's table uid has 60 rows: .* \(--model\.context-rows\)", finding)
    monkeypatch.setattr(module, "Rows", lambda: Rows(uid=61))
    assert check(CheckConfig(directory=made)).findings == []


def test_an_index_that_is_not_there_is_written(made):
    for path in (made / "processed_5b").glob("*/*s.npy"):
        if path.name.startswith(("ranges", "windows")):
            path.unlink()
    assert check(CheckConfig(directory=made, fast=True)).findings == []
    assert list((made / "processed_5b").glob("*/windows_L30_86400s.npy"))


def test_an_index_of_damaged_times_does_not_stay(made):
    folder = find_cache(made)
    path, (windows,) = folder / "anchor_ts_L30.npy", folder.glob("windows_*")
    times, expected = path.read_bytes(), windows.read_bytes()
    damaged = np.load(path)
    (made / "generated.json").unlink()  # as MLCommons' download, which also lacks the index
    for value, message in ((0, "lacks the anchors"), (1 << 60, rf"anchor_ts_L30.npy has times from .* to {1 << 60} s")):
        windows.unlink()
        damaged[5] = value
        np.save(path, damaged)
        assert re.search(message, check(CheckConfig(directory=made)).findings[0])
        assert not windows.exists()
        path.write_bytes(times)  # copied again
        assert check(CheckConfig(directory=made, fast=True)).findings == []
        assert windows.read_bytes() == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("flat_uid", -1), ("flat_uid", 3), ("flat_uid", 1000), ("flat_item_ids", 301), ("flat_item_ids", -1)),
        *(("flat_timestamps", -5), ("flat_timestamps", 1 << 31), ("flat_timestamps", 0), ("flat_event_types", 5)),
        *(("flat_played_ratio", np.nan), ("flat_played_ratio", -1), ("flat_is_organic", 2), ("flat_is_like", None)),
        *(("flat_is_listen_plus", None), ("flat_is_skip", None), ("positions_L30", 7), ("anchor_ts_L30", 7)),
    ],
)
@pytest.mark.parametrize("place", [5, 2000])
def test_a_wrong_value_is_found_in_its_file(made, name, value, place):
    path = next((made / "processed_5b").glob(f"*/{name}.npy"))
    column = np.load(path)
    place = min(place, len(column) - 1)
    column[place] = ~column[place] if value is None else value
    np.save(path, column)
    findings = check(CheckConfig(directory=made)).findings
    assert any(name in finding for finding in findings), findings
    assert check(CheckConfig(directory=made, fast=True)).findings in ([], findings)


@pytest.mark.parametrize(
    ("name", "message"),
    [("user_start", "divide"), ("user_end", "divide"), ("unique_uids", "ascending"), ("ranges_L30_86400s", "window 0")],
)
def test_wrong_bounds_are_found(made, name, message):
    path = next((made / "processed_5b").glob(f"*/{name}.npy"))
    column = np.load(path)
    column.ravel()[2] += 1
    np.save(path, column)
    assert message in check(CheckConfig(directory=made)).findings[0]


def test_anchors_out_of_order_in_the_index_are_found(made):
    cache = Cache.open(find_cache(made))
    together = dataclasses.replace(cache, anchor_timestamp=np.zeros(4, dtype=np.int64))
    index = WindowIndex(np.array([[2, 0], [0, 2]]), np.array([[0, 4]]))
    (finding,) = module._index_findings(together, index)
    assert "wrong in window 0" in finding


def test_other_counts_and_missing_files_are_found(made, tmp_path, capsys):
    generated = json.loads((made / "generated.json").read_text())
    (made / "generated.json").write_text(json.dumps(generated | {"eval_anchors": 1}))
    (finding,) = check(CheckConfig(directory=made)).findings
    assert "samples of evaluation, not generated.json's 1" in finding
    assert main([str(tmp_path / "nothing")]) == 2
    assert "found none" in capsys.readouterr().out


def test_mlperfs_files_are_known(made):
    assert len(SHA256) == 16
    assert len(MD5) == 3
    findings = check(CheckConfig(directory=made, mlperf=True)).findings
    assert any("MLPerf Limits(history=4086" in finding for finding in findings)
    assert any("not MLPerf's 4763272693" in finding for finding in findings)
    assert sum("does not exist" in finding for finding in findings) == 16 + 1
    assert sum("is not MLPerf's: md5" in finding for finding in findings) == 2
