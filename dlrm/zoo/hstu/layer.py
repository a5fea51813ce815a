"""A layer of HSTU (Zhai et al. 2024, arXiv 2402.17152, eq. 1 to 3) over jagged sequences.

u, v, q, k = split(silu(norm(x) W1 + b1));   y = x + norm(attention(q, k, v)) * u W2
"""

from typing import Any

import torch
import torch.fx
from torch import Tensor, nn
from torch.nn import functional

from dlrm_bench.dlrm.zoo.hstu.config import HstuConfig
from dlrm_bench.kernels.dense.silu_attention import Sequences, silu_attention_backward, silu_attention_forward


class SiluAttention(torch.autograd.Function):
    """Applies `kernels.silu_attention` to v, q and k of all heads, in this order: [T, 3 * heads * width]; returns
    [T, heads * width]."""

    @staticmethod
    def forward(ctx: Any, vqk: Tensor, offsets: Tensor, targets: Tensor, max_length: int, heads: int) -> Tensor:
        v, q, k = _by_heads(vqk, heads)
        out = torch.empty_like(v, memory_format=torch.contiguous_format)  # the kernels write all rows
        silu_attention_forward(q, k, v, Sequences(offsets, targets, max_length), out)
        ctx.save_for_backward(vqk, offsets, targets)
        ctx.max_length, ctx.heads = max_length, heads
        return out.flatten(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        vqk, offsets, targets = ctx.saved_tensors
        v, q, k = _by_heads(vqk, ctx.heads)
        of_vqk = torch.empty_like(vqk)
        dv, dq, dk = _by_heads(of_vqk, ctx.heads)
        sequences = Sequences(offsets, targets, ctx.max_length)
        silu_attention_backward(grads[0].contiguous().view(v.shape), q, k, v, sequences, dq, dk, dv)
        return of_vqk, None, None, None, None


def _by_heads(vqk: Tensor, heads: int) -> tuple[Tensor, ...]:
    return tuple(part.unflatten(1, (heads, -1)) for part in vqk.chunk(3, dim=1))


_apply: Any = torch.compiler.disable(SiluAttention.apply)
"""Its kernels are not torch.compile's."""


@torch.fx.wrap
def silu_attention(vqk: Tensor, offsets: Tensor, targets: Tensor, max_length: int, heads: int) -> Tensor:
    """Calls SiluAttention; a separate function, because TorchRec's trace of a model does not look into it."""
    return _apply(vqk, offsets, targets, max_length, heads)


class HstuLayer(nn.Module):
    """Maps tokens [T, width] to tokens [T, width]; tokens attend within their sequence."""

    def __init__(self, config: HstuConfig, device: torch.device | None = None, bf16: bool = False) -> None:
        """bf16: compute in bf16, with fp32 weights and residuals, as DLRMv4 is trained."""
        super().__init__()
        inner = config.heads * config.head_width
        self._heads, self._inner, self._max_length = config.heads, inner, config.max_length
        self._bf16 = bf16
        self.norm = nn.LayerNorm(config.width, device=device)
        self.project = nn.Linear(config.width, 4 * inner, device=device)
        self.attention_norm = nn.LayerNorm(inner, device=device)
        self.output = nn.Linear(inner, config.width, device=device)

    def forward(self, tokens: Tensor, offsets: Tensor, targets: Tensor) -> Tensor:
        """offsets: [B + 1], the first token of each sequence; targets: [B], number of candidates at its end."""
        # Split before the SiLU: a compiled layer then writes the projection's gradient from u's and the attention's in
        # one kernel, and u is not a view, whose gradient would be of the whole projection's size.
        u, vqk = self._linear(self.project, self.norm(tokens)).split([self._inner, 3 * self._inner], dim=1)
        u, vqk = functional.silu(u), functional.silu(vqk)
        attended = silu_attention(vqk, offsets, targets, self._max_length, self._heads)
        gated = self.attention_norm(attended.to(tokens.dtype)) * u
        return tokens + self._linear(self.output, gated)

    def _linear(self, linear: nn.Linear, x: Tensor) -> Tensor:
        """Applies `linear`, in bf16 in a bf16 layer; TorchRec's trace of a model would lose autocast."""
        if not self._bf16:
            return linear(x)
        return functional.linear(*(of.to(torch.bfloat16) for of in (x, linear.weight, linear.bias)))
