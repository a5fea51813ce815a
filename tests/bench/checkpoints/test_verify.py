"""The command that reads a whole checkpoint and reports damage."""

import json
from pathlib import Path

import pytest

from dlrm_bench.bench.checkpoints.saved_state import STATE_JSON
from dlrm_bench.bench.cli import main
from dlrm_bench.dlrm.runtime.command_line import EXIT_BAD_INPUT
from dlrm_bench.pipeline.checkpoint_index import INDEX_JSON, Index, Piece, Place, checksum, other_files, write_index
from tests.bench.checkpoints.test_saved_state import save


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    saved = save(tmp_path)
    data = bytes(range(240))
    (saved / "rank-0-0.bin").write_bytes(data)
    place = Place("weights/t", (0, 0), (10, 6), 1)
    piece = Piece(place, "rank-0-0.bin", 0, checksum(data))
    write_index(saved, Index({"weights/t": (10, 6)}, (piece,), other_files(saved)))
    return saved


@pytest.mark.parametrize("of_them", [False, True])
def test_a_whole_one_is_said_to_be(folder: Path, capsys: pytest.CaptureFixture[str], of_them: bool) -> None:
    assert main(["checkpoint", "verify", str(folder.parent if of_them else folder)]) == 0
    assert capsys.readouterr().out == f"{folder}: 112 samples trained by first, 1 tensors, 2.4e-07 GB, all well\n"


def test_everything_that_is_wrong_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = bytearray((folder / "rank-0-0.bin").read_bytes())
    data[17] ^= 8
    (folder / "rank-0-0.bin").write_bytes(data)
    state = json.loads((folder / STATE_JSON).read_text())
    (folder / STATE_JSON).write_text(json.dumps(state | {"auc": 2}))
    assert main(["checkpoint", "verify", str(folder)]) == EXIT_BAD_INPUT
    first, second, third = capsys.readouterr().out.splitlines()
    assert first == f"{folder / STATE_JSON} is damaged: auc is 2"
    assert second == f"{folder / STATE_JSON} is damaged: its checksum does not match"
    assert third.startswith(f"{folder}/rank-0-0.bin, bytes 0 to 239, of weights/t, are damaged")
    (folder / INDEX_JSON).write_text("{")
    assert main(["checkpoint", "verify", str(folder)]) == EXIT_BAD_INPUT
    assert f"{folder / INDEX_JSON} is damaged: not JSON" in capsys.readouterr().out


def test_a_snapshot_in_memory_has_nothing_to_compare_with(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    index = json.loads((folder / INDEX_JSON).read_text())
    index["pieces"][0]["crc32"], index["others"] = None, {}
    (folder / INDEX_JSON).write_text(json.dumps(index))
    assert main(["checkpoint", "verify", str(folder)]) == 0
    assert "all there; a snapshot in memory has no checksums" in capsys.readouterr().out
    (folder / "rank-0-0.bin").write_bytes(bytes(239))
    assert main(["checkpoint", "verify", str(folder)]) == EXIT_BAD_INPUT
    assert "the file is truncated" in capsys.readouterr().out


def test_no_checkpoint_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "verify", str(tmp_path / "gone")]) == EXIT_BAD_INPUT
    assert f"error: {tmp_path / 'gone'} does not exist" in capsys.readouterr().err
