"""The memory that rows with ids take; needs no torch."""

from dataclasses import dataclass

MOST_PLACES = 1 << 29
"""Maximum number of places of a rank: the slots of the map, up to four per place, are numbered with 31 bits."""


@dataclass(frozen=True, slots=True)
class RowPlaces:
    """Memory of a rank for those rows of its tables that have been named."""

    count: int
    """Rows that there is memory for."""
    evicts: bool
    """Whether rows that were not named for long lose their places to new ones."""


def bytes_of(places: int, columns: int, states: int = 1, unnamed: int = 0, raw_ids: bool = False) -> int:
    """Returns the bytes of a rank's memory for `places` rows: fp32 weights, `states` columns of optimizer state, three
    int32 values per place and four more while the rows are saved (DynamicRows.entries), and the slots of the map, each
    with an id, a place and, for --evict-rows, a flag.

    unnamed: number of additional rows from which an evaluation of pooled tables reads unnamed rows. raw_ids: whether
    ids are raw, each with its table in its slot.
    """
    slots = 1 << (2 * places - 1).bit_length()
    return (places + unnamed) * 4 * (columns + states) + places * 4 * (3 + 4) + slots * (8 + 4 + 1 + 4 * raw_ids)
