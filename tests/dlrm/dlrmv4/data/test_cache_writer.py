"""The writer's files are the reference's, byte for byte."""

import json

import numpy as np
import pytest

from dlrm_bench.dlrm.dlrmv4.data.cache import Cache
from dlrm_bench.dlrm.dlrmv4.data.cache_writer import CacheWriter, ColumnWriter, Events
from dlrm_bench.dlrm.dlrmv4.data.limits import Limits
from tests.dlrm.dlrmv4.data.conftest import REFERENCE_CACHE, reference_events


def part(events: Events, first: int, end: int) -> Events:
    return Events(**{name: getattr(events, name)[first:end] for name in Events.__dataclass_fields__})


@pytest.mark.parametrize("pieces", [1, 3])
def test_files_are_the_references(tmp_path, pieces):
    events = reference_events()
    users = np.flatnonzero(np.diff(events.uid, prepend=-1))
    ends = [*(users[2 * i] for i in range(1, pieces)), len(events.uid)]
    with CacheWriter(tmp_path, Limits(history=9, min_history=9)) as writer:
        for first, end in zip([0, *ends], ends, strict=False):
            writer.append(part(events, first, end))
        writer.append(part(events, 0, 0))
    names = sorted(path.name for path in REFERENCE_CACHE.iterdir())
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    for name in names:
        if name == "store_meta.json":
            meta = json.loads((tmp_path / name).read_text())
            assert meta.pop("limits") == {"history": 9, "min_history": 9, "scan": 20_000, "window_seconds": 86_400}
            assert meta == json.loads((REFERENCE_CACHE / name).read_text())
        else:
            assert (tmp_path / name).read_bytes() == (REFERENCE_CACHE / name).read_bytes(), name


def test_the_benchmarks_meta_file_is_the_references(tmp_path):
    with CacheWriter(tmp_path, Limits()) as writer:
        writer.append(reference_events())
    assert (tmp_path / "store_meta.json").read_bytes() == (REFERENCE_CACHE / "store_meta.json").read_bytes()


def test_a_lower_floor_has_its_own_anchors(tmp_path):
    limits = Limits(history=9, min_history=2)
    with CacheWriter(tmp_path / "hstu_cache_L9", limits) as writer:
        writer.append(reference_events())
    cache = Cache.open(tmp_path / "hstu_cache_L9")
    assert (tmp_path / "hstu_cache_L9" / "positions_L9_m2.npy").exists()
    ranks = cache.positions - cache.user_start[cache.uid[cache.positions]]
    assert ranks.min() == 2


def write_twice(writer: CacheWriter, events: Events) -> None:
    writer.append(events)
    writer.append(events)


def test_a_complete_cache_is_left_alone_and_a_failed_one_is_no_cache(tmp_path):
    with pytest.raises(ValueError, match="no events"), CacheWriter(tmp_path / "none", Limits()):
        pass
    twice = reference_events()
    with pytest.raises(AssertionError), CacheWriter(tmp_path / "failed", Limits()) as writer:
        write_twice(writer, twice)
    assert not (tmp_path / "failed" / "_READY").exists()
    with CacheWriter(tmp_path / "whole", Limits()) as writer:
        writer.append(reference_events())
    with pytest.raises(ValueError, match="holds a complete cache"):
        CacheWriter(tmp_path / "whole", Limits())


def test_a_folder_has_one_writer(tmp_path):
    limits = Limits(history=9, min_history=9)
    with CacheWriter(tmp_path, limits) as writer:
        with pytest.raises(ValueError, match=f"{tmp_path}: another process is generating here"):
            CacheWriter(tmp_path, limits)
        writer.append(reference_events())
        (tmp_path / "windows_L9_86400s.npy").touch()  # by a program that still has the previous cache open
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(path.name for path in REFERENCE_CACHE.iterdir())


def test_a_writer_that_failed_holds_no_lock(tmp_path):
    with pytest.raises(AssertionError), CacheWriter(tmp_path, Limits()) as writer:
        write_twice(writer, reference_events())
    with CacheWriter(tmp_path, Limits()) as writer:
        writer.append(reference_events())
    assert (tmp_path / "_READY").exists()


@pytest.mark.parametrize(("column", "value"), [("uid", 1), ("timestamp", 0)])
def test_events_out_of_order_are_caught(tmp_path, column, value):
    events = reference_events()
    getattr(events, column)[3] = value
    with pytest.raises(AssertionError), CacheWriter(tmp_path, Limits()) as writer:
        writer.append(events)


def test_columns_grow_as_numpy_saves_them(tmp_path):
    writer = ColumnWriter(tmp_path / "a.npy", np.int8)
    for _ in range(3):
        writer.append(np.arange(70, dtype=np.int8))
    writer.close()
    np.save(tmp_path / "b.npy", np.tile(np.arange(70, dtype=np.int8), 3))
    assert (tmp_path / "a.npy").read_bytes() == (tmp_path / "b.npy").read_bytes()
