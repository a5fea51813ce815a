"""Yambda's parquet files to the reference's cache: RAW to OUT, byte for byte, in bounded memory.

RAW (the first path) holds raw/5b/multi_event.parquet (Yambda's flat/5b/multi_event.parquet) and shared_metadata/ with
{artist,album}_item_mapping.parquet, as the reference's download leaves them. OUT (the second path) gets processed_5b/
with hstu_cache_L*/, item_popularity.npy and split_meta.json, and shared_metadata/; OUT may be RAW.

The cache contains the events of the `train_days` before the last `test_days` and a gap, by user and then by time.
Events of the same user and second keep the order of the file; the reference's sort does not specify this order, and
keeps it if the file is sorted already, as Yambda's is. The reference's parquet files of sessions, test events and their
index are not written, because its training does not read them once there is a cache.

Users are read some millions of events at a time, by the statistics of the file's row groups. If the file is sorted by
user, as Yambda's is, each row group is read about once; otherwise each piece reads the whole file. Peak memory with
Yambda's items is 1.75 GB (measured) with pieces of 8 million events (--chunk-events) and 0.85 GB with 2 million, plus
24 bytes per user. The reference takes 190 GB.

Disk space is checked first: 40 bytes per event, and 16 for each event of a user after the first L (as many as samples,
or some more). Where OUT has a complete cache of the same limits and days, only what is missing beside it is written.
"""

import json
import os
import shutil
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import tyro
from numpy.typing import NDArray

from dlrm_bench.dlrm.data.npy import COPY_AGAIN
from dlrm_bench.dlrm.dlrmv4.data.cache import READY, Cache
from dlrm_bench.dlrm.dlrmv4.data.cache_writer import CacheWriter, Events
from dlrm_bench.dlrm.dlrmv4.data.item_maps import FOLDER, ItemMaps, map_path
from dlrm_bench.dlrm.dlrmv4.data.limits import POOLS, Limits
from dlrm_bench.dlrm.dlrmv4.data.raw_events import DAY, EVENT_TYPES, RAW_FILE, SESSION_GAP, RawEvents, reading
from dlrm_bench.dlrm.dlrmv4.data.windows import prepare_windows
from dlrm_bench.dlrm.runtime.command_line import exit_status
from dlrm_bench.dlrm.runtime.parsed import options_of

if TYPE_CHECKING:
    import polars as pl

PROCESSED = "processed_5b"
POPULARITY, SPLIT = "item_popularity.npy", "split_meta.json"
MAPS = ("artist", "album")
EVENT_BYTES, ANCHOR_BYTES = 40, 16
"""Bytes of the cache's columns for an event, and of its files of anchors for a sample."""


@dataclass(kw_only=True, slots=True, frozen=True)
class PreprocessConfig:
    """Yambda's parquet files to the reference's cache."""

    raw: Annotated[Path, tyro.conf.Positional]
    """Directory with raw/5b/multi_event.parquet and shared_metadata/."""
    out: Annotated[Path, tyro.conf.Positional]
    """Directory to write; it may be RAW."""
    history: int = 4086
    """Maximum number of events in a history, at least one of each of three pools, and of a user's events before the
    first anchor."""
    train_days: int = 300
    """Days of training."""
    gap_minutes: int = 30
    """Minutes between training and test."""
    test_days: int = 1
    """Number of last days, which training excludes."""
    chunk_events: int = 8_000_000
    """Number of events read at a time; those of one user are read together."""

    def __post_init__(self) -> None:
        for name, least in (("history", POOLS), ("train_days", 1), ("chunk_events", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"--{name.replace('_', '-')} is {getattr(self, name)}: choose {least} or more")
        if min(self.gap_minutes, self.test_days) < 0:
            raise ValueError(f"--gap-minutes {self.gap_minutes} --test-days {self.test_days}: choose 0 or more")

    @property
    def limits(self) -> Limits:
        """Limits of the cache: the benchmark's, or in proportion to the history, as `generate` has them."""
        return Limits.scaled(self.history)

    @property
    def processed(self) -> Path:
        """Folder of the cache's folder, and of the files beside it."""
        return self.out / PROCESSED

    @property
    def folder(self) -> Path:
        """Folder of the cache."""
        return self.processed / self.limits.cache_name

    @property
    def has_cache(self) -> bool:
        """Whether there is a complete cache."""
        return (self.folder / READY).exists()


@dataclass(slots=True)
class Split:
    """Bounds of training and test, in seconds, and the counts within them."""

    t_min: int
    t_max: int
    train_start: int
    train_end: int
    test_start: int
    test_end: int
    train_events: int = 0
    test_events: int = 0
    sessions: int = 0
    users: int = 0

    @classmethod
    def of(cls, config: PreprocessConfig, t_min: int, t_max: int) -> "Split":
        """Bounds as the reference sets them: from the last event backwards."""
        test_start = t_max - config.test_days * DAY
        train_end = test_start - 60 * config.gap_minutes
        return cls(t_min, t_max, train_end - config.train_days * DAY, train_end, test_start, t_max)

    def as_dict(self, config: PreprocessConfig) -> dict[str, Any]:
        """split_meta.json of the reference."""
        return {
            "size": "5b",
            "t_min": self.t_min,
            "t_max": self.t_max,
            "train_start": self.train_start,
            "train_end": self.train_end,
            "test_start": self.test_start,
            "test_end": self.test_end,
            "train_days": config.train_days,
            "gap_minutes": config.gap_minutes,
            "test_days": config.test_days,
            "session_gap_seconds": SESSION_GAP,
            "num_train_events": self.train_events,
            "num_test_events": self.test_events,
            "num_sessions": self.sessions,
            "num_users": self.users,
        }


def preprocess(config: PreprocessConfig) -> Cache:
    """Writes the cache and its index of windows, and opens it. Where there is a complete cache of these limits and
    days, only what is missing beside it is written.

    ValueError names the impossible file or column, the cache of other limits or days, or OUT if it cannot be written.
    """
    maps = _folder_of_maps(config)
    items = len(ItemMaps.open(maps))
    try:
        if config.has_cache:
            Cache.open(config.folder, config.limits)
        if not (config.has_cache and _has_rest(config)):
            _write_cache_and_rest(config, items)
        _require_items(config, items, len(np.load(config.processed / POPULARITY)))
        if maps != config.out:
            _copy_maps(config)
        cache = Cache.open(config.folder)
        prepare_windows(cache)
    except OSError as error:
        raise ValueError(
            f"{config.out} cannot be written ({error}; {_free_bytes(config.out) / 1e9:.1f} GB are free): make room, or "
            "choose another OUT"
        ) from error
    return cache


def _write_cache_and_rest(config: PreprocessConfig, items: int) -> None:
    """Writes the files beside the cache, and the cache unless it is complete. items: those that the maps know."""
    raw = RawEvents.open(config.raw / RAW_FILE)
    split = Split.of(config, *raw.times)
    writing: AbstractContextManager[CacheWriter | None] = nullcontext()
    if not config.has_cache:
        _require_space(config, raw.counts)
        writing = CacheWriter(config.folder, config.limits)
    popularity = np.zeros(0, dtype=np.int64)
    with writing as writer:
        for piece in raw.pieces(config.chunk_events):
            with reading(raw.path):
                kept = training_events(raw.path, piece, split)
            _require_items(config, items, int(kept.item.max(initial=-1)) + 1)
            if writer is not None:
                writer.append(kept)
            counts = np.bincount(kept.item, minlength=len(popularity))
            counts[: len(popularity)] += popularity
            popularity = counts
        if writer is None and split.train_events != len(Cache.open(config.folder)):
            raise ValueError(
                f"{config.folder} is not of the {split.train_events} events of training in {raw.path}: delete it, or "
                "choose another OUT"
            )
        np.save(config.processed / POPULARITY, popularity)
        partial = config.processed / f"{SPLIT}.partial"
        partial.write_text(json.dumps(split.as_dict(config), indent=2))
        os.replace(partial, config.processed / SPLIT)


def training_events(path: Path, piece: "pl.DataFrame", split: Split) -> Events:
    """Events of training among all events of some users, sorted; adds to the split's counts."""
    for name in ("uid", "timestamp", "item_id", "is_organic", "event_type"):
        if piece[name].null_count():
            raise ValueError(f"{path}: column {name} has nulls: {COPY_AGAIN}")
    uid, time = (piece[name].to_numpy().astype(np.int64) for name in ("uid", "timestamp"))
    item = piece["item_id"].to_numpy().astype(np.int64)
    if len(item) and min(uid.min(), item.min()) < 0:
        raise ValueError(f"{path} has negative ids: {COPY_AGAIN}")
    order = np.flatnonzero((time >= split.train_start) & (time < split.train_end))
    uid_steps, time_steps = np.diff(uid[order]), np.diff(time[order])
    if ((uid_steps < 0) | ((uid_steps == 0) & (time_steps < 0))).any():  # Yambda's are in order
        order = order[np.lexsort((time[order], uid[order]))]  # stable
    ratio = piece["played_ratio_pct"].fill_null(0).to_numpy().astype(np.float32)
    kept = Events(
        uid=uid[order],
        item=item[order],
        timestamp=time[order],
        event_type=_event_types(path, piece)[order],
        is_organic=piece["is_organic"].to_numpy().astype(np.int8)[order],
        played_ratio=np.nan_to_num(ratio[order], nan=0.0),
    )
    users = np.unique(kept.uid)
    in_test = (time >= split.test_start) & (time < split.test_end)
    split.test_events += int(np.isin(uid[in_test], users).sum())
    split.train_events += len(order)
    split.users += len(users)
    new_user = np.diff(kept.uid, prepend=-1) != 0
    split.sessions += int((new_user | (np.diff(kept.timestamp, prepend=0) > SESSION_GAP)).sum())
    return kept


def _event_types(path: Path, piece: "pl.DataFrame") -> NDArray[np.int64]:
    """The cache's numbers, of names or of numbers."""
    import polars as pl

    column = piece["event_type"]
    if not column.dtype.is_integer():
        names = column.cast(pl.Utf8)
        unknown = sorted(set(names.unique()) - set(EVENT_TYPES))
        if unknown:
            raise ValueError(f"{path}: unknown event_type {unknown[0]}: known are {', '.join(EVENT_TYPES)}")
        column = names.replace_strict({name: number for number, name in enumerate(EVENT_TYPES)}, return_dtype=pl.Int64)
    return column.to_numpy().astype(np.int64)


def _require_space(config: PreprocessConfig, counts: NDArray[np.int64]) -> None:
    """Raises ValueError if OUT has less room than 40 bytes per event, and 16 for each after a user's first `history`
    events. counts: events of each user.

    Those after the first are samples if they are listens, as nearly all of Yambda's are; the others' 16 bytes are more
    than the index of windows takes. The files of an earlier attempt are overwritten.
    """
    samples = int(np.maximum(counts - config.limits.min_history, 0).sum())
    needed = EVENT_BYTES * int(counts.sum()) + ANCHOR_BYTES * samples
    free = _free_bytes(config.out) + sum(path.stat().st_size for path in config.folder.glob("*"))
    if needed > free:
        raise ValueError(
            f"{config.out} has {free / 1e9:.1f} GB free, and about {needed / 1e9:.1f} GB are needed for "
            f"{counts.sum() / 1e6:.1f} million events: make room, or choose another OUT"
        )


def _free_bytes(out: Path) -> int:
    place = next(path for path in (out.resolve(), *out.resolve().parents) if path.exists())
    return shutil.disk_usage(place).free


def _folder_of_maps(config: PreprocessConfig) -> Path:
    """Returns OUT if it has both maps of items, else RAW."""
    return config.out if all(map_path(config.out, name).exists() for name in MAPS) else config.raw


def _require_items(config: PreprocessConfig, items: int, named: int) -> None:
    """Raises ValueError if events name an item that the maps lack, as the reference does. named: one more than the
    largest item of the events."""
    if items < named:
        raise ValueError(
            f"{config.raw / RAW_FILE} has item {named - 1}, and the maps in {_folder_of_maps(config) / FOLDER} know "
            f"items up to {items - 1}: they are not of one data set: {COPY_AGAIN}"
        )


def _has_rest(config: PreprocessConfig) -> bool:
    """Whether the files beside a complete cache are there; ValueError if they are of other days."""
    path = config.processed / SPLIT
    if not (path.exists() and (config.processed / POPULARITY).exists()):
        return False
    try:
        split = json.loads(path.read_text())
        known = {name: split[name] for name in ("train_days", "gap_minutes", "test_days")}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} cannot be read ({error!r}): delete it, and it is written again") from error
    for name, value in known.items():
        if value != getattr(config, name):
            raise ValueError(
                f"{config.folder} was made with --{name.replace('_', '-')} {value}, not {getattr(config, name)}: "
                "delete it, or choose another OUT"
            )
    return True


def _copy_maps(config: PreprocessConfig) -> None:
    """Copies the maps to OUT; each appears complete or not at all."""
    for name in MAPS:
        target = map_path(config.out, name)
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_suffix(".partial")
        shutil.copy(map_path(config.raw, name), partial)
        os.replace(partial, target)


def main(args: Sequence[str] | None = None) -> int:
    """Command line entry; returns the exit status."""
    return exit_status(lambda: _run(args))


def _run(args: Sequence[str] | None) -> int:
    config = options_of(PreprocessConfig, args, "data preprocess", __doc__)
    there = config.has_cache
    cache = preprocess(config)
    print(
        f"{config.out}: {len(cache)} events of {len(cache.unique_uids)} users, {len(cache.positions)} anchors"
        + (" (the cache was there already)" if there else "")
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
