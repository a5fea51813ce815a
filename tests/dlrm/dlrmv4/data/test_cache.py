"""The reference's cache is read as it is, and what is wrong with one is named."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from dlrm_bench.dlrm.dlrmv4.data.cache import Cache, find_cache, read_limits
from dlrm_bench.dlrm.dlrmv4.data.limits import Limits
from tests.dlrm.dlrmv4.data.conftest import REFERENCE, REFERENCE_CACHE


def test_reads_the_references_own_files():
    cache = Cache.open(REFERENCE_CACHE)
    assert cache.limits == Limits(history=9, min_history=9)
    assert len(cache) == 443
    assert cache.unique_uids.tolist() == [2, 3, 5, 6, 9, 11, 12]
    assert (cache.anchor_timestamp == cache.timestamp[cache.positions]).all()
    assert not cache.item.flags.writeable
    assert find_cache(REFERENCE) == REFERENCE_CACHE


def copy_of(tmp_path: Path) -> Path:
    return Path(shutil.copytree(REFERENCE_CACHE, tmp_path / "hstu_cache_L9"))


def in_header(path: Path, known: bytes, other: bytes) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:128].replace(known, other) + content[128:])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "_READY").unlink(), "half written"),
        (lambda f: (f / "flat_uid.npy").unlink(), r"flat_uid\.npy cannot be mapped"),
        (lambda f: (f / "flat_uid.npy").write_bytes((f / "flat_uid.npy").read_bytes()[:900]), "cannot be mapped"),
        (
            lambda f: in_header(f / "flat_uid.npy", b"}", b" "),
            r"flat_uid\.npy cannot be mapped \(its header is damaged",
        ),
        (lambda f: in_header(f / "flat_uid.npy", b"False", b"Fals("), "its header is damaged"),
        (lambda f: np.save(f / "flat_uid.npy", np.zeros(443, dtype=np.int32)), "expected int64"),
        (lambda f: np.save(f / "flat_uid.npy", np.zeros(4, dtype=np.int64)), "has 4 events, store_meta.json 443"),
        (lambda f: np.save(f / "positions_L9.npy", np.zeros(4, dtype=np.int64)), "positions and anchor_ts have 4"),
        (lambda f: (f / "store_meta.json").write_text("{"), "cannot be read"),
        (lambda f: (f / "store_meta.json").write_text("{}"), "does not count"),
    ],
)
def test_names_the_file_that_is_wrong(tmp_path, damage, message):
    folder = copy_of(tmp_path)
    damage(folder)
    with pytest.raises(ValueError, match=message):
        Cache.open(folder)


def test_refuses_other_limits_and_names_without_any(tmp_path):
    with pytest.raises(ValueError, match="was made for"):
        Cache.open(REFERENCE_CACHE, Limits())
    folder = copy_of(tmp_path).rename(tmp_path / "cache")
    with pytest.raises(ValueError, match="does not end in a history's length"):
        read_limits(folder)
    with pytest.raises(ValueError, match="found none; dlrm-bench data generate and data preprocess write one"):
        find_cache(tmp_path)


def test_a_folder_of_two_caches_is_refused(tmp_path):
    copy_of(tmp_path / "processed_5b" / "a").rename(tmp_path / "processed_5b" / "hstu_cache_L9")
    copy_of(tmp_path / "processed_5b" / "b").rename(tmp_path / "processed_5b" / "hstu_cache_L8")
    with pytest.raises(ValueError, match=r"found .*hstu_cache_L8, .*hstu_cache_L9; keep one of them"):
        find_cache(tmp_path)


def test_limits_of_a_cache_of_other_limits(cache, limits):
    assert cache.limits == limits


@pytest.mark.parametrize("wrong", [{"history": 0}, {"scan": 0}, {"window_seconds": 0}, {"min_history": -1}])
def test_limits_are_checked(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Limits(**wrong)
