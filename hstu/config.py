"""Sizes of an HSTU ranking model and of its batches (Zhai et al. 2024, arXiv 2402.17152).

MLPerf's DLRMv4 trains such a model on Yambda-5b: 3 layers of 4 heads, width 512, 128 a head, 11 tables of 512 columns
with 293 million rows, histories of at most 4,086 events and one candidate.
"""

from dataclasses import dataclass

MEAN_HISTORY = 2660
"""Mean number of events in a history of Yambda-5b that is cut at 4,086; its distribution is not published."""


@dataclass(frozen=True)
class Table:
    """An embedding table. `per` says how many ids a sample has: one a "user", or one an "event" and one a candidate."""

    name: str
    rows: int
    per: str = "event"


@dataclass(frozen=True)
class HstuConfig:
    """What the model is and how its batches are drawn. Widths are in elements, lengths in tokens."""

    tables: tuple[Table, ...]
    width: int = 512
    """Columns of every table, and the width of a token."""
    layers: int = 3
    heads: int = 4
    head_width: int = 128
    """Width of queries, keys, values and gates of a head; a power of two from 16 on."""
    head_hidden: int = 256
    """Width of the hidden layer between a candidate's token and its logit."""
    bf16: bool = False
    """Whether the layers compute in bf16, with fp32 weights and residuals, as DLRMv4 is trained."""
    actions: int = 5
    """Kinds of events: listen, like, dislike and so on."""
    max_history: int = 4086
    mean_history: int = MEAN_HISTORY
    candidates: int = 1
    """Candidates to rank, of every sample."""

    def __post_init__(self) -> None:
        if self.head_width < 16 or self.head_width & (self.head_width - 1):
            raise ValueError(f"head_width is {self.head_width}: it must be a power of two from 16 on")
        if not 0 < self.mean_history <= self.max_history:
            raise ValueError(
                f"mean_history is {self.mean_history}: it must be from 1 to max_history, which is {self.max_history}"
            )
        wrong = [table.per for table in self.tables if table.per not in ("user", "event")]
        if wrong:
            raise ValueError(f'per is {wrong[0]!r}: it must be "user" or "event"')
        if not any(table.per == "event" for table in self.tables):
            raise ValueError('tables has none with per="event": without one, a history has no embeddings')

    @property
    def max_length(self) -> int:
        """Tokens of the longest sequence: a history and its candidates."""
        return self.max_history + self.candidates

    def of_user(self) -> list[Table]:
        return [table for table in self.tables if table.per == "user"]

    def of_event(self) -> list[Table]:
        return [table for table in self.tables if table.per == "event"]


def yambda_tables(rows: int) -> tuple[Table, ...]:
    """Returns 11 tables with about `rows` rows in all: five of an event's item and time, six of its user.

    The split is ours: DLRMv4's number of tables and their sum is kept, and that most rows belong to users crossed with
    what they listened to.
    """
    event = {"item": 0.032, "artist": 0.0044, "album": 0.0115, "hour": 168, "track_length": 1000}
    user = {
        "user": 0.0034,
        "user_artist": 0.42,
        "user_album": 0.35,
        "user_hour": 0.16,
        "user_length": 0.0187,
        "city": 1000,
    }
    return tuple(
        Table(name, max(1, round(share * rows)) if isinstance(share, float) else share, per)
        for per, shares in (("event", event), ("user", user))
        for name, share in shares.items()
    )


PRESETS = {
    "hstu-tiny": HstuConfig(
        tables=(Table("item", 500), Table("artist", 50), Table("user", 100, "user")),
        width=32,
        layers=2,
        heads=2,
        head_width=16,
        head_hidden=16,
        max_history=24,
        mean_history=14,
        candidates=2,
    ),
    "hstu-small": HstuConfig(tables=yambda_tables(30_000_000), bf16=True),
}
"""hstu-tiny: seconds on a CPU. hstu-small: DLRMv4's shapes, with a tenth of its rows, so that one GPU holds them."""
