"""The first layer's input by fused kernels, with its gradients summed in a fixed order.

The forward pass keeps two row numbers per token, 8 bytes. The backward pass needs one additional gradient of all tokens
and sorts the row numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dlrm_bench.kernels.dense._dropout import Dropout
from dlrm_bench.kernels.dense.sorted_sums import sort_keys, sorted_sums
from dlrm_bench.kernels.dense.token_input import (
    TokenPlaces,
    TokenRows,
    no_rows,
    token_input_backward,
    token_input_forward,
)


def fused_input(
    events: Tensor,
    context: Tensor,
    position: Tensor,
    time: Tensor,
    places: TokenPlaces,
    factor: float,
    dropout: Dropout | None,
) -> Tensor:
    """Returns factor * row + position + time of each token, [N, width], dropped out, as `token_input_forward` has it;
    N counts the events of `places`, whether they are padded or not."""
    return _Input.apply(events, context, position, time, places, factor, dropout)


class _Input(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        events: Tensor,
        context: Tensor,
        position: Tensor,
        time: Tensor,
        places: TokenPlaces,
        factor: float,
        dropout: Dropout | None,
    ) -> Tensor:
        tokens = len(places.event) + (places.context + 1) * len(context)
        out = events.new_empty(tokens, events.shape[1])
        rows = no_rows(tokens, events, time)
        token_input_forward(events, context, position, time, places, factor, dropout, out, rows)
        ctx.save_for_backward(*rows)
        ctx.places, ctx.factor, ctx.dropout = places, factor, dropout
        ctx.sizes = len(events), len(position), len(time)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, places, grad = TokenRows(*ctx.saved_tensors), ctx.places, grads[0].contiguous()
        events, positions, times = ctx.sizes
        of_position, of_time = (torch.empty(count, grad.shape[1], device=grad.device) for count in (positions, times))
        through = torch.empty_like(grad)
        token_input_backward(grad, places, ctx.dropout, through, of_position)
        of_events = grad.new_empty(events, grad.shape[1])
        sorted_sums(through, sort_keys(rows.event, events), ctx.factor, of_events)
        sorted_sums(through, sort_keys(rows.time, times), 1.0, of_time)
        first = places.offsets[:-1, None] + torch.arange(places.context, device=grad.device)
        return of_events, through[first] * ctx.factor, of_position, of_time, None, None, None
