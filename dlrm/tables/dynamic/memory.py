"""The memory that rows with ids take; needs no torch."""

MOST_PLACES = 1 << 29
"""Rows of a rank: the slots of their map, up to four a row, are numbered with 31 bits."""


def bytes_of(places: int, columns: int) -> int:
    """Returns the bytes of a rank's memory for so many rows: fp32 weights, a state, three numbers of 32 bits, and the
    slots of the map, an id, a place and, for --evict-rows, a flag each."""
    slots = 1 << (2 * places - 1).bit_length()
    return places * 4 * (columns + 1 + 3) + slots * (8 + 4 + 1)
