"""Ranges that one system call reads equal those that seek and read give, whatever the range."""

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dlrm_bench.dlrm.data import linux_aio
from dlrm_bench.dlrm.data.linux_aio import read_ranges

SIZES = (70_000, 1, 5000)


@pytest.fixture(scope="module", autouse=True)
def asynchronous_io() -> None:
    if linux_aio._open_reader() is None:
        pytest.skip("this system has no asynchronous I/O for us")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[int]]:
    paths = [tmp_path_factory.mktemp("files") / f"{i}" for i in range(len(SIZES))]
    for i, (path, size) in enumerate(zip(paths, SIZES, strict=True)):
        path.write_bytes(np.random.default_rng(i).bytes(size))
    opened = [os.open(path, os.O_RDONLY) for path in paths]
    yield opened
    for file in opened:
        os.close(file)


def read(files: list[int], ranges: list[tuple[int, int, int]]) -> tuple[list[int], list[bytes]]:
    """Returns the number of bytes of each (file, offset, size) that were read, and the bytes."""
    which, offsets, sizes = np.array(ranges, dtype=np.int64).reshape(-1, 3).T
    memory = np.zeros(sizes.sum() + 1, dtype=np.uint8)
    starts = np.cumsum(sizes) - sizes
    done = read_ranges(np.array(files, np.uint32)[which], offsets, memory.ctypes.data + starts, sizes)
    return done.tolist(), [memory[a : a + n].tobytes() for a, n in zip(starts, np.maximum(done, 0), strict=True)]


def plain(files: list[int], ranges: list[tuple[int, int, int]]) -> tuple[list[int], list[bytes]]:
    found = [os.pread(files[which], size, offset) for which, offset, size in ranges]
    return [len(part) for part in found], found


one_range = st.tuples(st.integers(0, len(SIZES) - 1), st.integers(0, 80_000), st.integers(0, 80_000))


@given(ranges=st.lists(one_range, max_size=2 * linux_aio._Reader.CAPACITY + 3))
@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_equals_plain_reads(files: list[int], ranges: list[tuple[int, int, int]]) -> None:
    assert read(files, ranges) == plain(files, ranges)


def test_what_cannot_be_read(files: list[int], tmp_path: Path) -> None:
    """Neither it nor the ranges after it are read: the system takes requests in order, up to the first that it
    refuses."""
    with (tmp_path / "written").open("wb") as written:
        done, parts = read([*files, written.fileno()], [(0, 3, 50), (3, 0, 10), (2, 7, 60)])
    assert done[0] == 50
    assert max(done[1:]) <= 0
    assert parts[0] == os.pread(files[0], 50, 3)


def test_threads_at_once(files: list[int]) -> None:
    ranges = [(0, offset, 30_000) for offset in range(0, 40_000, 1000)]
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(lambda _: read(files, ranges) == plain(files, ranges), range(40)))


def test_threads_that_come_later_use_what_there_is(files: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    opened, open_reader = [], linux_aio._open_reader
    monkeypatch.setattr(linux_aio, "_idle", [])
    monkeypatch.setattr(linux_aio, "_open_reader", lambda: opened.append(open_reader()) or opened[-1])
    for _ in range(5):
        with ThreadPoolExecutor(1) as new_thread:
            assert new_thread.submit(read, files, [(0, 5, 20)]).result() == plain(files, [(0, 5, 20)])
    assert len(opened) == 1
    assert linux_aio._idle == opened


def test_a_forked_process_has_a_context_of_its_own(files: list[int]) -> None:
    ranges = [(0, 5, 20), (2, 0, 5000)]
    assert read(files, ranges) == plain(files, ranges)
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply(read, (files, ranges)) == plain(files, ranges)
    assert read(files, ranges) == plain(files, ranges)


def test_a_system_without_it_reads_nothing(files: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linux_aio, "_CALLS", {})
    monkeypatch.setattr(linux_aio, "_idle", [])
    assert read(files, [(0, 0, 10)]) == ([0], [b""])


def test_a_file_system_that_only_waits(files: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """It refuses the flag for reads of cached pages alone, as Linux does with an unknown flag."""
    monkeypatch.setattr(linux_aio, "_NOWAIT", 1 << 30)
    monkeypatch.setattr(linux_aio, "_idle", [])
    ranges = [(0, 5, 20), (2, 0, 5000)]
    assert read(files, ranges) == plain(files, ranges)
