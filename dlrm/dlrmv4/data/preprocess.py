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
"""

import itertools
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import tyro
from numpy.typing import NDArray

from dlrm_bench.dlrm.data.npy import COPY_AGAIN
from dlrm_bench.dlrm.dlrmv4.data.cache import Cache
from dlrm_bench.dlrm.dlrmv4.data.cache_writer import CacheWriter, Events
from dlrm_bench.dlrm.dlrmv4.data.item_maps import ItemMaps, map_path
from dlrm_bench.dlrm.dlrmv4.data.limits import Limits
from dlrm_bench.dlrm.dlrmv4.data.raw_events import DAY, EVENT_TYPES, RAW_FILE, SESSION_GAP
from dlrm_bench.dlrm.dlrmv4.data.windows import prepare_windows
from dlrm_bench.dlrm.runtime.command_line import exit_status

if TYPE_CHECKING:
    import polars as pl

COLUMNS = ("uid", "timestamp", "item_id", "is_organic", "played_ratio_pct", "event_type")
PROCESSED = "processed_5b"


@dataclass(kw_only=True, slots=True, frozen=True)
class PreprocessConfig:
    """Yambda's parquet files to the reference's cache."""

    raw: Annotated[Path, tyro.conf.Positional]
    """Directory with raw/5b/multi_event.parquet and shared_metadata/."""
    out: Annotated[Path, tyro.conf.Positional]
    """Directory to write; it may be RAW."""
    history: int = 4086
    """Maximum number of events in a history, and of a user's events before the first anchor."""
    train_days: int = 300
    """Days of training."""
    gap_minutes: int = 30
    """Minutes between training and test."""
    test_days: int = 1
    """Number of last days, which training excludes."""
    chunk_events: int = 8_000_000
    """Number of events read at a time; those of one user are read together."""

    def __post_init__(self) -> None:
        for name in ("history", "train_days", "chunk_events"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} is {getattr(self, name)}: choose 1 or more")
        if min(self.gap_minutes, self.test_days) < 0:
            raise ValueError(f"--gap-minutes {self.gap_minutes} --test-days {self.test_days}: choose 0 or more")

    @property
    def limits(self) -> Limits:
        """Limits of the cache: the benchmark's, or in proportion to the history, as `generate` has them."""
        return Limits.scaled(self.history)


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
    """Writes the cache and its index of windows, and opens it.

    ValueError names the impossible file or column, or the complete cache that exists already.
    """
    import polars as pl

    path = config.raw / RAW_FILE
    folder = config.out / PROCESSED / config.limits.cache_name
    try:
        events = pl.scan_parquet(path)
        _require_columns(path, events)
        bounds = events.select(pl.col("timestamp").min().alias("first"), pl.col("timestamp").max().alias("last"))
        (t_min, t_max), *_ = bounds.collect(engine="streaming").rows()
        if t_max is None:
            raise ValueError(f"{path} has no events: {COPY_AGAIN}")
        split = Split.of(config, t_min, t_max)
        popularity = np.zeros(0, dtype=np.int64)
        with CacheWriter(folder, config.limits) as writer:
            for first, last in _pieces(path, events, config.chunk_events):
                piece = events.filter(pl.col("uid").is_between(first, last)).select(COLUMNS).collect()
                kept = training_events(path, piece, split)
                writer.append(kept)
                counts = np.bincount(kept.item, minlength=len(popularity))
                counts[: len(popularity)] += popularity
                popularity = counts
    except (OSError, pl.exceptions.PolarsError) as error:
        raise ValueError(f"{path} cannot be preprocessed ({error}): {COPY_AGAIN}") from error
    _write_rest(config, split, popularity)
    cache = Cache.open(folder)
    prepare_windows(cache)
    return cache


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


def _require_columns(path: Path, events: "pl.LazyFrame") -> None:
    missing = sorted(set(COLUMNS) - set(events.collect_schema().names()))
    if missing:
        raise ValueError(f"{path} has no column {missing[0]}: is it Yambda's flat multi_event.parquet?")


def _pieces(path: Path, events: "pl.LazyFrame", most: int) -> list[tuple[int, int]]:
    """Returns first and last user of each piece: users in turn, up to `most` events, but at least one user."""
    import polars as pl

    users = events.group_by("uid").agg(pl.len()).sort("uid").collect(engine="streaming")
    if users["uid"].null_count():
        raise ValueError(f"{path}: column uid has nulls: {COPY_AGAIN}")
    uid, ends = users["uid"].to_numpy().astype(np.int64), np.cumsum(users["len"].to_numpy().astype(np.int64))
    bounds = [0]
    while bounds[-1] < len(uid):
        before = int(ends[bounds[-1] - 1]) if bounds[-1] else 0
        bounds.append(max(bounds[-1] + 1, int(np.searchsorted(ends, before + most, side="right"))))
    return [(int(uid[first]), int(uid[end - 1])) for first, end in itertools.pairwise(bounds)]


def _write_rest(config: PreprocessConfig, split: Split, popularity: NDArray[np.int64]) -> None:
    """Writes the files beside the cache. ValueError where maps and events are not of one data set, as in the
    reference."""
    processed = config.out / PROCESSED
    np.save(processed / "item_popularity.npy", popularity)
    (processed / "split_meta.json").write_text(json.dumps(split.as_dict(config), indent=2))
    for name in ("artist", "album"):
        source, target = map_path(config.raw, name), map_path(config.out, name)
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)
    items = len(ItemMaps.open(config.out))
    if items < len(popularity):
        raise ValueError(
            f"{config.raw / RAW_FILE} has item {len(popularity) - 1}, and the maps know items up to {items - 1}: they "
            "are not of one data set"
        )


def main(args: Sequence[str] | None = None) -> int:
    """Command line entry; returns the exit status."""
    return exit_status(lambda: _run(args))


def _run(args: Sequence[str] | None) -> int:
    config = tyro.cli(
        PreprocessConfig,
        args=args,
        prog="dlrm-bench data preprocess",
        description=__doc__,
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    cache = preprocess(config)
    print(f"{config.out}: {len(cache)} events of {len(cache.unique_uids)} users, {len(cache.positions)} anchors")
    return 0


if __name__ == "__main__":
    sys.exit(main())
