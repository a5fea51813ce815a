"""Artist and album of every item, from shared_metadata/{artist,album}_item_mapping.parquet."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dlrm_bench.dlrm.data.npy import COPY_AGAIN
from dlrm_bench.dlrm.dlrmv4.data.limits import Rows

FOLDER = "shared_metadata"
MORE_EVENT_ROWS = "choose data of fewer ids, or train with more rows (--model.event-rows)"
"""The fix for ids beyond a table of events."""


@dataclass(frozen=True, slots=True, eq=False)
class ItemMaps:
    """Artist and album of items 0 to I - 1, int32 [I] each; 0 where an item has none."""

    artist: NDArray[np.int32]
    album: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.artist)

    @classmethod
    def open(cls, root: Path, rows: Rows | None = None) -> "ItemMaps":
        """Opens the maps of a folder of data. Of several rows of an item the last one counts, as in the reference.

        I is one more than the largest item of either file. ValueError names the file that is missing or damaged, or
        whose ids are not within `rows`, by default MLPerf's tables.
        """
        pairs = [read_pairs(root, name) for name in ("artist", "album")]
        items = 1 + max(int(item.max(initial=0)) for item, _ in pairs)
        rows = rows or Rows()
        if items > rows.item:
            raise ValueError(
                f"{root / FOLDER} knows item {items - 1}, and table item_id has {rows.item} rows: {MORE_EVENT_ROWS}"
            )
        maps = []
        for (item, value), name, limit in zip(pairs, ("artist", "album"), (rows.artist, rows.album), strict=True):
            if not 0 <= value.min(initial=0) <= value.max(initial=0) < limit:
                raise ValueError(
                    f"{map_path(root, name)}: an id lies outside of table {name}_id's {limit} rows: {MORE_EVENT_ROWS}"
                )
            column = np.zeros(items, dtype=np.int32)
            column[item] = value  # in order: the last row of an item wins
            maps.append(column)
        return cls(*maps)


def map_path(root: Path, name: str) -> Path:
    """The parquet file of items' artists or albums."""
    return root / FOLDER / f"{name}_item_mapping.parquet"


def read_pairs(root: Path, name: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Items and their artists or albums, as the file has them; ValueError if it cannot be read or has nulls."""
    import polars as pl  # here: samples are built without it

    path = map_path(root, name)
    try:
        table = pl.read_parquet(path, columns=["item_id", f"{name}_id"])
    except (OSError, pl.exceptions.PolarsError) as error:
        raise ValueError(f"{path} cannot be read ({error}): {COPY_AGAIN}") from error
    if table.null_count().sum_horizontal().item():
        raise ValueError(f"{path} has rows without an id: {COPY_AGAIN}")
    item = table["item_id"].to_numpy().astype(np.int64)
    if item.min(initial=0) < 0:
        raise ValueError(f"{path} has a negative item: {COPY_AGAIN}")
    return item, table[f"{name}_id"].to_numpy().astype(np.int64)


def write_maps(root: Path, artist: NDArray[np.int32], album: NDArray[np.int32]) -> None:
    """Writes both files from columns by item, [I]; items with 0 get no row, except the last item, which gives their
    number."""
    import polars as pl

    (root / FOLDER).mkdir(parents=True, exist_ok=True)
    for name, column in (("artist", artist), ("album", album)):
        item = np.flatnonzero(column)
        if len(column) > 1 and (len(item) == 0 or item[-1] != len(column) - 1):
            item = np.append(item, len(column) - 1)
        table = pl.DataFrame({f"{name}_id": column[item].astype(np.uint32), "item_id": item.astype(np.uint32)})
        table.write_parquet(map_path(root, name))
