"""Yambda's own format of events, flat/*/multi_event.parquet: read, and written from made events."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from dlrm_bench.dlrm.data.npy import COPY_AGAIN
from dlrm_bench.dlrm.dlrmv4.data.cache_writer import Events
from dlrm_bench.dlrm.dlrmv4.data.limits import LISTEN

if TYPE_CHECKING:
    import polars as pl

COLUMNS = ("uid", "timestamp", "item_id", "is_organic", "played_ratio_pct", "event_type")
EVENT_TYPES = ("listen", "like", "dislike", "unlike", "undislike")
"""Types of events, in the order of the cache's numbers."""
DAY, SESSION_GAP = 86_400, 1_800
RAW_FILE = Path("raw") / "5b" / "multi_event.parquet"
LAST_DAY_USERS = 50
"""Interval of users that have an event on the last day, which preprocessing cuts off."""


class RawWriter:
    """Writes events piece by piece, and then a last day; a context manager that can be disabled.

    Preprocessing sets the end of training to a day and half an hour before the last event, so the first user's last
    event is exactly that long after `end`.
    """

    def __init__(self, out: Path, wanted: bool, end: int) -> None:
        self.path = out / RAW_FILE
        self._end, self._wanted = end, wanted
        self._parts: list[Path] = []
        if wanted:
            self.path.parent.mkdir(parents=True, exist_ok=True)

    def append(self, events: Events) -> None:
        """Events of whole users, after those before."""
        if not self._wanted:
            return
        import polars as pl  # here: most data sets are generated without

        listen = events.event_type == LISTEN
        # Tracks' lengths are no feature of the benchmark; an item has its own.
        columns: dict[str, Any] = {
            "uid": events.uid.astype(np.uint32),
            "timestamp": events.timestamp.astype(np.uint32),
            "item_id": events.item.astype(np.uint32),
            "is_organic": events.is_organic.astype(np.uint8),
            "played_ratio_pct": events.played_ratio.astype(np.uint16),
            "track_length_seconds": (60 + events.item * 7_919 % 300).astype(np.uint32),
            "event_type": pl.Series(events.event_type.astype(np.uint32)).replace_strict(
                dict(enumerate(EVENT_TYPES)), return_dtype=pl.Enum(EVENT_TYPES)
            ),
        }
        table = pl.DataFrame(columns).with_columns(
            pl.when(pl.Series(listen)).then(pl.col(name)) for name in ("played_ratio_pct", "track_length_seconds")
        )
        late = table.unique("uid", keep="last", maintain_order=True).filter(pl.col("uid") % LAST_DAY_USERS == 1)
        late = late.with_columns(
            timestamp=(self._end + DAY + SESSION_GAP - 5 * (pl.col("uid") - 1)).cast(pl.UInt32),
            event_type=pl.lit("listen", pl.Enum(EVENT_TYPES)),
            played_ratio_pct=pl.lit(100, pl.UInt16),
            track_length_seconds=pl.lit(200, pl.UInt32),
        ).filter(pl.col("timestamp") >= self._end + SESSION_GAP)
        part = self.path.with_name(f"part_{len(self._parts)}.parquet")
        pl.concat([table, late]).sort("uid", "timestamp", maintain_order=True).write_parquet(part)
        self._parts.append(part)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._wanted and kind is None:
            import polars as pl

            pl.scan_parquet(self._parts).sink_parquet(self.path)
        for part in self._parts:
            part.unlink()


@dataclass(slots=True, eq=False)
class RawEvents:
    """Yambda's file of events, and what a first look at it finds."""

    path: Path
    frame: "pl.LazyFrame"
    times: tuple[int, int]
    """Those of the first and the last event, in seconds."""
    uid: NDArray[np.int64]
    """All users, ascending."""
    counts: NDArray[np.int64]
    """Number of events of each user."""

    @classmethod
    def open(cls, path: Path) -> "RawEvents":
        """Reads the columns of users and times; ValueError names the file if it cannot be, or lacks a column."""
        import polars as pl

        with reading(path):
            frame = pl.scan_parquet(path)
            _require_columns(path, frame)
            bounds = frame.select(pl.col("timestamp").min().alias("first"), pl.col("timestamp").max().alias("last"))
            times, *_ = bounds.collect(engine="streaming").rows()
            users = frame.group_by("uid").agg(pl.len()).sort("uid").collect(engine="streaming")
        if times[1] is None:
            raise ValueError(f"{path} has no events: {COPY_AGAIN}")
        if users["uid"].null_count():
            raise ValueError(f"{path}: column uid has nulls: {COPY_AGAIN}")
        return cls(path, frame, times, *(users[name].to_numpy().astype(np.int64) for name in ("uid", "len")))

    def pieces(self, most: int) -> Iterator["pl.DataFrame"]:
        """Yields the events of users in turn, up to `most` at a time, but at least one user's."""
        import polars as pl

        ends = np.cumsum(self.counts)
        first = 0
        while first < len(self.uid):
            before = int(ends[first - 1]) if first else 0
            end = max(first + 1, int(np.searchsorted(ends, before + most, side="right")))
            with reading(self.path):
                users = pl.col("uid").is_between(int(self.uid[first]), int(self.uid[end - 1]))
                piece = self.frame.filter(users).select(COLUMNS).collect()
            yield piece
            first = end


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns errors of reading raw events into a ValueError that names their file; errors of writing name OUT."""
    import polars as pl

    try:
        yield
    except (OSError, pl.exceptions.PolarsError) as error:
        raise ValueError(f"{path} cannot be preprocessed ({error}): {COPY_AGAIN}") from error


def _require_columns(path: Path, events: "pl.LazyFrame") -> None:
    missing = sorted(set(COLUMNS) - set(events.collect_schema().names()))
    if missing:
        raise ValueError(f"{path} has no column {missing[0]}: is it Yambda's flat multi_event.parquet?")
