"""Causal SiLU attention over jagged sequences: of all tokens, and of the last ones alone."""

from typing import Any

import torch
from torch import Tensor

from dlrm_bench.kernels.dense import silu_attention
from dlrm_bench.kernels.dense.last_query_attention import LastQueryAttention


class _Attention(torch.autograd.Function):
    """Attention over a projection [N, 4 * heads * width] with u, v, q and k of all heads. It does not use u: the
    gradient of u's columns is zero."""

    @staticmethod
    def forward(ctx: Any, projected: Tensor, offsets: Tensor, heads: int, length: int) -> Tensor:
        _, v, q, k = by_heads(projected, heads)
        out = torch.empty_like(v, memory_format=torch.contiguous_format)
        targets = torch.ones_like(offsets[1:])
        silu_attention.silu_attention_forward(q, k, v, silu_attention.Sequences(offsets, targets, length), out)
        ctx.save_for_backward(projected, offsets, targets)
        ctx.heads, ctx.length = heads, length
        return out.flatten(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        projected, offsets, targets = ctx.saved_tensors
        _, v, q, k = by_heads(projected, ctx.heads)
        of_projected = torch.empty_like(projected)
        du, dv, dq, dk = by_heads(of_projected, ctx.heads)
        du.zero_()
        grad = grads[0].contiguous().view(v.shape)
        sequences = silu_attention.Sequences(offsets, targets, ctx.length)
        silu_attention.silu_attention_backward(grad, q, k, v, sequences, dq, dk, dv)
        return of_projected, None, None, None


def by_heads(projected: Tensor, heads: int) -> tuple[Tensor, ...]:
    """Returns u, v, q and k, each [N, heads, width], of a projection [N, 4 * heads * width]."""
    return tuple(part.unflatten(1, (heads, -1)) for part in projected.chunk(4, dim=1))


def attention(projected: Tensor, offsets: Tensor, heads: int, length: int) -> Tensor:
    """Returns silu(q k^T / sqrt(width)) v / length, each token over its sequence's tokens up to itself, [N, heads *
    width].

    projected: u, v, q, k of all heads side by side, [N, 4 * heads * width], fp32 or bf16. offsets: int64 [B + 1].
    length: no sequence is longer. With one candidate at the end, "a target sees the history and itself" is plain
    causality, so the kernel's targets are 1 throughout.
    """
    return _Attention.apply(projected, offsets, heads, length)


def last_attention(query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, heads: int, length: int) -> Tensor:
    """Returns the output of `attention` for the last token of each sequence, [B, heads * width].

    query: of the last tokens, [B, heads * width]; key, value: of all tokens, [N, heads * width].
    """
    of_heads = (of.unflatten(1, (heads, -1)) for of in (query, key, value))
    return LastQueryAttention.apply(*of_heads, offsets, length).flatten(1)
