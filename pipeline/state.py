"""Weights and optimizer state of a whole model, for any sharding: the blocks of each tensor, and the ranks that hold
them.

Keys are the benchmark's, the same for every pipeline that trains it.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from dlrm_bench.dlrm.tables.tiers.tiered_rows import StoredRows


@dataclass(frozen=True, slots=True)
class TensorBlock:
    """A block of one full tensor."""

    owner: int
    """A rank that holds it."""
    start: tuple[int, ...]
    """Index of its first element in the full tensor."""
    shape: tuple[int, ...]
    local: Tensor | StoredRows | None
    """The memory, of this shape, on every rank that holds the block; None on other ranks."""
    row_step: int = 1
    """Distance between its rows in the full tensor."""
    by_ids: "RowsByIds | None" = None
    """Selection of the rows that a rank reads, if rows have ids: maybe other rows than it wrote, more or fewer."""

    @property
    def index(self) -> tuple[slice, ...]:
        """The block's elements as slices of the full tensor."""
        steps = (self.row_step, *(1 for _ in self.shape[1:]))
        ends = zip(self.start, self.shape, steps, strict=True)
        return tuple(slice(first, first + (size - 1) * step + 1, step) for first, size, step in ends)

    @classmethod
    def whole(cls, local: Tensor) -> "TensorBlock":
        """Returns the only block of a tensor that every rank holds in full."""
        return cls(0, (0,) * local.dim(), tuple(local.shape), local)


@dataclass(frozen=True, slots=True, eq=False)
class RowsByIds:
    """Rows that are saved with their ids, in any number."""

    key: str
    """Key, among the weights, of the tensor with the ids: [rows, columns], 32-bit numbers."""
    choose: Callable[[Tensor], Tensor]
    """Returns which of all saved rows become the first, second, ... of this rank's memory, int64 [n], ascending. The
    argument is the ids of all rows, int32 [rows, columns] on the host. ValueError if there are too many."""
    memory: Mapping[str, Tensor]
    """This rank's memory, fp32, for weights and optimizer state, by name, and for ids, by `key`: all its places, of
    which the first ones have rows."""


TensorBlocks = dict[str, list[TensorBlock]]
"""The blocks of each tensor, in the same order on all ranks."""


class StateBlocks(NamedTuple):
    """The memory of a pipeline's state on this rank, under the benchmark's keys; all fp32."""

    weights: TensorBlocks
    optimizer: TensorBlocks
    """Adagrad's sum of squared gradients of each weight, under the weight's key and of its shape; for tables under
    row-wise Adagrad [rows, 1], under SGD nothing."""


def full_shape(blocks: Iterable[TensorBlock]) -> tuple[int, ...]:
    """Returns the shape of the tensor that the blocks make up."""
    ends = [[index.stop for index in block.index] for block in blocks]
    return tuple(map(max, zip(*ends, strict=True)))
