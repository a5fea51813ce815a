"""Embeddings of a batch, as the dense network takes them."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dlrm_bench.dlrm.dlrmv4.config import CONTEXT_TABLES, CONTEXT_TOKENS, EVENT_TABLES, ModelConfig, tables


class Embedded(NamedTuple):
    """Embeddings of E events and B candidates, or gradients of them."""

    tokens: Sequence[Tensor]
    """Rows of item, artist and album: of events, then of candidates, [E + B, columns], in the tokens' format."""
    context: Tensor
    """[CONTEXT_TOKENS, B, columns], in the tokens' format."""
    candidates: Sequence[Tensor]
    """Rows of item, artist and album of the candidates once more, fp32 [B, columns]."""

    def leaves(self) -> "Embedded":
        """Returns the same values, for gradients of each tensor."""
        return self.of([value.detach().requires_grad_() for value in self.flat()])

    def flat(self) -> list[Tensor]:
        """Returns all tensors."""
        return [*self.tokens, self.context, *self.candidates]

    @staticmethod
    def of(flat: Sequence[Tensor]) -> "Embedded":
        """Returns the inverse of `flat`."""
        count = len(EVENT_TABLES)
        return Embedded(flat[:count], flat[count], flat[count + 1 :])

    @staticmethod
    def of_features(rows: Mapping[str, Tensor], config: ModelConfig, dtype: torch.dtype) -> "Embedded":
        """Returns embeddings of each feature of `tables`, fp32, as one. dtype: the tokens' format."""
        features = [table.features for table in tables(config)[: len(EVENT_TABLES)]]
        return Embedded(
            [torch.cat([rows[feature].to(dtype) for feature in of_table]) for of_table in features],
            torch.stack([rows[name] for name in CONTEXT_TABLES]).to(dtype),
            [rows[candidate] for _, candidate in features],
        )

    @staticmethod
    def in_order(rows: Tensor, samples: int, dtype: torch.dtype) -> "Embedded":
        """Returns embeddings that are one matrix, fp32 [K, columns], table after table, as views of it and of one copy
        in the tokens' format. samples: B."""
        count = len(EVENT_TABLES)
        each = (len(rows) - CONTEXT_TOKENS * samples) // count
        assert len(rows) == count * each + CONTEXT_TOKENS * samples, "equally many rows of item, artist and album"
        *of_tables, context = rows.to(dtype).split([each] * count + [CONTEXT_TOKENS * samples])
        candidates = [of[each - samples :] for of in rows[: count * each].split(each)]
        return Embedded(of_tables, context.unflatten(0, (CONTEXT_TOKENS, samples)), candidates)
