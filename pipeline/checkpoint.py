"""Weights and optimizer state of a pipeline in files.

Each rank writes its tensors to its own files (checkpoint_files.py), and reads its tensors from all files that have
parts of them, by their index (checkpoint_index.py): pipeline, number of ranks and the distribution of rows and columns
may differ from those of the writer. No rank holds more than a few pieces in host memory at a time.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dlrm_bench.dlrm.tables.tiers.tiered_rows import StoredRows
from dlrm_bench.pipeline.checkpoint_files import Wanted, read_pieces, write_pieces
from dlrm_bench.pipeline.checkpoint_index import (
    THREADS,
    CheckpointError,
    Index,
    Piece,
    Place,
    Slices,
    common,
    damaged_others,
    other_files,
    read_index,
    write_index,
)
from dlrm_bench.pipeline.state import RowsByIds, StateBlocks, TensorBlock, full_shape

_PIECE_BYTES = 32 * 2**20
"""Maximum size of a piece that is copied to the host and written at once."""


def state_bytes(blocks: StateBlocks) -> int:
    """Returns the number of bytes of the whole state, over all ranks."""
    return sum(4 * torch.Size(full_shape(of_key)).numel() for of_kind in blocks for of_key in of_kind.values())


def snapshot(blocks: StateBlocks, rank: int) -> StateBlocks:
    """Returns copies of the blocks that `rank` owns, on their device, so that training can continue."""

    def copied(block: TensorBlock) -> TensorBlock:
        return replace(block, local=block.local.clone() if block.local is not None and block.owner == rank else None)

    kinds = ({key: [copied(b) for b in of_key] for key, of_key in of_kind.items()} for of_kind in blocks)
    return StateBlocks(*kinds)


def snapshot_bytes(blocks: StateBlocks, rank: int) -> int:
    """Returns the number of bytes that `snapshot` allocates."""
    return sum(place.nbytes for place, _ in _owned(blocks, rank))


def pin_memory() -> None:
    """Makes PyTorch pin, and keep, memory for all pieces that a rank writes at a time: pinning it during training would
    cost 0.15 s."""
    pieces = [torch.empty(_PIECE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(THREADS)]
    del pieces


@dataclass(frozen=True, slots=True)
class OwnPieces:
    """Pieces of a state that one rank writes."""

    shapes: dict[str, tuple[int, ...]]
    """Shapes of the full tensors, of all ranks."""
    pieces: Sequence[tuple[Place, Tensor | StoredRows]]
    """This rank's pieces, fp32, on one device."""


def own_pieces(blocks: StateBlocks, rank: int) -> OwnPieces:
    """Returns the pieces of a state that `rank` writes, as views of the blocks' memory."""
    shapes = {_key(kind, key): full_shape(of) for kind, of_kind in _kinds(blocks) for key, of in of_kind.items()}
    return OwnPieces(shapes, list(_owned(blocks, rank)))


def write_state(
    folder: Path, state: OwnPieces, rank: int, group: dist.ProcessGroup, on_piece: Callable[[], None], nice: int = 0
) -> None:
    """Writes the state to `folder`, and returns once all ranks' files are on disk. Collective over `group`, of gloo.

    The index includes the checksums of all other .json files already in the folder.

    on_piece: called after each piece, by any thread. nice: of the writing threads, as for nice(1). CheckpointError, on
    every rank, if any rank fails.
    """
    written: list[Piece] = []

    def write() -> None:
        written.extend(write_pieces(folder, rank, state.pieces, on_piece, nice))

    on_all_ranks(write, group)
    pieces = gathered(written, group)

    def index() -> None:
        if rank == 0:
            write_index(folder, Index(state.shapes, pieces, other_files(folder)))

    on_all_ranks(index, group)


def gathered(pieces: Sequence[Piece], group: dist.ProcessGroup | None) -> tuple[Piece, ...]:
    """Returns the pieces of all ranks, in rank order. Collective over `group`; None: over all ranks."""
    of_ranks: list[Sequence[Piece]] = [[] for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(of_ranks, pieces, group)
    return tuple(piece for of_rank in of_ranks for piece in of_rank)


def read_state(folder: Path, blocks: StateBlocks, group: dist.ProcessGroup) -> None:
    """Fills the blocks of this rank from `folder`. Collective over `group`, of gloo.

    CheckpointError, on every rank, if the files are damaged or of another model; names the first difference.
    """

    def read() -> None:
        index = read_index(folder)
        _check_shapes(folder, index, blocks)
        for line in damaged_others(folder, index):
            raise CheckpointError(line)
        read_pieces(folder, list(_wanted(index, blocks, _chosen(folder, index, blocks))))

    try:
        on_all_ranks(read, group)
    except CheckpointError as error:
        raise CheckpointError(f"{folder} cannot be read: {error}") from error


def on_all_ranks(work: Callable[[], None], group: dist.ProcessGroup | None) -> None:
    """Runs each rank's work; raises the error of the first failing rank on every rank. Collective over `group`; None:
    over all ranks, by the default group."""
    failure: str | None = None
    try:
        work()
    except (OSError, ValueError) as error:
        failure = str(error)
    failures: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(failures, failure, group)
    for rank, what in enumerate(failures):
        if what is not None:
            raise CheckpointError(f"rank {rank}: {what}")


def _kinds(blocks: StateBlocks) -> Iterator[tuple[str, dict[str, list[TensorBlock]]]]:
    return zip(StateBlocks._fields, blocks, strict=True)


def _key(kind: str, key: str) -> str:
    return f"{kind}/{key}"


def _owned(blocks: StateBlocks, rank: int) -> Iterator[tuple[Place, Tensor | StoredRows]]:
    """Yields the tensors that this rank writes, in pieces; of the ranks that hold a tensor, only its owner writes
    it."""
    for kind, of_kind in _kinds(blocks):
        for key, of_key in of_kind.items():
            for block in of_key:
                if block.owner != rank or block.local is None:
                    continue
                rows = max(1, _PIECE_BYTES // (4 * max(1, block.local[:1].numel())))
                for first in range(0, block.shape[0], rows):
                    part = block.local[first : first + rows]
                    start = (block.start[0] + first * block.row_step, *block.start[1:])
                    yield Place(_key(kind, key), start, tuple(part.shape), block.row_step), part


def _chosen_of(piece: Piece, by_ids: RowsByIds, chosen: Tensor) -> Iterator[tuple[tuple[Tensor], Tensor]]:
    """Yields the chosen rows of a piece, and their destination memory."""
    kind, _, key = piece.place.tensor.partition("/")
    if key == by_ids.key:
        return
    start = piece.place.start[0]
    first, end = torch.searchsorted(chosen, torch.tensor([start, start + piece.place.shape[0]])).tolist()
    if end > first:
        yield (chosen[first:end] - start,), by_ids.memory[kind][first:end]


def _check_shapes(folder: Path, index: Index, blocks: StateBlocks) -> None:
    needed = {_key(kind, key): full_shape(of) for kind, of_kind in _kinds(blocks) for key, of in of_kind.items()}
    for kind, of_kind in _kinds(blocks):
        for key, of_key in of_kind.items():
            if any(block.by_ids is not None for block in of_key):  # may have any number of rows
                rows = index.tensors.get(_key(kind, key), (0,))[0]
                needed[_key(kind, key)] = (rows, *needed[_key(kind, key)][1:])
    for key in sorted(index.tensors.keys() | needed.keys()):
        if index.tensors.get(key) != needed.get(key):
            has, needs = index.tensors.get(key, "nothing"), needed.get(key, "nothing")
            raise CheckpointError(
                f"{folder} is of another model: {key}: it has {has}, but {needs} is needed; give both runs the same "
                "--model flags, the same --optimizer.embedding, and --dynamic-rows or no --dynamic-rows"
            )


def _chosen(folder: Path, index: Index, blocks: StateBlocks) -> Tensor | None:
    """Returns the rows with ids that this rank reads, see RowsByIds; None if rows have no ids."""
    of_blocks = (block.by_ids for of_key in blocks.weights.values() for block in of_key)
    by_ids = next((found for found in of_blocks if found is not None), None)
    if by_ids is None:
        return None
    key = _key("weights", by_ids.key)
    ids = torch.empty(index.tensors[key], dtype=torch.float32)
    pieces = [piece for piece in index.pieces if piece.place.tensor == key]
    of_piece = ((piece.place.start[0], piece.place.shape[0]) for piece in pieces)
    targets = [((slice(None),), ids[first : first + rows]) for first, rows in of_piece]
    read_pieces(folder, [Wanted(piece, [target]) for piece, target in zip(pieces, targets, strict=True)])
    return by_ids.choose(ids.view(torch.int32))


def _wanted(index: Index, blocks: StateBlocks, chosen: Tensor | None = None) -> Iterator[Wanted]:
    """Yields the pieces that this rank needs, in file order. chosen: the rows of tensors whose rows have ids."""
    by_key = {_key(kind, key): of_key for kind, of_kind in _kinds(blocks) for key, of_key in of_kind.items()}
    for piece in sorted(index.pieces, key=lambda piece: (piece.file, piece.offset)):
        targets: list[tuple[Slices | tuple[Tensor], Tensor | StoredRows]] = []
        for block in by_key[piece.place.tensor]:
            if block.by_ids is not None:
                if block.local is not None and chosen is not None:
                    targets += _chosen_of(piece, block.by_ids, chosen)
            elif block.local is not None:
                place = Place(piece.place.tensor, block.start, block.shape, block.row_step)
                shared = common(piece.place, place)
                if shared is not None:
                    targets.append((shared[0], block.local[shared[1]]))
        if targets:
            yield Wanted(piece, targets)
