"""Checks a folder of DLRMv4's data: the cache, its index of windows, and the maps of items.

Each finding names a file and the fix. Every value is read, in pieces, and checked: users and times are in order, ids
within the maps and the benchmark's tables, flags follow from types and played ratios, and anchors follow from the
limits. A missing index of windows, as in MLCommons' download, is written first, and removed if files are damaged.
--mlperf also compares counts and checksums with MLPerf's own files, which takes as long as reading 227 GB twice; --fast
checks headers and lengths only.
"""

import hashlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dlrm_bench.dlrm.data.check import CheckConfig, run_check
from dlrm_bench.dlrm.data.npy import COPY_AGAIN
from dlrm_bench.dlrm.dlrmv4.data.cache import Cache, find_cache
from dlrm_bench.dlrm.dlrmv4.data.generate import read_generated
from dlrm_bench.dlrm.dlrmv4.data.item_maps import ItemMaps
from dlrm_bench.dlrm.dlrmv4.data.limits import LIKE, LISTEN, LISTEN_PLUS_PERCENT, Limits, Rows
from dlrm_bench.dlrm.dlrmv4.data.mlperf_checksums import (
    CACHE,
    EVAL_SAMPLES,
    EVENTS,
    MD5,
    SHA256,
    TRAIN_SAMPLES,
    WINDOWS,
)
from dlrm_bench.dlrm.dlrmv4.data.raw_events import EVENT_TYPES
from dlrm_bench.dlrm.dlrmv4.data.windows import WindowIndex, paths, prepare_windows

PIECE = 4_000_000


@dataclass(frozen=True, slots=True)
class CheckedCache:
    """The result of a check."""

    findings: list[str]
    events: int
    anchors: int

    @property
    def counts(self) -> str:
        """Events and anchors, in words."""
        return f"{self.events} events, {self.anchors} anchors"


def check(config: CheckConfig) -> CheckedCache:
    """Checks a folder; a defect of its files is a finding, not an error."""
    findings: list[str] = []
    try:
        cache = Cache.open(find_cache(config.directory))
        maps = ItemMaps.open(config.directory)
        windows_path = paths(cache.folder, cache.limits)[1]
        prepared = windows_path.exists()
        index = prepare_windows(cache)
    except ValueError as error:
        return CheckedCache([str(error)], 0, 0)
    findings += _count_findings(config, cache, index)
    if not config.fast:
        findings += _user_findings(cache)
        if not findings:  # the next checks rely on the users' bounds
            findings += _event_findings(cache, maps)
            findings += _index_findings(cache, index)
    if findings and not prepared:
        windows_path.unlink(missing_ok=True)  # It may be of damaged times, whose file will be replaced.
    if config.mlperf:
        findings += _checksum_findings(config.directory)
    return CheckedCache(findings, len(cache), len(cache.positions))


def _count_findings(config: CheckConfig, cache: Cache, index: WindowIndex) -> Iterator[str]:
    """Against MLPerf's counts, or those of generated.json."""
    found = (len(cache), int(index.windows[:-1, 1].sum()), index.anchors_of(len(index) - 1), len(index))
    names = ("events", "samples of training", "samples of evaluation", "windows")
    expected, source = None, "MLPerf's"
    if config.mlperf:
        expected = (EVENTS, TRAIN_SAMPLES, EVAL_SAMPLES, WINDOWS)
        if cache.limits != Limits():
            yield f"{cache.folder} has {cache.limits}, MLPerf {Limits()}: preprocess without --history"
    elif generated := read_generated(config.directory):
        expected = (generated.events, generated.train_anchors, generated.eval_anchors, generated.windows)
        source = "generated.json's"
    for name, mine, theirs in zip(names, found, expected or found, strict=True):
        if mine != theirs:
            yield f"{cache.folder} has {mine} {name}, not {source} {theirs}: {COPY_AGAIN}"


def _user_findings(cache: Cache) -> Iterator[str]:
    """Whether user_start, user_end and unique_uids divide all events among users."""
    start, end, uids = cache.user_start, cache.user_end, cache.unique_uids
    if not (len(uids) and uids[0] >= 0 and (np.diff(uids) > 0).all() and uids[-1] == len(start) - 1):
        yield f"{cache.folder}/unique_uids.npy: users are not ascending up to user_start's last: {COPY_AGAIN}"
        return
    bounds = np.append(start[uids], len(cache))
    if bounds[0] != 0 or (np.diff(bounds) <= 0).any() or (end[uids] != bounds[1:]).any():
        yield f"{cache.folder}: user_start and user_end do not divide the events among users: {COPY_AGAIN}"
    empty = np.delete(np.arange(len(start)), uids)
    if (start[empty] != -1).any() or (end[empty] != -1).any():
        yield f"{cache.folder}: user_start or user_end is not -1 for a user without events: {COPY_AGAIN}"
    if uids[-1] >= Rows().uid:
        yield (
            f"{cache.folder}/unique_uids.npy has user {uids[-1]}, and MLPerf's table uid has {Rows().uid} rows: choose "
            "data of fewer users, or train with more rows (--model.context-rows)"
        )


def _event_findings(cache: Cache, maps: ItemMaps) -> Iterator[str]:
    """Yields a line for each column with an impossible event, and for each file of anchors that differ from the
    limits'."""
    seen: set[str] = set()
    anchors = 0
    for first in range(0, len(cache), PIECE):
        piece = slice(first, min(first + PIECE, len(cache)))
        for name, wrong in _wrong_events(cache, len(maps), piece).items():
            if name not in seen and wrong.any():
                seen.add(name)
                event = first + int(np.argmax(wrong))
                yield f"{cache.folder}/{name}.npy is wrong at event {event}: {COPY_AGAIN}"
        rank = np.arange(piece.start, piece.stop) - cache.user_start[cache.uid[piece]] if not seen else None
        if rank is None:
            continue
        expected = first + np.flatnonzero((rank >= cache.limits.min_history) & (cache.event_type[piece] == LISTEN))
        found = slice(anchors, anchors + len(expected))
        anchors += len(expected)
        for name, column, values in (
            ("positions", cache.positions, expected),
            ("anchor_ts", cache.anchor_timestamp, cache.timestamp[expected]),
        ):
            if name not in seen and not np.array_equal(column[found], values):
                seen.add(name)
                file = f"{cache.folder}/{name}_{cache.limits.anchors_name}.npy"
                yield f"{file} lacks the anchors of events from {first} on: {COPY_AGAIN}"
    if not seen and anchors != len(cache.positions):
        yield f"{cache.folder} has {len(cache.positions)} anchors, and its events make {anchors}: {COPY_AGAIN}"


def _wrong_events(cache: Cache, items: int, piece: slice) -> dict[str, NDArray[np.bool_]]:
    """Returns for each column which events of a piece are impossible."""
    uid, item, time = cache.uid[piece], cache.item[piece], cache.timestamp[piece]
    kind, ratio, organic = cache.event_type[piece], cache.played_ratio[piece], cache.is_organic[piece]
    uid_before, time_before = (_before(column, piece) for column in (cache.uid, cache.timestamp))
    listen, plus = kind == LISTEN, ratio >= LISTEN_PLUS_PERCENT
    inside = (uid >= 0) & (uid < len(cache.user_start))
    own = np.where(inside, uid, 0)
    position = np.arange(piece.start, piece.stop)
    return {
        "flat_uid": ~inside
        | (uid < uid_before)
        | (position < cache.user_start[own])
        | (position >= cache.user_end[own]),
        "flat_item_ids": (item < 0) | (item >= items),
        "flat_timestamps": (time < 0) | (time >= 1 << 31) | ((uid == uid_before) & (time < time_before)),
        "flat_event_types": (kind < 0) | (kind >= len(EVENT_TYPES)),
        "flat_played_ratio": ~np.isfinite(ratio) | (ratio < 0),
        "flat_is_organic": (organic != 0) & (organic != 1),
        "flat_is_listen_plus": cache.is_listen_plus[piece] != (listen & plus),
        "flat_is_like": cache.is_like[piece] != (kind == LIKE),
        "flat_is_skip": cache.is_skip[piece] != (listen & ~plus),
    }


def _before(column: NDArray[np.int64], piece: slice) -> NDArray[np.int64]:
    """Returns for each event of a piece the value of the previous event, -1 for the very first."""
    if piece.start:
        return column[piece.start - 1 : piece.stop - 1]
    return np.append(-1, column[: piece.stop - 1])


def _index_findings(cache: Cache, index: WindowIndex) -> Iterator[str]:
    """Whether the index lists each anchor in its window."""
    start = int(cache.anchor_timestamp.min())
    for window in range(len(index)):
        count = index.anchors_of(window)
        for first in range(0, count, PIECE):
            anchors = index.select(window, np.arange(first, min(first + PIECE, count)))
            inside = (cache.anchor_timestamp[anchors] - start) // cache.limits.window_seconds == window
            if not inside.all() or (np.diff(anchors) <= 0).any():
                yield f"{cache.folder}: the index of windows is wrong in window {window}: delete it, and check again"
                return


def _checksum_findings(root: Path) -> Iterator[str]:
    for folder, sums, algorithm in ((root / CACHE, SHA256, "sha256"), (root, MD5, "md5")):
        for name, expected in sums.items():
            path = folder / name
            if not path.is_file():
                yield f"{path} does not exist: MLPerf's data has it"
                continue
            with path.open("rb") as file:
                found = hashlib.file_digest(file, algorithm).hexdigest()
            if found != expected:
                yield f"{path} is not MLPerf's: {algorithm} {found}, not {expected}: {COPY_AGAIN}"


def main(args: Sequence[str] | None = None) -> int:
    """Command line entry; returns the exit status, 2 if there are findings."""
    return run_check(CheckConfig, check, args, __doc__)


if __name__ == "__main__":
    sys.exit(main())
