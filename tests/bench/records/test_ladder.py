"""Ladders as files: those from before some fields, and damage."""

import json
from pathlib import Path
from typing import Any

import pytest

from dlrm_bench.bench.ladder.analysis import ladder_host_table
from dlrm_bench.bench.records.ladder import LADDER_JSON as FILE
from dlrm_bench.bench.records.ladder import read_ladder
from tests.bench.ladder.made_ladders import made as made


def test_a_ladder_of_before_profiled_runs_is_read(made: Path) -> None:
    ladder: dict[str, Any] = json.loads((made / FILE).read_text())
    for rung in ladder["rungs"]:
        del rung["note"], rung["host"]
    (made / FILE).write_text(json.dumps(ladder))
    read, _ = read_ladder(made)
    assert ladder_host_table(read) is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", r"ladder\.json is corrupt at line 1 column 2"),
        (b"\xff", "is corrupt at byte 0"),
        (b"[]", r"ladder\.json is damaged: expected an object, found list"),
        (b'{"schema": 2}', r"ladder\.json has schema 2; this version reads 1"),
        (b'{"schema": 1, "rungs": [{"name": "a"}]}', r"ladder\.json lacks id, .*rungs\[0\]\.flags"),
    ],
)
def test_damaged_ladders_are_named(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=r"ladder\.json cannot be read"):
        read_ladder(tmp_path)
    (tmp_path / FILE).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_ladder(tmp_path)


def test_a_ladder_without_one_of_its_members(made: Path) -> None:
    ladder: dict[str, Any] = json.loads((made / FILE).read_text())
    ladder["rungs"][1]["records"][0] = "gone"
    (made / FILE).write_text(json.dumps(ladder))
    with pytest.raises(ValueError, match=r"gone/run\.json is missing"):
        read_ladder(made)
