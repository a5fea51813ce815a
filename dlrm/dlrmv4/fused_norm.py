"""The norms of MLPs by fused kernels: what layers.py computes, with gradients of weights summed in a fixed order."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dlrm_bench.kernels.dense.norm import norm_backward, norm_forward
from dlrm_bench.kernels.dense.swish_norm import swish_norm_backward, swish_norm_forward


def fused_layer_norm(norm: nn.LayerNorm, x: Tensor) -> Tensor:
    """Returns the norm of x [R, width], computed in fp32, in x's format."""
    return _Norm.apply(x.contiguous(), norm.weight, norm.bias, norm.eps)


def fused_swish_norm(norm: nn.LayerNorm, x: Tensor) -> Tensor:
    """Returns x * sigmoid(norm(x)) of x [R, width], computed in fp32, in x's format."""
    return _SwishNorm.apply(x.contiguous(), norm.weight, norm.bias, norm.eps)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.eps = eps
        out = torch.empty_like(x)
        norm_forward(x, weight, bias, None, out, eps)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors
        dx, dnorm = torch.empty_like(x), weight.new_empty(2, len(weight))
        norm_backward(grads[0].contiguous(), x, weight, bias, None, None, dx, None, dnorm, ctx.eps)
        return dx, dnorm[0], dnorm[1], None


class _SwishNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.eps = eps
        out = torch.empty_like(x)
        swish_norm_forward(x, weight, bias, out, eps)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors
        dx, dnorm = torch.empty_like(x), weight.new_empty(2, len(weight))
        swish_norm_backward(grads[0].contiguous(), x, weight, bias, dx, dnorm, ctx.eps)
        return dx, dnorm[0], dnorm[1], None
