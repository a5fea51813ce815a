"""Sizes of an HSTU ranking model and of its batches (Zhai et al. 2024, arXiv 2402.17152).

MLPerf's DLRMv4 trains such a model on Yambda-5b: 3 layers of 4 heads, width 512, 128 per head, 11 tables of 512 columns
with 293 million rows, histories of at most 4,086 events and one candidate.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

from dlrm_bench.dlrm.config import require
from dlrm_bench.dlrm.tables.tables import Tables
from dlrm_bench.dlrm.zoo.config import RandomData

MEAN_HISTORY = 2660
"""Mean number of events in a history of Yambda-5b truncated at 4,086; its distribution is not published."""


class Table(NamedTuple):
    """An embedding table as built."""

    name: str
    rows: int


@dataclass(kw_only=True, slots=True, frozen=True)
class HstuConfig:
    """Sizes of the model and of its batches. Widths are in elements, lengths in tokens."""

    event_rows: tuple[int, ...]
    """Number of rows of each event table, which has one id per event of a history and one per candidate. Before
    table_scale."""
    user_rows: tuple[int, ...] = ()
    """Number of rows of each user table, which has one id per sample. Before table_scale."""
    table_scale: float = 1.0
    """Factor on every table's number of rows, rounded up to at least one; values below 1 fit the tables on smaller
    GPUs."""
    width: int = 512
    """Columns of every table, and the width of a token."""
    layers: int = 3
    """Number of layers of attention."""
    heads: int = 4
    """Number of heads of each layer."""
    head_width: int = 128
    """Width of queries, keys, values and gates of a head; a power of two, at least 16."""
    head_hidden: int = 256
    """Width of the hidden layer between a candidate's token and its logit."""
    actions: int = 5
    """Number of kinds of events: listen, like, dislike and so on."""
    max_history: int = 4086
    """Number of events in the longest history."""
    mean_history: int = MEAN_HISTORY
    """Mean number of events in a history."""
    candidates: int = 1
    """Number of candidates to rank per sample."""

    def __post_init__(self) -> None:
        require(
            self.head_width >= 16 and not self.head_width & (self.head_width - 1),
            f"--model.head-width is {self.head_width}: it must be a power of two, at least 16",
        )
        require(
            0 < self.mean_history <= self.max_history,
            f"--model.mean-history is {self.mean_history}: it must be from 1 to --model.max-history, which is "
            f"{self.max_history}",
        )
        require(
            len(self.event_rows) > 0,
            "--model.event-rows: at least one event table is needed, because a history has no embeddings otherwise",
        )
        require(
            all(0 < rows < 2**31 for rows in (*self.event_rows, *self.user_rows)),
            "--model.event-rows, --model.user-rows: a table must have at least one row and fewer than 2^31",
        )
        require(0 < self.table_scale <= 1, f"--model.table-scale is {self.table_scale}: choose 0 < scale <= 1")
        for flag in ("layers", "heads", "head_hidden", "actions", "candidates"):
            require(getattr(self, flag) > 0, f"--model.{flag.replace('_', '-')} must be positive")
        require(
            self.width > 0 and self.width % 4 == 0,
            f"--model.width is {self.width}: FBGEMM's kernels need a multiple of 4",
        )

    @property
    def max_length(self) -> int:
        """Number of tokens of the longest sequence: a history and its candidates."""
        return self.max_history + self.candidates

    @property
    def tables(self) -> Tables:
        """The embedding tables as built; ids per sample are a mean."""
        events, users = self.of_event(), self.of_user()
        return Tables(
            names=tuple(table.name for table in (*events, *users)),
            rows=tuple(table.rows for table in (*events, *users)),
            columns=self.width,
            hot=(self.mean_history + self.candidates,) * len(events) + (1,) * len(users),
            scale=self.table_scale,
            whole=True,
        )

    def of_user(self) -> list[Table]:
        """Returns the user tables."""
        return self._scaled("user", self.user_rows)

    def of_event(self) -> list[Table]:
        """Returns the event tables."""
        return self._scaled("event", self.event_rows)

    def _scaled(self, kind: str, rows: tuple[int, ...]) -> list[Table]:
        return [Table(f"{kind}_{i}", max(1, math.ceil(count * self.table_scale))) for i, count in enumerate(rows)]


@dataclass(kw_only=True, slots=True, frozen=True)
class HstuData(RandomData):
    """Histories drawn at random."""

    padded: bool = False
    """Pad the events of a batch to one of a few numbers, the same on all ranks, for graphs and a trimmed input dist.
    The samples stay the same; losses differ by rounding, as sums over all tokens are then in another order."""


EVENT_SHARES = (0.032, 0.0044, 0.0115)
"""Shares of all rows: the tables of item, artist and album."""
USER_SHARES = (0.0034, 0.42, 0.35, 0.16, 0.0187)
"""Shares of all rows: the tables of the user, and of the user crossed with artist, album, hour and length of a
track."""
SMALL_ROWS = 30_000_000
"""Approximate number of rows of hstu-small. The split is ours: it keeps DLRMv4's number of tables, a tenth of their
sum, and most rows in tables of users crossed with another feature."""

TINY = HstuConfig(
    event_rows=(500, 50),
    user_rows=(100,),
    width=32,
    layers=2,
    heads=2,
    head_width=16,
    head_hidden=16,
    max_history=24,
    mean_history=14,
    candidates=2,
)
"""Trains in seconds on a CPU."""
SMALL = HstuConfig(
    event_rows=(*(round(share * SMALL_ROWS) for share in EVENT_SHARES), 168, 1000),  # and hour and length of a track
    user_rows=(*(round(share * SMALL_ROWS) for share in USER_SHARES), 1000),  # and the city
)
"""DLRMv4's shapes, with a tenth of its rows, so that one GPU holds them."""
