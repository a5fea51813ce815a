"""Crosses' hashes are those of the xxhash library."""

import struct

import numpy as np
import xxhash

from dlrm_bench.dlrm.dlrmv4.data.crosses import context_rows, hash_of_2, hash_of_3
from dlrm_bench.dlrm.dlrmv4.data.limits import Rows


def library(*keys: int) -> int:
    return xxhash.xxh64(struct.pack(f"<{len(keys)}q", *keys), seed=0).intdigest()


def test_hashes_are_the_librarys():
    rng = np.random.default_rng(1)
    extremes = [0, 1, -1, 2**63 - 1, -(2**63), 2**31, 255]
    keys = extremes + rng.integers(-(2**63), 2**63, 200).tolist() + rng.integers(0, 10**7, 200).tolist()
    for a, b, c in zip(keys, reversed(keys), keys[7:] + keys[:7], strict=True):
        assert int(hash_of_2(a, b)) == library(a, b)
        assert int(hash_of_3(a, b, c)) == library(a, b, c)


def test_each_row_of_context_has_its_own_keys():
    rows = Rows()
    out = np.empty(8, dtype=np.int32)
    uid, item, artist, album, hour, organic = 987_654, 9_000_001, 77, 3_000_000, 23, 1
    context_rows(uid, item, artist, album, hour, organic, np.array(rows.crosses, dtype=np.uint64), out)
    assert out.tolist() == [
        uid,
        library(uid, artist) % 100_000_000,
        library(uid, album) % 40_000_000,
        library(uid, hour) % 24_000_000,
        library(item, hour) % 40_000_000,
        library(artist, hour) % 32_000_000,
        library(uid, organic) % 2_000_000,
        library(uid, artist, hour) % 40_000_000,
    ]
