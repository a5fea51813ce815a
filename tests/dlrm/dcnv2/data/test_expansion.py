import errno
import fcntl
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrm_bench.dlrm.dcnv2.data import expansion
from dlrm_bench.dlrm.dcnv2.data.expansion import FOLDER, draw_tables, open_expansion_tables

Reference = Callable[..., list[np.ndarray]]
ROWS, HOTS = (1000, 1, 3, 40_000, 7, 2), (4, 3, 1, 6, 12, 2)


def test_equals_the_reference(tmp_path: Path, draw_reference: Reference) -> None:
    tables = open_expansion_tables(tmp_path, ROWS, HOTS)
    for feature, reference in enumerate(draw_reference(ROWS, HOTS)):
        out = np.empty_like(reference)
        tables.expand(feature, np.arange(ROWS[feature], dtype=np.int32), out)
        np.testing.assert_array_equal(out, reference)


@given(
    shapes=st.lists(st.tuples(st.integers(1, 400), st.integers(1, 5)), min_size=1, max_size=5),
    chunk=st.integers(1, 50),
)
@settings(max_examples=50, deadline=None)
def test_pieces_do_not_change_the_sequence(shapes: list[tuple[int, int]], chunk: int) -> None:
    rng = np.random.RandomState(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expansion, "CHUNK_IDS", chunk)
        drawn = draw_tables(*zip(*shapes, strict=True), [rows for rows, _ in shapes])
        for (rows, hot), pieces in zip(shapes, drawn, strict=True):
            got = np.concatenate([*pieces])
            np.testing.assert_array_equal(got[:, 0], np.arange(rows))
            np.testing.assert_array_equal(got[:, 1:], rng.randint(0, rows, size=(rows, hot - 1)))


@given(
    shapes=st.lists(st.tuples(st.integers(1, 400), st.integers(1, 5), st.floats(0, 1)), min_size=1, max_size=5),
    chunk=st.integers(1, 50),
)
@settings(max_examples=50, deadline=None)
def test_the_first_rows_are_those_of_whole_tables(shapes: list[tuple[int, int, float]], chunk: int) -> None:
    rows, hots, shares = zip(*shapes, strict=True)
    kept = [max(1, round(share * count)) for share, count in zip(shares, rows, strict=True)]
    skipped: list[float] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expansion, "CHUNK_IDS", chunk)
        patch.setattr(expansion, "SKIPPED_WORDS", chunk)
        whole = [np.concatenate([*pieces]) for pieces in draw_tables(rows, hots, rows)]
        first = [np.concatenate([*pieces]) for pieces in draw_tables(rows, hots, kept, skipped.append)]
    for of_whole, of_first, count in zip(whole, first, kept, strict=True):
        np.testing.assert_array_equal(of_first, of_whole[:count])
    left_out = zip(rows, kept, hots, strict=True)
    assert sum(skipped) == sum((count - of_kept) * (hot - 1) for count, of_kept, hot in left_out if count > 1)


def test_the_rows_kept_alone_are_on_disk(tmp_path: Path, draw_reference: Reference) -> None:
    kept = (10, 1, 3, 7, 7, 1)
    tables = open_expansion_tables(tmp_path, ROWS, HOTS, kept)
    for table, reference, count in zip(tables.rows, draw_reference(ROWS, HOTS), kept, strict=True):
        np.testing.assert_array_equal(reference[:count], reference[:count, :1] if table is None else table)
    size = sum(file.stat().st_size for file in tmp_path.rglob("*.npy"))
    assert size == 4 * sum(count * hot for count, hot in zip(kept, HOTS, strict=True) if hot > 1) + 5 * 128


def test_models_do_not_share_tables(tmp_path: Path, draw_reference: Reference) -> None:
    open_expansion_tables(tmp_path, (10, 20), (2, 3))
    second = open_expansion_tables(tmp_path, (11, 20), (2, 3))
    assert second.rows[1] is not None
    np.testing.assert_array_equal(second.rows[1], draw_reference((11, 20), (2, 3))[1])


def test_cached_tables_are_not_drawn_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_expansion_tables(tmp_path, (10,), (2,))
    monkeypatch.setattr(expansion, "draw_tables", lambda *_: pytest.fail("drawn again"))
    open_expansion_tables(tmp_path, (10,), (2,))


def test_drawing_large_tables_shows_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    open_expansion_tables(tmp_path, (10,), (3,))
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(expansion, "SHOWN_IDS", 60)
    open_expansion_tables(tmp_path, (30,), (3,))
    assert "draw the tables that expand 1-hot ids, 0.0 GB, once for" in capsys.readouterr().err
    open_expansion_tables(tmp_path, (30,), (3,))
    assert capsys.readouterr().err == ""


def test_leftovers_of_a_killed_process_are_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(expansion.os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            open_expansion_tables(tmp_path, (10,), (2,))
    assert list((tmp_path / FOLDER).glob("*.partial"))
    (table,) = open_expansion_tables(tmp_path, (10,), (2,)).rows
    assert table is not None
    assert table.shape == (10, 2)
    assert not list((tmp_path / FOLDER).glob("*.partial"))


def test_an_unwritable_directory_says_what_is_needed(tmp_path: Path) -> None:
    (tmp_path / FOLDER).write_text("a file in the way")
    message = rf"cannot be written to {tmp_path / FOLDER} \(.+\): make it writable, with 0\.4 GB free, .* --data\.path"
    with pytest.raises(ValueError, match=message):
        open_expansion_tables(tmp_path, (50_000_000,), (2,))


def _open(path: Path) -> int:
    table = open_expansion_tables(path, (50_000, 30), (11, 2)).rows[0]
    assert table is not None
    return int(table.sum(dtype=np.int64))


@pytest.mark.parametrize("locks", [True, False])
def test_processes_at_once_get_whole_tables(
    tmp_path: Path, draw_reference: Reference, monkeypatch: pytest.MonkeyPatch, locks: bool
) -> None:
    """Also on a file system without locks, where each process draws them."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    if not locks:
        monkeypatch.setattr(fcntl, "flock", refuse)
    with multiprocessing.get_context("fork").Pool(4) as pool:
        sums = pool.map(_open, [tmp_path] * 8)
    assert set(sums) == {draw_reference((50_000, 30), (11, 2))[0].sum(dtype=np.int64)}
    assert not list((tmp_path / FOLDER).glob("*.partial"))
