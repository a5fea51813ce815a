"""The embedding tables of a model, as needed for sharding, exchanges, lookups and updates."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """Tables of one width, each with one feature of a fixed number of ids per sample."""

    names: tuple[str, ...]
    """Name of each table's feature: the keys of a KJT, in table order."""
    rows: tuple[int, ...]
    """Rows of each table; if ids are raw, their expected number, which bounds nothing."""
    columns: int
    """Columns of every table."""
    hot: tuple[int, ...]
    """Number of ids that a sample names in each table (multi-hot size)."""
    scale: float = 1.0
    """Factor of --model.table-scale on the rows, for errors that suggest another one."""
    pooled: bool = True
    """Whether some pipeline does not split each table by rows over all ranks. The rows of such tables need not be
    summed: HSTU's tables are whole, and of sequences."""
    raw_ids: bool = False
    """Whether ids are int64 numbers of any value instead of row numbers."""
    whole: bool = False
    """Whether every pipeline of the model keeps each table on one rank, which `owners` names, without a planner."""
    advice: str | None = None
    """Advice for smaller tables, in errors; None for --model.table-scale."""

    @property
    def count(self) -> int:
        """Number of tables."""
        return len(self.rows)

    @property
    def id_bytes(self) -> int:
        """Bytes of an id in batches and exchanges."""
        return 8 if self.raw_ids else 4

    @property
    def ids_per_sample(self) -> int:
        """Number of ids that a sample names in all tables."""
        return sum(self.hot)

    @property
    def bytes(self) -> int:
        """Bytes of all tables in fp32, without optimizer state."""
        return sum(self.rows) * self.columns * 4

    def owners(self, ranks: int) -> list[int]:
        """Returns the rank of each table, if they are whole: round-robin, in table order."""
        return [table % ranks for table in range(self.count)]
