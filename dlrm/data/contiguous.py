"""Contiguous ids: numbers the hashes of a feature in order of first appearance.

BinaryCriteoUtils.sparse_to_contiguous of torchrec.datasets.criteo does this with Python dictionaries over whole days in
memory. Here a feature's hashes arrive in pieces, and only one hash table grows: 8 bytes per slot, two to four slots per
distinct hash up to 2^29 slots (4.3 GB, enough for 400 million hashes; Criteo's largest feature has 293 million). numpy
has no hash table, and those of pandas, polars and Arrow cannot grow later; so this module implements open addressing
with linear probing, for all keys of a piece at once.
"""

import numpy as np
import polars as pl
from numpy.typing import NDArray

FIRST_ID = 2
INFREQUENT_ID = 1
"""The id of all hashes below a frequency threshold above 1; ids start at FIRST_ID with or without one."""

FEWEST_SLOTS = 1 << 10
FULL = 0.75  # Share of used slots at which the table grows.
GROW_PIECE = 1 << 22  # Slots moved at a time.

Hashes = NDArray[np.uint32]
Numbers = NDArray[np.uint32]


class Numbering:
    """Assigns numbers 1, 2, 3, ... to hashes, in order of first appearance."""

    def __init__(self) -> None:
        self._slots = np.zeros(FEWEST_SLOTS, dtype=np.uint64)  # hash << 32 | number; numbers are not 0, so 0 is empty
        self.distinct = 0
        """Numbers assigned so far."""

    def number(self, hashes: Hashes) -> Numbers:
        """Returns the numbers of hashes [n]; assigns the next number to each new hash."""
        numbers = self._find(hashes)
        new = np.flatnonzero(numbers == 0)
        if len(new):
            unseen = pl.Series(hashes[new]).unique(maintain_order=True).to_numpy()
            self._reserve(self.distinct + len(unseen))
            first = np.uint64(self.distinct + 1)
            self._insert((unseen.astype(np.uint64) << np.uint64(32)) | np.arange(len(unseen), dtype=np.uint64) + first)
            self.distinct += len(unseen)
            numbers[new] = self._find(hashes[new])
        return numbers

    def _find(self, hashes: Hashes) -> Numbers:
        """Returns the numbers [n] of hashes; 0 for unknown ones."""
        numbers = np.zeros(len(hashes), dtype=np.uint32)
        slots = self._home(hashes)
        entries = self._slots[slots]
        pending = np.arange(len(hashes))
        while True:
            matches = (entries >> np.uint64(32)).astype(np.uint32) == hashes[pending]
            numbers[pending[matches]] = entries[matches].astype(np.uint32)
            on = ~matches & (entries != 0)
            if not on.any():
                return numbers  # An empty slot that "matches" hash 0 has number 0 as well.
            pending, slots = pending[on], (slots[on] + 1) & (len(self._slots) - 1)
            entries = self._slots[slots]

    def _insert(self, entries: NDArray[np.uint64]) -> None:
        """Inserts entries of distinct hashes that are not in the table."""
        slots = self._home((entries >> np.uint64(32)).astype(np.uint32))
        while len(entries):
            empty = self._slots[slots] == 0
            self._slots[slots[empty]] = entries[empty]  # Of several entries for one slot, the last one stays.
            on = self._slots[slots] != entries
            entries, slots = entries[on], (slots[on] + 1) & (len(self._slots) - 1)

    def _reserve(self, count: int) -> None:
        """Grows the table to hold `count` hashes in all."""
        size = len(self._slots)
        while count > FULL * size:
            size *= 2
        if size > len(self._slots):
            old, self._slots = self._slots, np.zeros(size, dtype=np.uint64)
            for start in range(0, len(old), GROW_PIECE):
                piece = old[start : start + GROW_PIECE]
                self._insert(piece[piece != 0])

    def _home(self, hashes: Hashes) -> NDArray[np.int64]:
        """Returns the first slot to probe, by Fibonacci hashing (D. Knuth, The Art of Computer Programming, 6.4)."""
        shift = np.uint64(65 - len(self._slots).bit_length())
        return ((hashes.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> shift).astype(np.int64)


def ids_of_numbers(counts: NDArray[np.int64], frequency_threshold: int) -> NDArray[np.int32]:
    """Returns the id of each number of a Numbering, int32 [distinct + 1]; element 0 belongs to no hash.

    counts: [distinct + 1], number of occurrences of each number. Hashes that occur fewer than frequency_threshold times
    get INFREQUENT_ID, the others ids from FIRST_ID in order of first appearance.
    """
    frequent = counts >= frequency_threshold
    frequent[0] = False
    ids = np.cumsum(frequent, dtype=np.int32) + np.int32(FIRST_ID - 1)
    ids[~frequent] = INFREQUENT_ID
    return ids
