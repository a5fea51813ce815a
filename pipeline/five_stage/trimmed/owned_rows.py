"""Row-wise tables whose ids go to all ranks: each looks up its own rows, and other ranks' rows with weight zero.

The number of ids that a rank gets is then the same in every batch, so the host reads nothing. An id of another rank's
row is mapped to one of this rank's rows, spread over them. Its gradient is zero, which leaves that row unchanged under
the optimizers that IGNORE_ZEROS names. A row that is not finite spoils every vector into which it is summed this way.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor

IGNORE_ZEROS = (EmbOptimType.EXACT_SGD, EmbOptimType.EXACT_ADAGRAD, EmbOptimType.EXACT_ROWWISE_ADAGRAD)
"""FBGEMM's fused optimizers that change nothing of a row whose gradient is zero, where there is no weight decay."""


@dataclass(frozen=True, slots=True)
class OwnedRows:
    """Ids of a KJT that name rows of this rank."""

    first: Tensor
    """This rank's first row of each id's table, int64 [ids]."""
    count: Tensor
    """And the number of this rank's rows."""

    def local(self, ids: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns rows among this rank's [ids], of the ids' type, and weights [ids], fp32 or of the given type."""
        rows = ids - self.first
        owned = (rows >= 0) & (rows < self.count)
        local = torch.where(owned, rows, ids % self.count).to(ids.dtype)
        return local, owned.to(torch.float32) if weights is None else weights * owned


def owned_rows(
    hash_sizes: Sequence[int], ids_of_tables: Sequence[int], rank: int, ranks: int, device: torch.device
) -> OwnedRows:
    """Returns the owned rows for a number of ids of each table, one table after another. hash_sizes: the tables' rows,
    of which each rank has a block of equal size (TorchRec's even row-wise sharding)."""
    blocks = [-(-rows // ranks) for rows in hash_sizes]
    firsts = [rank * block for block in blocks]
    counts = [min(block, rows - first) for block, rows, first in zip(blocks, hash_sizes, firsts, strict=True)]
    repeats = torch.tensor(ids_of_tables)
    return OwnedRows(*(torch.tensor(of).repeat_interleave(repeats).to(device) for of in (firsts, counts)))


def why_not_split(hash_sizes: Sequence[int], ranks: int) -> str | None:
    """Says why no id of weight zero can be given to some rank; None if one can be given to each."""
    if any((ranks - 1) * -(-rows // ranks) >= rows for rows in hash_sizes):
        return "a rank has no row of one"
    return None


def heeds_zeros(fused_params: Iterable[dict[str, Any] | None]) -> str | None:
    """Names the fused update, of these tables', that changes rows whose gradient is zero; None without one."""
    for params in (of or {} for of in fused_params):
        optimizer = params.get("optimizer", EmbOptimType.EXACT_SGD)
        if optimizer not in IGNORE_ZEROS or params.get("weight_decay"):
            return f"{optimizer}, or its weight decay, changes rows whose gradient is zero"
    return None
