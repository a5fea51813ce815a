"""Moves whole rows to their shuffled positions: scatters them to buckets on disk, then gathers bucket by bucket.

A row is 40 words of 32 bits (13 dense float32, 26 ids, the label) and, in a bucket, a 41st: its place in the bucket.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dlrm_bench.dlrm.dcnv2.data.raw_tsv import DENSE_FIELDS, HASH_FIELDS

COLUMNS = DENSE_FIELDS + HASH_FIELDS + 1
BUCKET_ROWS = 1 << 23
"""Rows per bucket; gathering a bucket takes 160 bytes of memory per row, and some more while a day's part of it is
read."""

Words = NDArray[np.uint32]


def bucket_file(folder: Path, bucket: int) -> Path:
    """Returns the path of one source's rows for a bucket."""
    return folder / f"bucket_{bucket}.rows"


def scatter(folder: Path, rows: Words, destinations: NDArray[np.uint32]) -> None:
    """Appends rows [n, COLUMNS] to the buckets of their destinations [n], in `folder`."""
    buckets = (destinations // np.uint32(BUCKET_ROWS)).astype(np.uint16)
    order = np.argsort(buckets, kind="stable")  # Radix sort, for 16 bits.
    placed = np.empty((len(rows), COLUMNS + 1), dtype=np.uint32)
    placed[:, :COLUMNS] = rows[order]
    placed[:, COLUMNS] = (destinations % np.uint32(BUCKET_ROWS))[order]
    start = 0
    for bucket, end in enumerate(np.cumsum(np.bincount(buckets))):
        if end > start:
            with bucket_file(folder, bucket).open("ab") as file:
                file.write(placed[start:end].data)
        start = end


def gather(folders: list[Path], bucket: int, total_rows: int) -> Words:
    """Returns the rows of a bucket [rows, COLUMNS] in their final order, from the folders of all sources."""
    rows = np.empty((min(BUCKET_ROWS, total_rows - bucket * BUCKET_ROWS), COLUMNS), dtype=np.uint32)
    found = 0
    for folder in folders:
        if bucket_file(folder, bucket).exists():
            placed = np.fromfile(bucket_file(folder, bucket), dtype=np.uint32).reshape(-1, COLUMNS + 1)
            rows[placed[:, COLUMNS]] = placed[:, :COLUMNS]
            found += len(placed)
    assert found == len(rows), f"bucket {bucket} has {found} of {len(rows)} rows"
    return rows


def gather_range(folders: list[Path], start: int, stop: int, total_rows: int) -> Iterator[Words]:
    """Yields the final rows [start, stop) of the whole shuffle, in pieces of one bucket each."""
    for bucket in range(start // BUCKET_ROWS, -(-stop // BUCKET_ROWS)):
        first = bucket * BUCKET_ROWS
        yield gather(folders, bucket, total_rows)[max(start - first, 0) : stop - first]


def remove_gathered(folders: list[Path], stop: int) -> None:
    """Removes the buckets whose rows are all below `stop`."""
    for folder in folders:
        for bucket in range(stop // BUCKET_ROWS):
            bucket_file(folder, bucket).unlink(missing_ok=True)
