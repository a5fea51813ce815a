"""Yambda's own format of events, flat/*/multi_event.parquet, written from made events."""

from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from dlrm_bench.dlrm.dlrmv4.data.cache_writer import Events
from dlrm_bench.dlrm.dlrmv4.data.limits import LISTEN

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
