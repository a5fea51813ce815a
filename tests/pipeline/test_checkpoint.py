"""State in files, written in one layout and read in another."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline import checkpoint
from dlrm_bench.pipeline.checkpoint import own_pieces, read_state, snapshot, snapshot_bytes, state_bytes, write_state
from dlrm_bench.pipeline.checkpoint_index import CheckpointError
from dlrm_bench.pipeline.state import StateBlocks, TensorBlock

TABLE = torch.arange(23 * 6.0).view(23, 6)


def block(rows: slice, columns: slice) -> TensorBlock:
    local = TABLE[rows, columns].clone()
    start = (rows.start or 0, columns.start or 0)
    return TensorBlock(0, start, tuple(local.shape), local, rows.step or 1)


ALL = slice(None)
LAYOUTS = {
    "whole": [block(ALL, ALL)],
    "columns": [block(ALL, slice(0, 2)), block(ALL, slice(2, 6))],
    "rows": [block(slice(0, 7), ALL), block(slice(7, 23), ALL)],
    "three parts of rows": [block(slice(part, None, 3), ALL) for part in range(3)],
    "six parts of rows": [block(slice(part, None, 6), ALL) for part in range(6)],
    "two parts of rows, in columns": [
        block(slice(part, None, 2), columns) for part in range(2) for columns in (slice(0, 4), slice(4, 6))
    ],
}


def empty(layout: str) -> StateBlocks:
    blocks = [TensorBlock(b.owner, b.start, b.shape, torch.zeros(b.shape), b.row_step) for b in LAYOUTS[layout]]
    return StateBlocks({"table": blocks}, {})


def move(ranks: Ranks, folder: Path) -> dict[tuple[str, str], str]:
    """Returns the result for each pair of layouts."""
    checkpoint._PIECE_BYTES = 5 * 6 * 4
    group, found = dist.new_group(backend="gloo"), {}
    for before in LAYOUTS:
        state = StateBlocks({"table": LAYOUTS[before]}, {})
        assert state_bytes(state) == snapshot_bytes(state, 0) == 4 * TABLE.numel()
        pieces: list[None] = []
        (folder / before).mkdir()
        copy = own_pieces(snapshot(state, 0), 0)
        write_state(folder / before, copy, 0, group, lambda pieces=pieces: pieces.append(None))  # type: ignore[misc]
        assert len(pieces) >= 5
        for after in LAYOUTS:
            read = empty(after)
            read_state(folder / before, read, group)
            equal = all(torch.equal(b.local, TABLE[b.index]) for b in read.weights["table"] if b.local is not None)
            found[before, after] = "equal" if equal else "differs"
    other = StateBlocks({"table": [TensorBlock.whole(torch.zeros(22, 6))]}, {})
    with pytest.raises(CheckpointError, match=r"weights/table: it has \(23, 6\), but \(22, 6\) is needed"):
        read_state(folder / "columns", other, group)
    damaged = folder / "rows" / "rank-0-0.bin"
    content = bytearray(damaged.read_bytes())
    content[3] ^= 1
    damaged.write_bytes(content)
    with pytest.raises(
        CheckpointError, match=r"rows cannot be read: rank 0: rank-0-0\.bin, bytes 0 to 119, of weights"
    ):
        read_state(folder / "rows", empty("columns"), group)
    return found


def test_any_layout_reads_what_another_wrote(run_ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    (found,) = run_ranks(1, move, tmp_path)
    assert len(found) == len(LAYOUTS) ** 2
    assert {pair: what for pair, what in found.items() if what != "equal"} == {}
