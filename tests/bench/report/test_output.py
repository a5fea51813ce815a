"""A report's folder: what an earlier report wrote is replaced, and nothing else is touched."""

import json
from pathlib import Path

import pytest

from dlrm_bench.bench.report.output import MANIFEST, check_output, write_files
from tests.bench.records.full_disk import fails_after


def test_an_earlier_report_is_replaced(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert write_files(out, {"index.html": b"1", "old.png": b"1"}) == []
    assert write_files(out, {"index.html": b"2", "new.png": b"2"}) == []
    assert {path.name: path.read_bytes() for path in out.iterdir() if path.name != MANIFEST} == {
        "index.html": b"2",
        "new.png": b"2",
    }
    assert json.loads((out / MANIFEST).read_text())["files"] == ["index.html", "new.png"]


def test_other_files_are_left_alone_and_named(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "folder").mkdir()
    write_files(tmp_path, {"index.html": b"1"})
    assert write_files(tmp_path, {"index.html": b"2"}) == ["folder", "notes.txt"]
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_foreign_file_of_a_needed_name_stops_the_report_before_it_writes(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("mine")
    with pytest.raises(ValueError, match=r"index\.html was not written by `dlrm-bench report`.*another --out"):
        write_files(tmp_path, {"a.png": b"1", "index.html": b"1"})
    assert [path.name for path in tmp_path.iterdir()] == ["index.html"]
    assert (tmp_path / "index.html").read_text() == "mine"


def test_a_report_that_was_cut_short_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_files(tmp_path, {"index.html": b"1"})
    write_bytes = Path.write_bytes

    def full_disk(path: Path, content: bytes) -> int:
        if path.name == "b.png":
            raise OSError("no space left")
        return write_bytes(path, content)

    monkeypatch.setattr(Path, "write_bytes", full_disk)
    with pytest.raises(OSError, match="no space"):
        write_files(tmp_path, {"a.png": b"2", "b.png": b"2", "index.html": b"2"})
    monkeypatch.undo()
    assert write_files(tmp_path, {"a.png": b"3", "index.html": b"3"}) == []


def test_a_disk_that_is_full_leaves_the_manifest_of_the_report_before(tmp_path: Path) -> None:
    write_files(tmp_path, {"index.html": b"1"})
    before = (tmp_path / MANIFEST).read_text()
    with fails_after(60):
        write_files(tmp_path, {"index.html": b"2", "new.png": b"2"})
    assert (tmp_path / MANIFEST).read_text() == before
    assert write_files(tmp_path, {"index.html": b"3"}) == []


@pytest.mark.parametrize("content", ["{", "[]", '{"files": 1}', '{"files": ["../run.json"]}'])
def test_a_manifest_that_is_no_reports_is_an_error(tmp_path: Path, content: str) -> None:
    (tmp_path / MANIFEST).write_text(content)
    with pytest.raises(ValueError, match=MANIFEST):
        write_files(tmp_path, {"index.html": b"1"})
    assert (tmp_path / MANIFEST).read_text() == content


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    with pytest.raises(ValueError, match="name a folder"):
        check_output(tmp_path / "out")
