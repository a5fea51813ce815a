"""Rows of the seven cross tables: xxh64, seed 0, of the keys as little-endian int64, modulo the table's rows.

The hash is XXH64 of the xxHash specification, version 0.1.1 (github.com/Cyan4973/xxHash, doc/xxhash_spec.md), for the
two lengths of input that crosses have, 16 and 24 bytes. Both are below 32 bytes, so its four accumulators play no part.
"""

import numpy as np
from numpy.typing import NDArray

from dlrm_bench.dlrm.dlrmv4.data.compiled import compiled

PRIME_1 = np.uint64(0x9E3779B185EBCA87)
PRIME_2 = np.uint64(0xC2B2AE3D27D4EB4F)
PRIME_3 = np.uint64(0x165667B19E3779F9)
PRIME_4 = np.uint64(0x85EBCA77C2B2AE63)
PRIME_5 = np.uint64(0x27D4EB2F165667C5)


@compiled
def _rotated(value: np.uint64, bits: int) -> np.uint64:
    return np.uint64((value << np.uint64(bits)) | (value >> np.uint64(64 - bits)))


@compiled
def _with_lane(state: np.uint64, key: int) -> np.uint64:
    """The state after eight more bytes."""
    lane = _rotated(np.uint64(key) * PRIME_2, 31) * PRIME_1
    return np.uint64(_rotated(state ^ lane, 27) * PRIME_1 + PRIME_4)


@compiled
def _avalanched(state: np.uint64) -> np.uint64:
    state = (state ^ (state >> np.uint64(33))) * PRIME_2
    state = (state ^ (state >> np.uint64(29))) * PRIME_3
    return np.uint64(state ^ (state >> np.uint64(32)))


@compiled
def hash_of_2(first: int, second: int) -> np.uint64:
    """xxh64, seed 0, of two int64."""
    return _avalanched(_with_lane(_with_lane(PRIME_5 + np.uint64(16), first), second))


@compiled
def hash_of_3(first: int, second: int, third: int) -> np.uint64:
    """xxh64, seed 0, of three int64."""
    return _avalanched(_with_lane(_with_lane(_with_lane(PRIME_5 + np.uint64(24), first), second), third))


@compiled
def context_rows(
    uid: int,
    item: int,
    artist: int,
    album: int,
    hour: int,
    organic: int,
    rows: NDArray[np.uint64],
    out: NDArray[np.int32],
) -> None:
    """Fills out [8] with the rows of Samples.context for one candidate; `rows` [7] are Rows.crosses."""
    out[0] = uid
    out[1] = hash_of_2(uid, artist) % rows[0]
    out[2] = hash_of_2(uid, album) % rows[1]
    out[3] = hash_of_2(uid, hour) % rows[2]
    out[4] = hash_of_2(item, hour) % rows[3]
    out[5] = hash_of_2(artist, hour) % rows[4]
    out[6] = hash_of_2(uid, organic) % rows[5]
    out[7] = hash_of_3(uid, artist, hour) % rows[6]
