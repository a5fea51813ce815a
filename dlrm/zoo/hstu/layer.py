"""A layer of HSTU (Zhai et al. 2024, arXiv 2402.17152, eq. 1 to 3) over jagged sequences.

u, v, q, k = split(silu(norm(x) W1 + b1));   y = x + norm(attention(q, k, v)) * u W2
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from dlrm_bench.dlrm.zoo.hstu.config import HstuConfig
from dlrm_bench.dlrm.zoo.hstu.tokens import Layout, of_candidates
from dlrm_bench.kernels.dense.silu_attention import Sequences, silu_attention_backward, silu_attention_forward


def _attention(vqk: Tensor, offsets: Tensor, targets: Tensor, max_length: int, heads: int) -> Tensor:
    """Applies `kernels.silu_attention` to v, q and k of all heads, in this order: [T, 3 * heads * width]; returns
    [T, heads * width]."""
    v, q, k = _by_heads(vqk, heads)
    out = torch.empty_like(v, memory_format=torch.contiguous_format)  # the kernels write all rows
    silu_attention_forward(q, k, v, Sequences(offsets, targets, max_length), out)
    return out.flatten(1)


def _attention_backward(
    grad: Tensor, vqk: Tensor, offsets: Tensor, targets: Tensor, max_length: int, heads: int
) -> Tensor:
    """Returns the gradient of `vqk`, given that of the result."""
    v, q, k = _by_heads(vqk, heads)
    of_vqk = torch.empty(vqk.shape, dtype=vqk.dtype, device=vqk.device)
    dv, dq, dk = _by_heads(of_vqk, heads)
    of_out = grad.contiguous().view(v.shape)
    silu_attention_backward(of_out, q, k, v, Sequences(offsets, targets, max_length), dq, dk, dv)
    return of_vqk


def _by_heads(vqk: Tensor, heads: int) -> tuple[Tensor, ...]:
    return tuple(part.unflatten(1, (heads, -1)) for part in vqk.chunk(3, dim=1))


# Operators, which torch.compile calls as they are and compiles around. Uncompiled code calls the functions: an
# operator's dispatch would cost the host time.
_ATTENTION = torch.library.custom_op("dlrm_bench::silu_attention", _attention, mutates_args=())
_ATTENTION_BACKWARD = torch.library.custom_op(
    "dlrm_bench::silu_attention_backward", _attention_backward, mutates_args=()
)


@_ATTENTION.register_fake
def _(vqk: Tensor, offsets: Tensor, targets: Tensor, max_length: int, heads: int) -> Tensor:
    return vqk.new_empty(vqk.shape[0], vqk.shape[1] // 3)


@_ATTENTION_BACKWARD.register_fake
def _(grad: Tensor, vqk: Tensor, offsets: Tensor, targets: Tensor, max_length: int, heads: int) -> Tensor:
    return vqk.new_empty(vqk.shape)


class SiluAttention(torch.autograd.Function):
    """The attention of `_attention`, with its gradient."""

    @staticmethod
    def forward(ctx: Any, vqk: Tensor, offsets: Tensor, targets: Tensor, max_length: int, heads: int) -> Tensor:
        ctx.save_for_backward(vqk, offsets, targets)
        ctx.sizes = max_length, heads
        attention = _ATTENTION if torch.compiler.is_compiling() else _attention
        return attention(vqk, offsets, targets, max_length, heads)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        backward = _ATTENTION_BACKWARD if torch.compiler.is_compiling() else _attention_backward
        return backward(grads[0], *ctx.saved_tensors, *ctx.sizes), None, None, None, None


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

    def forward(self, tokens: Tensor, layout: Layout, candidates_only: bool = False) -> Tensor:
        """candidates_only: return the candidates' tokens alone, [C, width]."""
        projected = functional.silu(self._linear(self.project, self.norm(tokens)))
        u, vqk = projected.split([self._inner, 3 * self._inner], dim=1)
        attended: Tensor = SiluAttention.apply(vqk, layout.offsets, layout.targets, self._max_length, self._heads)
        if candidates_only:
            tokens, u, attended = (of_candidates(of, layout) for of in (tokens, u, attended))
        gated = self.attention_norm(attended.to(tokens.dtype)) * u
        return tokens + self._linear(self.output, gated)

    def _linear(self, linear: nn.Linear, x: Tensor) -> Tensor:
        """Applies `linear`, in bf16 in a bf16 layer; TorchRec's trace of a model would lose autocast."""
        if not self._bf16:
            return linear(x)
        return functional.linear(*(of.to(torch.bfloat16) for of in (x, linear.weight, linear.bias)))


class HstuLayers(nn.ModuleList):
    """Layers one after another. A module with a forward, so that torch.compile joins the end of each layer to the
    beginning of the next."""

    def forward(self, tokens: Tensor, layout: Layout) -> Tensor:
        """Returns the candidates' tokens, [C, width], of tokens [T, width]: the last layer makes no others, because
        nothing reads them."""
        for i, layer in enumerate(self):
            tokens = layer(tokens, layout, candidates_only=i == len(self) - 1)
        return tokens
