"""The part of a rank's table rows that the device holds, set by --table-memory; the others are in host memory.

A row is its weights and its optimizer state, which move together.
"""

import math
from dataclasses import dataclass
from pathlib import Path

_GB = 10**9
LEAST_ROWS = 2
"""Minimum number of a rank's rows on the device: one that may leave, and one to compare it with."""


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

    def device_rows(self, rows: int, row_bytes: int) -> int:
        """Returns the number of a rank's rows, of `row_bytes` bytes each, that are on the device."""
        if self.share is not None:
            return math.floor(self.share * rows)
        assert self.device_bytes is not None
        return min(rows, self.device_bytes // row_bytes)

    def check_rows(self, rank: int, rows: int, row_bytes: int) -> None:
        """Raises ValueError, naming the flag, if the device would hold fewer than LEAST_ROWS of a rank's rows."""
        if self.device_rows(rows, row_bytes) < LEAST_ROWS:
            least = math.nextafter(LEAST_ROWS / rows, 2)
            raise ValueError(
                f"--table-memory leaves rank {rank} {self.device_rows(rows, row_bytes)} of {rows} table rows on the "
                f"device, which must hold at least {LEAST_ROWS}: give a share of at least {least:.2g}, or "
                f"{LEAST_ROWS * row_bytes / _GB:.2g}GB"
            )

    def capacity(self, device_bytes: int, host_bytes: int) -> int:
        """Returns the bytes of tables and optimizer state that a rank can hold in both tiers, of which `device_bytes`
        and `host_bytes` are available."""
        if self.device_bytes is not None:
            return min(self.device_bytes, device_bytes) + host_bytes
        assert self.share is not None
        in_host = math.inf if self.share == 1 else host_bytes / (1 - self.share)
        return int(min(device_bytes / self.share, in_host))
