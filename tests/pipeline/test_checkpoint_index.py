"""Which elements places share, and what an index of a damaged or a hostile checkpoint is refused for."""

import json
import pickle
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlrm_bench.pipeline.checkpoint_index import (
    INDEX_JSON,
    CheckpointError,
    Index,
    Piece,
    Place,
    checksum,
    common,
    damage,
    other_files,
    read_index,
    write_index,
)

SHAPE = (23, 6)
TABLE = np.arange(23 * 6, dtype=np.float32).reshape(SHAPE)


def elements(place: Place) -> Any:
    rows, columns = place.start
    last = rows + (place.shape[0] - 1) * place.row_step
    return TABLE[rows : last + 1 : place.row_step, columns : columns + place.shape[1]]


def some_place(draw: random.Random) -> Place:
    step, row, column = draw.randint(1, 7), draw.randrange(23), draw.randrange(6)
    return Place("t", (row, column), (draw.randint(1, (22 - row) // step + 1), draw.randint(1, 6 - column)), step)


def test_the_common_elements_are_those_of_plain_sets() -> None:
    draw, shared = random.Random(0), 0
    for _ in range(3000):
        one, other = some_place(draw), some_place(draw)
        expected = set(elements(one).flat) & set(elements(other).flat)
        found = common(one, other)
        assert (found is None) == (not expected), (one, other)
        if found is not None:
            first, second = elements(one)[found[0]], elements(other)[found[1]]
            assert np.array_equal(first, second), (one, other)
            assert set(first.flat) == expected
            shared += 1
    assert 300 < shared < 2700


def saved(folder: Path) -> Index:
    """Two pieces, of the even and the odd rows."""
    pieces = []
    for part in range(2):
        data = TABLE[part::2].tobytes()
        (folder / f"rank-{part}-0.bin").write_bytes(data)
        place = Place("weights/t", (part, 0), (12 - part, 6), 2)
        pieces.append(Piece(place, f"rank-{part}-0.bin", 0, checksum(data)))
    (folder / "state.json").write_text("{}")
    index = Index({"weights/t": SHAPE}, tuple(pieces), other_files(folder))
    write_index(folder, index)
    return index


def test_an_index_comes_back_and_damaged_files_are_named(tmp_path: Path) -> None:
    index = saved(tmp_path)
    assert read_index(tmp_path) == index
    assert index.nbytes == TABLE.nbytes
    assert index.others == {"state.json": checksum(b"{}")}
    checked: list[int] = []
    assert list(damage(tmp_path, index, checked.append)) == []
    assert sum(checked) == TABLE.nbytes
    first, second = (tmp_path / piece.file for piece in index.pieces)
    content = bytearray(first.read_bytes())
    content[100] ^= 1
    first.write_bytes(content)
    second.write_bytes(bytes(second.stat().st_size))
    one, other = damage(tmp_path, index, checked.append)
    assert one == "rank-0-0.bin, bytes 0 to 287, of weights/t, are damaged: their checksum does not match"
    assert other == "rank-1-0.bin, bytes 0 to 263, of weights/t, are damaged: their checksum does not match"
    second.write_bytes(b"")
    first.unlink()
    (tmp_path / "state.json").write_text("[]")
    third, one, other = damage(tmp_path, index, checked.append)
    assert third == "state.json is damaged: its checksum does not match"
    (tmp_path / "state.json").unlink()
    third, one, other = damage(tmp_path, index, checked.append)
    assert third == "state.json: No such file or directory"
    assert one == "rank-0-0.bin, bytes 0 to 287: No such file or directory"
    assert "rank-1-0.bin, bytes 0 to 263, of weights/t: the file is truncated" in other


WRONG: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "format": (lambda index: index.update(format=1), "it is not of format 2"),
    "no pieces": (lambda index: index.pop("pieces"), "it lacks tensors, pieces or others"),
    "others": (lambda index: index.update(others={"../state.json": 1}), r"'\.\./state\.json' is not the name"),
    "shape": (
        lambda index: index["tensors"].update({"weights/t": [23, -6]}),
        r"the shape of 'weights/t' is \[23, -6\]",
    ),
    "another tensor": (lambda index: index["pieces"][1].update(tensor="u"), "piece 1 belongs to no tensor"),
    "a way out": (
        lambda index: index["pieces"][0].update(file="../rank-0-0.bin"),
        r"piece 0 names '\.\./rank-0-0\.bin'",
    ),
    "start": (lambda index: index["pieces"][0].update(start=[-2, 0]), r"piece 0 has start \[-2, 0\]"),
    "a flag for a number": (lambda index: index["pieces"][0].update(start=[0, True]), "piece 0 has start"),
    "step": (lambda index: index["pieces"][0].update(row_step=0), "row_step 0"),
    "checksum": (lambda index: index["pieces"][0].update(crc32="0"), "crc32 '0'"),
    "dimensions": (lambda index: index["pieces"][0].update(start=[0]), "different number of dimensions"),
    "beyond": (lambda index: index["pieces"][0].update(start=[2, 0]), "piece 0 goes beyond its tensor"),
    "a piece too few": (lambda index: index["pieces"].pop(), "have a different number of elements"),
    "twice": (
        lambda index: (
            index["pieces"][0].update(start=[1, 0], shape=[11, 6])
            or index["pieces"].append({**index["pieces"][0], "start": [0, 0], "shape": [1, 6]})
        ),
        "pieces of 'weights/t' overlap",
    ),
    "steps": (
        lambda index: index.update(
            pieces=[{**index["pieces"][0], "shape": [11, 6]}, {**index["pieces"][1], "shape": [12, 6], "row_step": 1}]
        ),
        "rows with different steps",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_an_index_that_cannot_be_is_refused(tmp_path: Path, what: str) -> None:
    saved(tmp_path)
    path = tmp_path / INDEX_JSON
    content = json.loads(path.read_text())
    change, found = WRONG[what]
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=rf"index\.json is damaged: .*{found}"):
        read_index(tmp_path)


@pytest.mark.parametrize("text", [b"", b"\xff\xfe", b"[" * 100000, b"[]"])
def test_what_is_no_index_is_refused(tmp_path: Path, text: bytes) -> None:
    (tmp_path / INDEX_JSON).write_bytes(text)
    with pytest.raises(CheckpointError, match=r"index\.json is damaged"):
        read_index(tmp_path)


class Planted:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("planted_code_ran"),)


def test_the_pickle_of_an_earlier_version_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Planted()))
    with pytest.raises(CheckpointError, match="a checkpoint of an earlier version"):
        read_index(tmp_path)
    assert not (tmp_path / "planted_code_ran").exists()
    (tmp_path / ".metadata").unlink()
    with pytest.raises(CheckpointError, match=r"index\.json: No such file"):
        read_index(tmp_path)


def test_pieces_of_equal_places_are_refused(tmp_path: Path) -> None:
    index = saved(tmp_path)
    one = index.pieces[0]
    half = replace(one.place, shape=(6, 6))
    other = replace(one.place, start=(10, 0), shape=(6, 6))  # row 10 is in both
    write_index(tmp_path, replace(index, pieces=(replace(one, place=half), replace(one, place=other), index.pieces[1])))
    with pytest.raises(CheckpointError, match="overlap"):
        read_index(tmp_path)
