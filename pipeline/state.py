"""Weights and optimizer state of a whole model, whatever its sharding: how they move from one pipeline to another.

Keys are those of an unsharded torchrec.models.dlrm.DLRM_DCN. Gathering and loading are collective, one block of a
tensor after the other, so a rank's device holds no more than a few megabytes beside what it holds anyway. The whole
tensors are CPU memory of rank 0 alone: all tables and their state must fit on that host.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dlrm_bench.dlrm.config import ModelConfig
from dlrm_bench.dlrm.runtime.ranks import Ranks

TABLE_PREFIX = "t_"
# Elements of one broadcast.
_CHUNK_ELEMENTS = 1 << 22


@dataclass(slots=True)
class ModelState:
    """Full tensors on the CPU of rank 0; empty on the other ranks."""

    weights: dict[str, Tensor] = field(default_factory=dict)
    """fp32; `DLRM_DCN.load_state_dict` takes it as it is."""
    optimizer: dict[str, Tensor] = field(default_factory=dict)
    """fp32, Adagrad's sum of squared gradients of each weight, under the weight's key and of its shape; for tables
    under rowwise Adagrad [rows, 1], under SGD nothing."""


@dataclass(frozen=True, slots=True)
class TensorBlock:
    """A block of one full tensor."""

    owner: int
    """A rank that holds it."""
    start: tuple[int, ...]
    """Index of its first element in the full tensor."""
    shape: tuple[int, ...]
    local: Tensor | None
    """The memory, of this shape, on every rank that holds the block; None elsewhere."""
    row_step: int = 1
    """How far apart its rows are in the full tensor."""

    @property
    def index(self) -> tuple[slice, ...]:
        """The elements of the full tensor that it holds."""
        steps = (self.row_step, *(1 for _ in self.shape[1:]))
        ends = zip(self.start, self.shape, steps, strict=True)
        return tuple(slice(first, first + (size - 1) * step + 1, step) for first, size, step in ends)

    @classmethod
    def whole(cls, local: Tensor) -> "TensorBlock":
        """Returns the one block of a tensor that every rank holds in full."""
        return cls(0, (0,) * local.dim(), tuple(local.shape), local)


TensorBlocks = dict[str, list[TensorBlock]]
"""The blocks of each tensor, in the same order on all ranks."""


class StateBlocks(NamedTuple):
    """The memory of a pipeline's state on this rank, under ModelState's keys."""

    weights: TensorBlocks
    optimizer: TensorBlocks


def table_key(model: ModelConfig, table: int) -> str:
    """Returns the key of a table's weights in DLRM_DCN.state_dict()."""
    name = f"{TABLE_PREFIX}{model.feature_names[table]}"
    return f"sparse_arch.embedding_bag_collection.embedding_bags.{name}.weight"


def gather(weights: TensorBlocks, optimizer: TensorBlocks, ranks: Ranks) -> ModelState:
    """Returns the full tensors as CPU copies on rank 0, nothing on the others. Collective."""
    return ModelState(_gather(weights, ranks), _gather(optimizer, ranks))


def scatter(state: ModelState, weights: TensorBlocks, optimizer: TensorBlocks, ranks: Ranks) -> None:
    """Writes rank 0's full tensors into the blocks of all ranks. Collective.

    ValueError on every rank, before anything is written, if a tensor is missing, not expected or of another shape.
    """
    _check(state, weights, optimizer, ranks)
    _scatter(state.weights, weights, ranks)
    _scatter(state.optimizer, optimizer, ranks)


def _gather(blocks_by_key: TensorBlocks, ranks: Ranks) -> dict[str, Tensor]:
    full = {}
    for key, blocks in blocks_by_key.items():
        tensor = torch.empty(full_shape(blocks)) if ranks.rank == 0 else None
        for block in blocks:
            for rows in _chunks(block):
                source = None
                if block.owner == ranks.rank:
                    assert block.local is not None
                    source = block.local[rows]
                buffer = _buffer(block, rows, ranks, source)
                dist.broadcast(buffer, src=block.owner)
                if tensor is not None:
                    tensor[block.index][rows] = buffer.cpu()
        if tensor is not None:
            full[key] = tensor
    return full


@torch.no_grad()
def _scatter(full: dict[str, Tensor], blocks_by_key: TensorBlocks, ranks: Ranks) -> None:
    for key, blocks in blocks_by_key.items():
        for block in blocks:
            for rows in _chunks(block):
                buffer = _buffer(block, rows, ranks, full[key][block.index][rows] if ranks.rank == 0 else None)
                dist.broadcast(buffer, src=0)
                if block.local is not None:
                    block.local[rows].copy_(buffer)


def full_shape(blocks: Iterable[TensorBlock]) -> tuple[int, ...]:
    """Returns the shape of the tensor that blocks make up."""
    ends = [[index.stop for index in block.index] for block in blocks]
    return tuple(map(max, zip(*ends, strict=True)))


def _chunks(block: TensorBlock) -> Iterable[slice]:
    rows, *others = block.shape
    step = max(1, _CHUNK_ELEMENTS // max(1, torch.Size(others).numel()))
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def _buffer(block: TensorBlock, rows: slice, ranks: Ranks, source: Tensor | None) -> Tensor:
    """Returns the buffer to broadcast some rows of a block in: a copy of `source` on the rank that has it."""
    buffer = torch.empty(rows.stop - rows.start, *block.shape[1:], device=ranks.device)
    return buffer if source is None else buffer.copy_(source)


def _check(state: ModelState, weights: TensorBlocks, optimizer: TensorBlocks, ranks: Ranks) -> None:
    answer: list[Any] = [None]
    if ranks.rank == 0:
        wrong = [*_differences(state.weights, weights, ""), *_differences(state.optimizer, optimizer, "optimizer of ")]
        if wrong:
            answer = [f"{wrong[0]}; give both runs the same --model flags and the same --optimizer.embedding"]
    dist.broadcast_object_list(answer, src=0)
    if answer[0] is not None:
        raise ValueError(answer[0])


def _differences(full: dict[str, Tensor], blocks_by_key: TensorBlocks, what: str) -> Iterator[str]:
    needed = {key: full_shape(blocks) for key, blocks in blocks_by_key.items()}
    given = {key: tuple(tensor.shape) for key, tensor in full.items()}
    for key in sorted(needed.keys() | given.keys()):
        if given.get(key) != needed.get(key):
            has, needs = given.get(key, "nothing"), needed.get(key, "nothing")
            yield f"the state is of another model: {what}{key}: it has {has}, needed is {needs}"
