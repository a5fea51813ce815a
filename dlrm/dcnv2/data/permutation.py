"""numpy's seeded shuffle of more rows than fit in memory: computes each row's destination block by block on disk.

The reference shuffles with np.random.seed(0); np.random.shuffle(array), which is, for i from n - 1 down to 1: draw j
from [0, i] and swap rows i and j. Even the permutation alone of 4.2 billion rows, in 32 bits, is 16.8 GB, read and
written at random addresses.

Here no row moves. Step i settles the final row i, which depends on the row at position i just before its step,
value(i): value(i') of the last step i' > i that drew j = i, or row i itself without such a step. The final row i is the
row that was at j then: value(i') of the last step i' > i that drew the same j, or row j itself. So each step only sends
(j, i, value(i)) to a lower position. Positions are taken in blocks, from the highest: everything sent to a block is
there when its turn comes, and its own messages go to files of lower blocks.
"""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

BLOCK_ROWS = 1 << 23
"""Positions per block. The lowest block gets the most steps, 1 + log(rows / BLOCK_ROWS) per position; each step takes
about 60 bytes of memory."""
MOST_ROWS = (1 << 32) - 1

Rows = NDArray[np.uint32]


def write_destinations(path: Path, rows: int, seed: int, advance: Callable[[int], None]) -> None:
    """Writes uint32 [rows] to `path`: the destination of each row in RandomState(seed).shuffle of `rows` rows.

    Works in the folder `path`.steps, with up to 20 bytes of disk per row; calls advance(n) after each n steps.
    """
    if not 0 < rows <= MOST_ROWS:
        raise ValueError(f"{rows} training rows: a shuffle needs from 1 to {MOST_ROWS}")
    folder = path.with_suffix(".steps")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    blocks = -(-rows // BLOCK_ROWS)
    drawn = _drawn(rows, seed)
    for block in reversed(range(blocks)):
        low, high = block * BLOCK_ROWS, min((block + 1) * BLOCK_ROWS, rows)
        _run_block(folder, low, high, next(drawn))
        advance(high - low)
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        for block in range(blocks):
            low, high = block * BLOCK_ROWS, min((block + 1) * BLOCK_ROWS, rows)
            origin, final = _take(folder / f"final_{block}", 2)
            destinations = np.empty(high - low, dtype=np.uint32)
            destinations[origin - np.uint32(low)] = final
            file.write(destinations.data)
    shutil.rmtree(folder)
    partial.replace(path)


def _drawn(rows: int, seed: int) -> Iterator[Rows]:
    """Yields the j of the steps i of each block, from the highest block on, i ascending; 0 for step 0, which does not
    exist.

    RandomState.randint with one bound per number and numpy's shuffle reject alike: both take the next 32 bits, masked
    to the bound's width, until they do not exceed it.
    """
    random = np.random.RandomState(seed)
    for block in reversed(range(-(-rows // BLOCK_ROWS))):
        low, high = block * BLOCK_ROWS, min((block + 1) * BLOCK_ROWS, rows)
        bounds = np.arange(high, max(low, 1), -1, dtype=np.int64)  # j <= i, and randint leaves out its bound
        drawn = random.randint(0, bounds, dtype=np.uint32)[::-1]
        yield drawn if low else np.concatenate([np.zeros(1, dtype=np.uint32), drawn])


def _run_block(folder: Path, low: int, high: int, drawn: Rows) -> None:
    """Runs steps `low` to `high` - 1, which drew `drawn` [high - low]: settles all positions of the block."""
    steps = np.arange(low, high, dtype=np.uint32)
    inside = np.flatnonzero((drawn >= low) & (drawn < steps))[::-1]
    outside = np.flatnonzero(drawn < low)[::-1]
    sent_to, sent_by, sent = _take(folder / f"sent_{low // BLOCK_ROWS}", 3)
    value = _values(low, high, drawn, inside, sent_to, sent)

    # All messages to this block, ordered by position, then step: each takes its predecessor's value.
    to = np.concatenate([sent_to, drawn[inside]])
    by = np.concatenate([sent_by, steps[inside]])
    left = np.concatenate([sent, value[inside]])
    del sent_to, sent_by, sent
    order = _stable_order(to - np.uint32(low))
    to, by, left = to[order], by[order], left[order]
    taken = np.empty_like(left)
    taken[1:] = left[:-1]
    first = np.ones(len(to), dtype=bool)
    first[1:] = to[1:] != to[:-1]
    taken[first] = to[first]
    _send(folder, "final", taken, by)

    stays = np.flatnonzero(drawn == steps)
    _send(folder, "final", value[stays], steps[stays])
    _send(folder, "sent", drawn[outside], steps[outside], value[outside])


def _values(low: int, high: int, drawn: Rows, inside: NDArray[np.int64], sent_to: Rows, sent: Rows) -> Rows:
    """Returns value(i) of the steps of a block, [high - low].

    inside: steps, minus `low`, that drew a lower position of the block, descending. sent_to, sent: messages from
    higher blocks, in the order of their steps.
    """
    value = np.arange(low, high, dtype=np.uint32)
    value[sent_to - np.uint32(low)] = sent  # Of several messages to one position, the last one stays.
    source = np.arange(high - low, dtype=np.uint32)
    source[drawn[inside] - np.uint32(low)] = inside  # Likewise, and any step of the block comes after those above it.
    while True:
        further = source[source]
        if np.array_equal(further, source):
            return value[source]
        source = further


def _stable_order(keys: Rows) -> NDArray[np.int64]:
    """Returns the stable order of 32-bit keys, by two passes of numpy's radix sort, which handles 16 bits."""
    order = np.argsort(keys.astype(np.uint16), kind="stable")
    high = (keys >> np.uint32(16)).astype(np.uint16)
    return order[np.argsort(high[order], kind="stable")]


def _send(folder: Path, name: str, to: Rows, *columns: Rows) -> None:
    """Appends (to, *columns) to the files of the blocks of `to`, in the given order."""
    block = (to // np.uint32(BLOCK_ROWS)).astype(np.uint16)
    order = np.argsort(block, kind="stable")
    records = np.stack([to, *columns], axis=1)[order]
    start = 0
    for target, end in enumerate(np.cumsum(np.bincount(block))):
        if end > start:
            with (folder / f"{name}_{target}").open("ab") as file:
                file.write(records[start:end].data)
        start = end


def _take(path: Path, columns: int) -> list[Rows]:
    """Returns the columns of the messages to a block, in order, and deletes their file."""
    if not path.exists():
        return [np.empty(0, dtype=np.uint32) for _ in range(columns)]
    records = np.fromfile(path, dtype=np.uint32).reshape(-1, columns)
    path.unlink()
    return [np.ascontiguousarray(records[:, column]) for column in range(columns)]
