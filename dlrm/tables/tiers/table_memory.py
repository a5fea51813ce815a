"""The part of a rank's table rows that the device holds, set by --table-memory; the others are in host memory.

A row is its weights and its optimizer state, which move together.

A user may give single tables a share of their own (hbm:SHARE of --constraints): exactly that share of the table's rows
is on the device at any time, and the other tables share the rest of the device's rows. With 1 the whole table is on the
device, with 0 all of it is used in host memory; in between, rows move as they do in the other tables, but exchange
places with rows of the same table only.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dlrm_bench.dlrm.tables.plan.constraints import FLAG
from dlrm_bench.dlrm.tables.plan.plan import Shard
from dlrm_bench.dlrm.tables.tables import Tables

_GB = 10**9
_LEAST_ROWS = 2
"""Minimum number on the device of the rows that tables without a share of their own have on a rank, if there are as
many: one that may leave, and one to compare it with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRows:
    """Rows of one rank on the device."""

    of_shards: tuple[int | None, ...]
    """Rows of each shard of a table with a share of its own; None for other shards."""
    shared: int
    """Rows of all other shards together."""
    lacking: int
    """Number of rows by which --table-memory is too small: no placement if above 0."""

    @property
    def total(self) -> int:
        """Rows of all shards."""
        return self.shared + sum(rows for rows in self.of_shards if rows is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableMemory:
    """Device memory for the rows of each rank: either a share of its rows, or bytes."""

    share: float | None = None
    """Share of the rank's rows, above 0 and at most 1."""
    device_bytes: int | None = None
    """Maximum number of bytes for weights and optimizer state of the rank's rows."""
    counts: Path | None = None
    """File of counts (row_counts.py) that determines the rows initially on the device; None: assumed rates, see
    row_rates.assumed_rates."""
    shares: Mapping[int, float] = field(default_factory=dict)
    """Share of the rows of single tables, by table number."""

    def __post_init__(self) -> None:
        assert (self.share is None) != (self.device_bytes is None), "a share or bytes"

    @classmethod
    def parse(cls, text: str) -> "TableMemory":
        """Returns the value of --table-memory: "0.5" is a share of rows, "60GB" are gigabytes (10^9 bytes) per rank.
        ValueError names the flag if it is neither."""
        number = text.strip().removesuffix("GB")
        in_bytes = number != text.strip()
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if not (0 < value < math.inf) or (value > 1 and not in_bytes):
            raise ValueError(
                f"--table-memory {text} is neither a share of rows above 0 and up to 1, such as 0.5, nor a number of "
                "gigabytes per rank, such as 60GB"
            )
        return cls(device_bytes=int(value * _GB)) if in_bytes else cls(share=value)

    def most_rows(self, rows: int, row_bytes: int) -> int:
        """Returns the maximum number of a rank's `rows` rows, of `row_bytes` bytes each, that are on the device."""
        if self.share is not None:
            return math.floor(self.share * rows)
        assert self.device_bytes is not None
        return min(rows, self.device_bytes // row_bytes)

    def own_rows(self, table: int, rows: int) -> int | None:
        """Returns how many of `rows` rows of a table, or of its shard, its share keeps on the device; None without a
        share."""
        return math.floor(self.shares[table] * rows) if table in self.shares else None

    def device_rows(self, shards: Sequence[Shard], tables: Tables, row_bytes: int) -> DeviceRows:
        """Returns the rows on the device of a rank with these shards, in rows of `row_bytes` bytes."""
        rows = [shard.rows(tables) for shard in shards]
        own = tuple(self.own_rows(shard.table, n) for shard, n in zip(shards, rows, strict=True))
        others = sum(n for n, of_share in zip(rows, own, strict=True) if of_share is None)
        left = self.most_rows(sum(rows), row_bytes) - sum(n for n in own if n is not None)
        lacking = max(0, min(_LEAST_ROWS, others) - left)
        return DeviceRows(of_shards=own, shared=max(0, min(left, others)), lacking=lacking)

    def checked_rows(self, rank: int, shards: Sequence[Shard], tables: Tables, row_bytes: int) -> DeviceRows:
        """Returns `device_rows` of a rank's shards; ValueError, naming the flags, if --table-memory is too small."""
        found, rows = self.device_rows(shards, tables, row_bytes), sum(shard.rows(tables) for shard in shards)
        if found.lacking == 0:
            return found
        most = self.most_rows(rows, row_bytes)
        needed = most + found.lacking
        asked = {shard.table: self.shares[shard.table] for shard in shards if shard.table in self.shares}
        words = " ".join(f"{tables.names[table]}=hbm:{share:g}" for table, share in asked.items())
        least = f"give a share of at least {min(1.0, _up(needed / rows)):.3g}, or {_up(needed * row_bytes / _GB):.3g}GB"
        raise ValueError(
            f"--table-memory leaves rank {rank} {most} of {rows} table rows on the device, which must hold at least "
            + (f"{needed}, by {FLAG} {words}: {least}, or lower those shares" if asked else f"{needed}: {least}")
        )

    def capacity(self, device_bytes: int, host_bytes: int) -> int:
        """Returns the bytes of tables and optimizer state that a rank can hold in both tiers, of which `device_bytes`
        and `host_bytes` are available; no more than these if single tables have shares."""
        if self.device_bytes is not None:
            return min(self.device_bytes, device_bytes) + host_bytes
        assert self.share is not None
        in_host = math.inf if self.share == 1 else host_bytes / (1 - self.share)
        on_device = device_bytes + host_bytes if self.shares else device_bytes / self.share
        return int(min(on_device, in_host))


def _up(number: float) -> float:
    """Returns a number that is not below `number` even after rounding to three digits."""
    return number * 1.006
