"""The index of windows equals the scan that it spares."""

import dataclasses
import resource
import shutil
from pathlib import Path

import numpy as np
import pytest

from dlrm_bench.dlrm.dlrmv4.data import plain, windows
from dlrm_bench.dlrm.dlrmv4.data.cache import Cache
from dlrm_bench.dlrm.dlrmv4.data.windows import WindowIndex, paths, prepare_windows


def test_windows_are_the_references(cache, answers):
    index = prepare_windows(cache)
    assert len(index) == len(answers["windows"])
    for number, expected in enumerate(answers["windows"]):
        assert index.anchors_of(number) == len(expected)
        assert index.select(number, np.arange(len(expected))).tolist() == expected
        assert index.select(number, np.arange(len(expected))[::3]).tolist() == expected[::3]


@pytest.mark.parametrize("seconds", [5, 40_000, 10**9])
def test_windows_of_any_length_are_the_plain_ones(cache, tmp_path, seconds):
    folder = shutil.copytree(cache.folder, tmp_path / cache.folder.name)
    limits = dataclasses.replace(cache.limits, window_seconds=seconds)
    other = dataclasses.replace(cache, folder=folder, limits=limits)
    index = prepare_windows(other)
    assert len(index) == plain.num_windows(other)
    filled = np.flatnonzero(index.windows[:, 1])
    assert index.windows[:, 1].sum() == len(cache.positions)
    for number in filled[:: max(1, len(filled) // 40)].tolist():
        assert (
            index.select(number, np.arange(index.anchors_of(number))).tolist() == plain.window(other, number).tolist()
        )


def test_a_prepared_index_is_opened_and_anothers_refused(cache, tmp_path):
    folder = shutil.copytree(
        cache.folder,
        tmp_path / cache.folder.name,
        ignore=lambda _, names: [n for n in names if "s.npy" in n and "windows" in n],
    )
    copy = Cache.open(folder)
    with pytest.raises(ValueError, match="prepare the index"):
        WindowIndex.open(copy)
    prepare_windows(copy)
    windows_path = paths(folder, copy.limits)[1]
    time = windows_path.stat().st_mtime_ns
    prepare_windows(copy)
    assert windows_path.stat().st_mtime_ns == time
    np.save(windows_path, np.zeros((2, 2), dtype=np.int64))
    with pytest.raises(ValueError, match="has 0 anchors"):
        WindowIndex.open(copy)


@pytest.mark.parametrize(
    ("name", "place", "value", "message"),
    [
        ("ranges", (0, 0), -1, "ranges that begin at anchor -1"),
        ("ranges", (-1, 0), 10**6, "ranges that begin at anchor 1000000, and the cache has"),
        ("ranges", (-1, 0), None, "ranges that begin"),
        ("ranges", (-1, 1), -3, "ranges that begin"),
        ("windows", (0, 0), 1, "does not divide the .* ranges"),
        ("windows", (-1, 0), 10**6, "does not divide the .* ranges"),
    ],
)
def test_a_damaged_index_is_not_opened(cache, tmp_path, name, place, value, message):
    """value: None for the first number that is no anchor's."""
    folder = shutil.copytree(cache.folder, tmp_path / cache.folder.name)
    copy = Cache.open(folder)
    prepare_windows(copy)
    (path,) = folder.glob(f"{name}_*.npy")
    array = np.load(path)
    array[place] = len(copy.positions) if value is None else value
    np.save(path, array)
    with pytest.raises(ValueError, match=rf"windows_.*{message}.*: delete it and prepare it again"):
        WindowIndex.open(copy)


@pytest.mark.parametrize("value", [(10**6, 0), (-(10**6), 0), (0, 10**6)])
def test_damage_within_the_index_names_its_file(cache, tmp_path, value):
    folder = shutil.copytree(cache.folder, tmp_path / cache.folder.name)
    copy = Cache.open(folder)
    prepare_windows(copy)
    (path,) = folder.glob("ranges_*.npy")
    ranges, windows = np.load(path), prepare_windows(copy).windows
    window = int(np.flatnonzero(windows[1:-1, 1])[0]) + 1
    ranges[windows[window, 0]] = value
    np.save(path, ranges)
    index = WindowIndex.open(copy)
    with pytest.raises(ValueError, match=rf"{path}: the ranges of window {window} are damaged"):
        index.select(window, np.arange(index.anchors_of(window)))


def without_index(cache: Cache, tmp_path: Path) -> Cache:
    unwanted = shutil.ignore_patterns("ranges_*", "windows_*")
    return Cache.open(shutil.copytree(cache.folder, tmp_path / cache.folder.name, ignore=unwanted))


def kill(*_):
    raise KeyboardInterrupt


def test_an_index_has_one_writer(cache, tmp_path, monkeypatch):
    copy = without_index(cache, tmp_path)

    def meanwhile(*_):
        with pytest.raises(ValueError, match=f"{copy.folder}: another process prepares the index"):
            prepare_windows(copy)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(windows, "_fill", meanwhile)
        with pytest.raises(KeyboardInterrupt):
            prepare_windows(copy)
    index = prepare_windows(copy)
    assert [list(copy.folder.glob(f"*.{end}")) for end in ("partial", "lock")] == [[], []]
    assert index.windows.tobytes() == prepare_windows(cache).windows.tobytes()


def test_a_writer_that_is_killed_leaves_the_ranges_that_are_read(cache, tmp_path, monkeypatch):
    """A run maps them; where the file system has no locks, another process may have begun before the run's was done."""
    copy = without_index(cache, tmp_path)
    read = prepare_windows(copy).ranges
    expected = read.tobytes()
    paths(copy.folder, copy.limits)[1].unlink()
    with monkeypatch.context() as patch:
        patch.setattr(windows, "_fill", kill)
        with pytest.raises(KeyboardInterrupt):
            prepare_windows(copy)
    assert read.tobytes() == expected


def test_a_disk_that_fills_up_leaves_no_index(cache, tmp_path):
    folder = without_index(cache, tmp_path).folder
    many = dataclasses.replace(cache, folder=folder, limits=dataclasses.replace(cache.limits, window_seconds=500))
    windows_path = paths(folder, many.limits)[1]
    most, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    prepare_windows(many)
    size = windows_path.stat().st_size
    assert size > paths(folder, many.limits)[0].stat().st_size + 100
    windows_path.unlink()
    resource.setrlimit(resource.RLIMIT_FSIZE, (size - 100, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            prepare_windows(many)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    assert not windows_path.exists()


def test_data_without_anchors_is_refused(cache, tmp_path):
    empty = dataclasses.replace(cache, folder=tmp_path, positions=np.empty(0, dtype=np.int64))
    with pytest.raises(ValueError, match="has no anchors"):
        prepare_windows(empty)
