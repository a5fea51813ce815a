"""Weights and optimizer state of a pipeline in files, by torch.distributed.checkpoint.

Each rank writes what it holds to files of its own (checkpoint_files.py), and reads what it needs from whichever files
have it: the pipeline and the number of ranks may be others than those that wrote. No rank's host memory holds more than
some pieces at a time.

A table whose rows are dealt out to P ranks in turn is stored as P tensors, `key#p/P`, of the rows p, p + P, ...
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from dlrm_bench.pipeline.checkpoint_files import THREADS, TensorFileReader, TensorFileWriter
from dlrm_bench.pipeline.state import StateBlocks, TensorBlock, full_shape

_PIECE_BYTES = 64 * 2**20
"""Largest piece that is copied to the host and written at a time."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be written or read."""


def state_bytes(blocks: StateBlocks) -> int:
    """Returns the bytes of the whole state, of all ranks."""
    return sum(4 * torch.Size(full_shape(of_key)).numel() for of_kind in blocks for of_key in of_kind.values())


def snapshot(blocks: StateBlocks, rank: int) -> StateBlocks:
    """Returns copies of the blocks that `rank` owns, on their device; training may then go on."""

    def copied(block: TensorBlock) -> TensorBlock:
        return replace(block, local=block.local.clone() if block.local is not None and block.owner == rank else None)

    kinds = ({key: [copied(b) for b in of_key] for key, of_key in of_kind.items()} for of_kind in blocks)
    return StateBlocks(*kinds)


def snapshot_bytes(blocks: StateBlocks, rank: int) -> int:
    """Returns the bytes that `snapshot` allocates."""
    return sum(4 * piece.tensor.numel() for piece in _owned(blocks, rank))


def pin_memory() -> None:
    """Has PyTorch pin, and keep, the memory of all pieces that a rank writes at a time: on the way it would cost the
    training 0.15 s."""
    pieces = [torch.empty(_PIECE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(THREADS)]
    del pieces


def write_state(
    folder: Path, blocks: StateBlocks, rank: int, group: dist.ProcessGroup, on_piece: Callable[[], None]
) -> None:
    """Writes the state to `folder`, and returns once all ranks' files are on disk. Collective over `group`, of gloo.

    on_piece: called before each piece. CheckpointError, on every rank, where any rank cannot.
    """
    pieces = {piece.index: piece for piece in _owned(blocks, rank)}
    device = next((piece.tensor.device for piece in pieces.values()), torch.device("cpu"))
    writer = TensorFileWriter(folder, rank, device)
    try:
        save({}, storage_writer=writer, planner=_SavePlanner(pieces, on_piece), process_group=group)
    except CheckpointException as error:
        raise CheckpointError(_cause(error)) from error


def read_state(folder: Path, blocks: StateBlocks, group: dist.ProcessGroup) -> None:
    """Fills the blocks of this rank from `folder`. Collective over `group`, of gloo.

    CheckpointError, on every rank, where the files are damaged, or of another model; names the first difference.
    """
    try:
        metadata = TensorFileReader(folder).read_metadata().state_dict_metadata
    except Exception as error:  # a pickle, which raises anything
        raise CheckpointError(f"{folder}/.metadata cannot be read ({error!r})") from error
    saved = _full_shapes({key: tuple(of.size) for key, of in metadata.items() if isinstance(of, TensorStorageMetadata)})
    needed = {_key(kind, key): full_shape(of) for kind, of_kind in _kinds(blocks) for key, of in of_kind.items()}
    for key in sorted(saved.keys() | needed.keys()):
        if saved.get(key) != needed.get(key):
            has, needs = saved.get(key, "nothing"), needed.get(key, "nothing")
            raise CheckpointError(
                f"{folder} is of another model: {key}: it has {has}, needed is {needs}; give both runs the same "
                "--model flags and the same --optimizer.embedding"
            )
    planner = _LoadPlanner(blocks, metadata)
    try:
        load({}, storage_reader=TensorFileReader(folder), planner=planner, process_group=group)
    except CheckpointException as error:
        raise CheckpointError(f"{folder} cannot be read: {_cause(error)}") from error


@dataclass(frozen=True, slots=True)
class _Piece:
    """Some rows of a block."""

    index: MetadataIndex
    shape: tuple[int, ...]
    """Shape of the full tensor."""
    tensor: Tensor


def _kinds(blocks: StateBlocks) -> Iterator[tuple[str, dict[str, list[TensorBlock]]]]:
    return zip(StateBlocks._fields, blocks, strict=True)


def _key(kind: str, key: str, part: int = 0, parts: int = 1) -> str:
    return f"{kind}/{key}" + (f"#{part}/{parts}" if parts > 1 else "")


def _parts_of(name: str) -> tuple[str, int, int]:
    """Returns the key of the whole tensor, the part and the number of parts of a stored one."""
    key, _, part = name.partition("#")
    number, _, parts = part.partition("/")
    return (key, int(number), int(parts)) if part else (key, 0, 1)


def _full_shapes(stored: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    full: dict[str, tuple[int, ...]] = {}
    for name, (rows, *others) in stored.items():
        key = _parts_of(name)[0]
        full[key] = (full.get(key, (0,))[0] + rows, *others)
    return full


def _owned(blocks: StateBlocks, rank: int) -> Iterator[_Piece]:
    """Yields what this rank writes; of what several ranks hold, one writes."""
    for kind, of_kind in _kinds(blocks):
        for key, of_key in of_kind.items():
            full = full_shape(of_key)
            for block in of_key:
                part, parts = (block.start[0], block.row_step) if block.row_step > 1 else (0, 1)
                name, start = _key(kind, key, part, parts), 0 if parts > 1 else block.start[0]
                shape = (block.shape[0] if parts > 1 else full[0], *full[1:])
                if block.owner != rank or block.local is None:
                    continue
                row_bytes = 4 * max(1, block.local[:1].numel())
                rows = max(1, _PIECE_BYTES // row_bytes)
                for first in range(0, block.shape[0], rows):
                    offset = torch.Size((start + first, *block.start[1:]))
                    yield _Piece(MetadataIndex(name, offset), shape, block.local[first : first + rows])


class _SavePlanner(DefaultSavePlanner):
    """Plans to write pieces; a state_dict is not needed."""

    def __init__(self, pieces: dict[MetadataIndex, _Piece], on_piece: Callable[[], None]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._pieces, self._on_piece = pieces, on_piece

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan(
            [
                WriteItem(
                    index=piece.index,
                    type=WriteItemType.SHARD,
                    tensor_data=TensorWriteData(
                        chunk=ChunkStorageMetadata(offsets=_offset(piece.index), sizes=piece.tensor.size()),
                        properties=TensorProperties.create_from_tensor(piece.tensor),
                        size=torch.Size(piece.shape),
                    ),
                )
                for piece in self._pieces.values()
            ]
        )
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        self._on_piece()
        return self._pieces[MetadataIndex(index.fqn, index.offset)].tensor


class _LoadPlanner(DefaultLoadPlanner):
    """Plans to read what the blocks of this rank need."""

    def __init__(self, blocks: StateBlocks, stored: Mapping[str, Any]) -> None:
        """CheckpointError where rows are stored and needed in different numbers of parts."""
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._chunks: dict[str, list[ChunkStorageMetadata]] = {}
        self._tensors: dict[MetadataIndex, Tensor] = {}
        by_key = {_key(kind, key): of_key for kind, of_kind in _kinds(blocks) for key, of_key in of_kind.items()}
        for name in stored:
            key, part, parts = _parts_of(name)
            for block in by_key[key]:
                if block.local is not None:
                    self._add(name, block, part, parts)

    def _add(self, name: str, block: TensorBlock, part: int, parts: int) -> None:
        """Adds the rows of a block that a stored part has."""
        assert block.local is not None
        if block.row_step == parts > 1:
            if block.start[0] != part:
                return
            first, rows = 0, block.local
        elif block.row_step == 1:
            at = (part - block.start[0]) % parts
            first, rows = (block.start[0] + at - part) // parts, block.local[at::parts]
        else:
            raise CheckpointError(
                f"{name.partition('#')[0]}: its rows are stored in {parts} part(s) and needed in {block.row_step}: "
                "resume with as many ranks as saved it"
            )
        if len(rows):
            offset = torch.Size((first, *block.start[1:]))
            self._chunks.setdefault(name, []).append(ChunkStorageMetadata(offsets=offset, sizes=rows.size()))
            self._tensors[MetadataIndex(name, offset)] = rows

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items = []
        for name, chunks in self._chunks.items():
            stored = self.metadata.state_dict_metadata[name]
            assert isinstance(stored, TensorStorageMetadata)
            items += create_read_items_for_chunk_list(name, stored, chunks)
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self._tensors[MetadataIndex(index.fqn, index.offset)]


def _offset(index: MetadataIndex) -> torch.Size:
    assert index.offset is not None
    return index.offset


def _cause(error: CheckpointException) -> str:
    """Returns what the first rank says that failed."""
    rank, (cause, _) = min(error.failures.items(), key=lambda item: item[0])
    return f"rank {rank}: {cause}"
