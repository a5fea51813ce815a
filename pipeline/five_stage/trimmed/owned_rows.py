"""Row-wise tables whose ids go to all ranks: each looks up its own rows, and other ranks' rows with weight zero.

The number of ids that a rank receives is then the same in every batch, so the host reads nothing. An id of another
rank's row is mapped to one of this rank's rows, spread over them. Its gradient is zero, which leaves that row unchanged
under the optimizers in IGNORE_ZEROS. A non-finite row spoils every vector into which it is summed this way.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor

IGNORE_ZEROS = (EmbOptimType.EXACT_SGD, EmbOptimType.EXACT_ADAGRAD, EmbOptimType.EXACT_ROWWISE_ADAGRAD)
"""FBGEMM's fused optimizers that leave a row with a zero gradient unchanged, if there is no weight decay."""


@dataclass(frozen=True, slots=True)
class OwnedRows:
    """Maps the ids of a KJT to rows of this rank."""

    rank: int
    ranks: int
    block: Tensor
    """The number of rows of each id's table on every rank but the last, int64 [ids]."""
    count: Tensor
    """The number of this rank's rows of that table, int64 [ids]."""

    def local(self, ids: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns row indices within this rank [ids], in the ids' dtype, and weights [ids], fp32 or in the given
        dtype.

        Ids beyond the table, and negative ones, are the last rank's: beyond its rows, for FBGEMM's bounds check.
        """
        ids = ids.masked_fill(ids < 0, torch.iinfo(ids.dtype).max)
        owned = (ids // self.block).clamp(max=self.ranks - 1) == self.rank
        local = torch.where(owned, ids - self.rank * self.block, ids % self.count).to(ids.dtype)
        if weights is None or not weights.is_floating_point():  # which TorchRec's kernels take for none
            return local, owned.to(torch.float32)
        return local, weights * owned


def owned_rows(
    hash_sizes: Sequence[int], ids_of_tables: Sequence[int], rank: int, ranks: int, device: torch.device
) -> OwnedRows:
    """Returns the owned rows for a number of ids of each table, one table after another. hash_sizes: the tables' rows,
    of which each rank has a block of equal size (TorchRec's even row-wise sharding)."""
    blocks = [-(-rows // ranks) for rows in hash_sizes]
    counts = [min(block, rows - rank * block) for block, rows in zip(blocks, hash_sizes, strict=True)]
    repeats = torch.tensor(ids_of_tables)
    of_ids = (torch.tensor(of).repeat_interleave(repeats).to(device) for of in (blocks, counts))
    return OwnedRows(rank, ranks, *of_ids)


def why_not_split(hash_sizes: Sequence[int], ranks: int) -> str | None:
    """Returns why some rank cannot be given an id of weight zero; None if every rank can."""
    if any((ranks - 1) * -(-rows // ranks) >= rows for rows in hash_sizes):
        return "a rank has no row of one"
    return None


def heeds_zeros(fused_params: Iterable[dict[str, Any] | None]) -> str | None:
    """Returns a message naming these tables' fused update that changes rows with zero gradients; None without one."""
    for params in (of or {} for of in fused_params):
        optimizer = params.get("optimizer", EmbOptimType.EXACT_SGD)
        if optimizer not in IGNORE_ZEROS or params.get("weight_decay"):
            return f"{optimizer}, or its weight decay, changes rows whose gradient is zero"
    return None
