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
    """Applies `kernels.silu_attention` to a projection [T, heads * 4 * width] with u, v, q and k of all heads, in this
    order: returns u and the result, each [T, heads * width]. A slice outside would give u a gradient of the whole
    projection's size, to be added to the other."""

    @staticmethod
    def forward(
        ctx: Any, projected: Tensor, offsets: Tensor, targets: Tensor, max_length: int, heads: int
    ) -> tuple[Tensor, Tensor]:
        sequences = Sequences(offsets, targets, max_length)
        u, v, q, k = _by_heads(projected, heads)
        out = torch.zeros_like(v, memory_format=torch.contiguous_format)
        silu_attention_forward(q, k, v, sequences, out)
        ctx.save_for_backward(projected, offsets, targets)
        ctx.max_length, ctx.heads = max_length, heads
        return u.flatten(1), out.flatten(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        of_u, of_out = grads
        projected, offsets, targets = ctx.saved_tensors
        sequences = Sequences(offsets, targets, ctx.max_length)
        _, v, q, k = _by_heads(projected, ctx.heads)
        of_projected = torch.zeros_like(projected)
        du, dv, dq, dk = _by_heads(of_projected, ctx.heads)
        du.copy_(of_u.unflatten(1, v.shape[1:]))
        silu_attention_backward(of_out.contiguous().view(v.shape), q, k, v, sequences, dq, dk, dv)
        return of_projected, None, None, None, None


def _by_heads(projected: Tensor, heads: int) -> tuple[Tensor, ...]:
    return tuple(part.unflatten(1, (heads, -1)) for part in projected.chunk(4, dim=1))


_apply: Any = torch.compiler.disable(SiluAttention.apply)
"""Its kernels are not torch.compile's."""


@torch.fx.wrap
def silu_attention(
    projected: Tensor, offsets: Tensor, targets: Tensor, max_length: int, heads: int
) -> tuple[Tensor, Tensor]:
    """Calls SiluAttention; a separate function, because TorchRec's trace of a model does not look into it."""
    return _apply(projected, offsets, targets, max_length, heads)


class HstuLayer(nn.Module):
    """Maps tokens [T, width] to tokens [T, width]; tokens attend within their sequence."""

    def __init__(self, config: HstuConfig, device: torch.device | None = None, bf16: bool = False) -> None:
        """bf16: compute in bf16, with fp32 weights and residuals, as DLRMv4 is trained."""
        super().__init__()
        inner = config.heads * config.head_width
        self._heads, self._max_length = config.heads, config.max_length
        self._bf16 = bf16
        self.norm = nn.LayerNorm(config.width, device=device)
        self.project = nn.Linear(config.width, 4 * inner, device=device)
        self.attention_norm = nn.LayerNorm(inner, device=device)
        self.output = nn.Linear(inner, config.width, device=device)

    def forward(self, tokens: Tensor, offsets: Tensor, targets: Tensor) -> Tensor:
        """offsets: [B + 1], the first token of each sequence; targets: [B], number of candidates at its end."""
        projected = functional.silu(self._linear(self.project, self.norm(tokens)))
        u, attended = silu_attention(projected, offsets, targets, self._max_length, self._heads)
        gated = self.attention_norm(attended.to(tokens.dtype)) * u
        return tokens + self._linear(self.output, gated)

    def _linear(self, linear: nn.Linear, x: Tensor) -> Tensor:
        """Applies `linear`, in bf16 in a bf16 layer; TorchRec's trace of a model would lose autocast."""
        if not self._bf16:
            return linear(x)
        return functional.linear(*(of.to(torch.bfloat16) for of in (x, linear.weight, linear.bias)))
