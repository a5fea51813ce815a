import errno
import io
import os
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from dlrm_bench.dlrm.data.npy import RowFiles, map_array, member_span, open_array, write_header


def test_header_is_numpys() -> None:
    array = np.arange(6, dtype=np.int32).reshape(3, 2)
    ours, numpys = io.BytesIO(), io.BytesIO()
    write_header(ours, np.int32, (3, 2))
    ours.write(array.data)
    np.save(numpys, array)
    assert ours.getvalue() == numpys.getvalue()


@pytest.mark.parametrize("version", [(1, 0), (2, 0)])
def test_maps_both_header_versions(tmp_path: Path, version: tuple[int, int]) -> None:
    array = np.arange(6, dtype=np.int32).reshape(3, 2)
    with (tmp_path / "a.npy").open("wb") as file:
        np.lib.format.write_array(file, array, version=version)
    np.testing.assert_array_equal(map_array(tmp_path / "a.npy", np.int32, 2), array)


def test_threads_parse_headers_one_after_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CPython 3.11 may fail otherwise."""
    np.save(tmp_path / "a.npy", np.arange(6, dtype=np.int32).reshape(3, 2))
    read, both = np.lib.format.read_array_header_1_0, threading.Barrier(2)

    def meeting(file: io.FileIO) -> object:
        with pytest.raises(threading.BrokenBarrierError):  # nobody comes
            both.wait(0.05)
        both.reset()
        return read(file)

    monkeypatch.setattr(np.lib.format, "read_array_header_1_0", meeting)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: map_array(tmp_path / "a.npy", np.int32, 2), range(2)))


@pytest.mark.parametrize("zip64", [False, True])
def test_members_are_found_whatever_their_local_header_holds(tmp_path: Path, zip64: bool) -> None:
    """zip64 puts its sizes into an extra field of the local header, which the central one has not; odd names and a
    foreign extra field shift the data to odd addresses."""
    path, arrays = tmp_path / "a.zip", {}
    with zipfile.ZipFile(path, "w") as archive:
        for i, name in enumerate(("0.npy", "a/longer name.npy", "ä.npy")):
            info = zipfile.ZipInfo(name)
            info.extra = b"\x99\x99\x03\x00abc" * i
            arrays[name] = np.arange(10 + i, dtype=np.int32).reshape(-1, 1)
            with archive.open(info, "w", force_zip64=zip64) as member:
                np.save(member, arrays[name])
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            member = open_array(path, np.int32, 1, member=info.filename, span=member_span(path, info))
            found = np.empty(member.shape, np.int32)
            member.read(0, found)
            np.testing.assert_array_equal(found, arrays[info.filename])


def test_a_damaged_local_header(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez(path, **{"0": np.zeros((3, 1), np.int32)})
    content = bytearray(path.read_bytes())
    content[0:2] = b"XX"
    path.write_bytes(content)
    with zipfile.ZipFile(path) as archive, pytest.raises(ValueError, match=r"\[0.npy\].*damaged"):
        member_span(path, archive.infolist()[0])


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((4, 2), np.int64), "expected dtype int32, found int64"),
        (np.zeros((4, 2), ">i4"), "expected dtype int32, found >i4"),
        (np.zeros((4, 3), np.int32), r"expected shape \(N, 2\) with N > 0, found \(4, 3\): use this flag"),
        (np.zeros(4, np.int32), r"found \(4,\)"),
        (np.zeros((0, 2), np.int32), r"found \(0, 2\)"),
        (np.asfortranarray(np.ones((4, 2), np.int32)), "expected C order"),
    ],
)
def test_other_arrays_are_refused(tmp_path: Path, array: np.ndarray, message: str) -> None:
    np.save(tmp_path / "a.npy", array)
    with pytest.raises(ValueError, match=message) as caught:
        open_array(tmp_path / "a.npy", np.int32, 2, fix="use this flag")
    assert "a.npy" in str(caught.value)


@pytest.mark.parametrize(("keep", "message"), [(-1, "truncated: expected 32 bytes.*found 31"), (50, "not a .npy")])
def test_a_truncated_file(tmp_path: Path, keep: int, message: str) -> None:
    np.save(tmp_path / "a.npy", np.zeros((4, 2), np.int32))
    (tmp_path / "a.npy").write_bytes((tmp_path / "a.npy").read_bytes()[:keep])
    with pytest.raises(ValueError, match=message):
        map_array(tmp_path / "a.npy", np.int32, 2)


def test_a_file_that_is_cut_short_under_the_reader(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    np.save(path, np.arange(8, dtype=np.int32).reshape(4, 2))
    array, out = open_array(path, np.int32, 2), np.zeros((2, 2), np.int32)
    array.read(2, out)
    np.testing.assert_array_equal(out, [[4, 5], [6, 7]])
    path.write_bytes(path.read_bytes()[:-4])
    array.read(0, out)
    with pytest.raises(ValueError, match=r"a.npy is truncated: it ends at byte 156"):
        array.read(2, out)


@pytest.mark.parametrize("at_once", [True, False])
def test_rows_of_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: bool) -> None:
    """Rows are read by one system call, and where the system has none: the same rows, and the same error."""
    if not at_once:
        monkeypatch.setattr("dlrm_bench.dlrm.data.npy.read_ranges", lambda *ranges: np.zeros(len(ranges[3]), np.int64))
    arrays = [
        np.arange(start, start + 40 * columns, dtype=np.int32).reshape(40, columns)
        for start, columns in enumerate((3, 1))
    ]
    for i, array in enumerate(arrays):
        np.save(tmp_path / f"{i}.npy", array)
    rows = RowFiles([open_array(tmp_path / f"{i}.npy", np.int32, array.shape[1]) for i, array in enumerate(arrays)])
    memory = np.full(200, 255, np.uint8)
    rows.read(11, 9, memory, np.array([8, 140]))
    np.testing.assert_array_equal(memory[8:116].view(np.int32).reshape(9, 3), arrays[0][11:20])
    np.testing.assert_array_equal(memory[140:176].view(np.int32)[:, None], arrays[1][11:20])
    assert (np.delete(memory, np.r_[8:116, 140:176]) == 255).all()
    os.truncate(tmp_path / "1.npy", 128 + 4 * 19)
    with pytest.raises(ValueError, match=r"1.npy is truncated: it ends at byte 204 but was longer"):
        rows.read(11, 9, memory, np.array([8, 140]))


def test_a_file_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    np.save(tmp_path / "a.npy", np.zeros((4, 2), np.int32))
    array = open_array(tmp_path / "a.npy", np.int32, 2)
    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(ValueError, match=r"a.npy cannot be read \(Input/output error\): check the disk"):
        array.read(0, np.zeros((4, 2), np.int32))


def test_a_read_that_comes_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads come in pieces, as from network file systems, or beyond 2 GB."""
    read = os.preadv
    monkeypatch.setattr(
        os, "preadv", lambda fd, buffers, offset: read(fd, [memoryview(buffers[0]).cast("B")[:7]], offset)
    )
    rows = np.arange(20, dtype=np.int32).reshape(10, 2)
    np.save(tmp_path / "a.npy", rows)
    out = np.zeros((9, 2), np.int32)
    open_array(tmp_path / "a.npy", np.int32, 2).read(1, out)
    np.testing.assert_array_equal(out, rows[1:])


def test_other_files_are_refused(tmp_path: Path) -> None:
    long_header = b"\x93NUMPY\x02\x00" + (20_000).to_bytes(4, "little") + b" " * 20_000
    for content in (b"", b"no array at all", long_header):
        (tmp_path / "a.npy").write_bytes(content)
        with pytest.raises(ValueError, match=r"not a .npy array") as raised:
            map_array(tmp_path / "a.npy", np.int32, 2)
        assert "allow_pickle" not in str(raised.value)
        assert "\n" not in str(raised.value)
    assert "its header is too long" in str(raised.value)


@pytest.mark.parametrize(("place", "damage"), [(8, 40), (21, 44)])
def test_a_damaged_header_is_refused(tmp_path: Path, place: int, damage: int) -> None:
    """In its length or its text, where numpy's parser ends in errors of Python's own."""
    path = tmp_path / "a.npy"
    np.save(path, np.zeros((5, 3), np.int32))
    content = bytearray(path.read_bytes())
    content[place] = damage
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"a.npy is not a .npy array \(.*copy or generate it again") as raised:
        open_array(path, np.int32, 3)
    assert "\n" not in str(raised.value)
