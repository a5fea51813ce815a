"""The check that a JSON file has its form."""

import json
import re
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict

import pytest

from dlrm_bench.bench.records.json_file import check_form, json_text, read_json, write_whole
from tests.bench.records.full_disk import fails_after


class Outer(TypedDict):
    schema: int
    name: str
    ratio: float
    status: Literal["good", "bad"]
    free: dict[str, Any]
    inner: "Inner | None"
    several: list["Inner"]
    by_name: dict[str, float]
    flag: NotRequired[bool | None]


class Inner(TypedDict):
    size: int | None


GOOD: dict[str, Any] = {
    "schema": 2,
    "name": "x",
    "ratio": 1,
    "status": "good",
    "free": {"anything": [None, {}]},
    "inner": {"size": 3},
    "several": [{"size": None}, {"size": 1, "of a later version": 1}],
    "by_name": {"a": 1.5},
}


@pytest.mark.parametrize("changes", [{}, {"flag": None}, {"flag": True}, {"inner": None}, {"several": []}])
def test_what_is_well_formed(changes: dict[str, Any]) -> None:
    check_form(Path("x.json"), GOOD | changes, Outer, (1, 2))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ([], "x.json is damaged: expected an object, found list; restore the file or leave it out"),
        ({}, "x.json has schema None; this version reads 1 and 2: use the version of the harness that wrote it"),
        (GOOD | {"schema": 3}, "x.json has schema 3; this version reads 1 and 2"),
        ({"schema": 1, "inner": {}, "several": [{}]}, "x.json lacks name, ratio, status, free, by_name, inner.size, "),
        (GOOD | {"several": [GOOD["inner"], {}]}, "x.json lacks several[1].size: restore the file or leave it out"),
        (GOOD | {"name": None}, "x.json: name is None, expected str; restore"),
        (GOOD | {"ratio": True}, "x.json: ratio is True, expected float"),
        (GOOD | {"status": "fair"}, "x.json: status is 'fair', expected Literal['good', 'bad']"),
        (GOOD | {"inner": 7}, "x.json: inner is 7, expected "),
        (GOOD | {"inner": {"size": 1.5}}, "x.json: inner.size is 1.5, expected int | None"),
        (GOOD | {"by_name": {"a": "b"}}, "x.json: by_name.a is 'b', expected float"),
        (GOOD | {"free": {"x": [1.0, float("nan")]}}, "x.json: free.x[1] is nan, which JSON cannot hold"),
    ],
)
def test_what_is_not_is_named_with_its_file(content: Any, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        check_form(Path("x.json"), content, Outer, (1, 2))


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"\xff\x00", "is corrupt at byte 0"), (b"[" * 100_000, "is corrupt: nested too deeply"), (b"{", "at line 1")],
)
def test_a_file_that_is_no_json_is_named(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(ValueError, match=rf"x\.json {said}|x\.json is corrupt {said}"):
        read_json(tmp_path / "x.json")


def test_text_has_short_values_on_a_line_and_loses_none() -> None:
    value = {"a": {"b": [1, 2.5, None], "c": {}}, "long": list(range(200)), "many": [{"x": "ü" * 90}, {"y": "z" * 90}]}
    text = json_text(value)
    assert json.loads(text) == value
    assert text.splitlines()[1] == ' "a":{"b":[1,2.5,null],"c":{}},'
    assert text.splitlines()[2].startswith(' "long":[0,1,2,')  # a flat list stays on its line
    assert [line.strip() for line in text.splitlines()[4:6]] == [f'{{"x":"{"ü" * 90}"}},', f'{{"y":"{"z" * 90}"}}']


def test_text_fills_its_lines_below_the_outermost_object() -> None:
    value = {"packages": {f"package-{i}": "1.0" for i in range(40)}, "deep": {"x": {"y": ["z" * 140, {}]}, "v": 1}}
    text = json_text(value)
    assert json.loads(text) == value
    lines = text.splitlines()
    assert max(map(len, lines)) <= 160
    assert sum(len(line) > 130 for line in lines) >= 5  # full but for the last
    assert lines[-4:] == [f'  "x":{{"y":["{"z" * 140}",{{}}]}},', '  "v":1', " }", "}"]


@pytest.mark.parametrize("value", [float("nan"), [float("inf")], {"a": {"b": ["x" * 200, float("nan")]}}])
def test_text_refuses_numbers_that_json_cannot_hold(value: object) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        json_text(value)


def test_a_file_is_written_whole_or_stays_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("before")
    with fails_after(100):
        write_whole(tmp_path / "x.json", "after" * 100)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"x.json": "before"}


def test_a_link_and_the_access_of_its_file_stay(tmp_path: Path) -> None:
    (tmp_path / "file").touch(mode=0o600)
    (tmp_path / "link").symlink_to("file")
    write_whole(tmp_path / "link", "after")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "after\n"
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600
