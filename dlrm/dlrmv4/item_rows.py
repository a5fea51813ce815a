"""Tokens' rows of distinct items: content of each item once, and each action's part added to it.

1. A packed event has its item's artist and album, and one of three actions: with I distinct items, it has one of 3 I
   rows.
2. Reader threads find the distinct items by a sort (data/packed.py): the host knows all shapes, and nothing waits.
3. Tables are read, and content is computed, for I + B rows instead of the E distinct events.
4. The kernel for the first layer's input gathers row 3 * item + action; place, time, context, dropout are unchanged.
5. The kernel sums token gradients by row in a fixed order (sorted_sums); this module sums these rows, in fp32.
"""

from typing import Any

import torch
from torch import Tensor

from dlrm_bench.dlrm.dlrmv4.batch import DenseBatch
from dlrm_bench.dlrm.dlrmv4.config import ACTION_BITS


def item_rows(content: Tensor, actions: Tensor, candidates: int) -> Tensor:
    """Returns content plus action, [A * I + B, width]: of each item with each of A actions, then of B candidates.

    content: [I + B, width], of distinct items and then of candidates. actions: [A + 1, width], the candidates' last.
    candidates: B. Gradients have equal bits run by run.
    """
    return _ItemRows.apply(content, actions, candidates)


def rows_of_events(batch: DenseBatch) -> Tensor:
    """Returns the row of `item_rows` of each event of the histories, int32 [T]. batch: of distinct items."""
    assert batch.item is not None, "a batch of distinct items"
    assert batch.event is not None, "whose events are distinct too"
    rows = len(ACTION_BITS) * batch.item + (batch.action >> 1)  # of bits 1, 2, 4
    return rows.index_select(0, batch.event)


class _ItemRows(torch.autograd.Function):
    """A broadcast sum and a concatenation in one buffer; autograd would make one more copy in each direction."""

    @staticmethod
    def forward(ctx: Any, content: Tensor, actions: Tensor, candidates: int) -> Tensor:
        items, width = len(content) - candidates, content.shape[1]
        ctx.sizes = kinds, items = len(actions) - 1, items
        out = content.new_empty(kinds * items + candidates, width)
        of_items, of_candidates = out[: kinds * items].view(items, kinds, width), out[kinds * items :]
        torch.add(content[:items, None], actions[:-1], out=of_items)
        torch.add(content[items:], actions[-1], out=of_candidates)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (kinds, items), grad = ctx.sizes, grads[0].contiguous()
        width = grad.shape[1]
        of_items, of_candidates = grad[: kinds * items].view(items, kinds, width), grad[kinds * items :]
        of_content = torch.cat([of_items.sum(1), of_candidates])
        of_actions = torch.cat([of_items.sum(0), of_candidates.sum(0, keepdim=True)])
        return of_content, of_actions, None
