"""The small parts of DLRMv4's network, in fp32 or bf16 by their inputs.

Weights are fp32, or those of products already in the format of the input (DenseNetwork.rounded_weights). Products cast
weights to that format, as autocast does; norms always compute in fp32. Casts are explicit, so that a part gives the
same result for all callers.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from dlrm_bench.dlrm.dlrmv4.fused_norm import fused_layer_norm, fused_swish_norm

MLP_EPS = 1e-5
"""Epsilon of the norms of MLPs and of the output (the reference's ops/layer_norm.py)."""


def linear(layer: nn.Linear, x: Tensor) -> Tensor:
    """Returns the layer's product with x [*, in], in x's format."""
    return functional.linear(x, layer.weight.to(x.dtype), layer.bias.to(x.dtype))


def layer_norm(norm: nn.LayerNorm, x: Tensor, fused: bool = False) -> Tensor:
    """Returns the norm of x [R, width], computed in fp32, in x's format. fused: in one kernel each way."""
    if fused:
        return fused_layer_norm(norm, x)
    return norm(x.float()).to(x.dtype)


def swish_norm(norm: nn.LayerNorm, x: Tensor, fused: bool = False) -> Tensor:
    """Returns x * sigmoid(norm(x)) of x [R, width], computed in fp32, in x's format (pytorch_swish_layer_norm of the
    reference). fused: in one kernel each way."""
    if fused:
        return fused_swish_norm(norm, x)
    wide = x.float()
    return (wide * norm(wide).sigmoid()).to(x.dtype)


class Mlp(nn.Module):
    """Product, swish norm, product, and a norm unless `normed` is false."""

    def __init__(self, inputs: int, hidden: int, outputs: int, normed: bool = True, fused: bool = False) -> None:
        super().__init__()
        self._fused = fused
        self.first = nn.Linear(inputs, hidden)
        self.swish = nn.LayerNorm(hidden, eps=MLP_EPS)
        self.second = nn.Linear(hidden, outputs)
        self.norm = nn.LayerNorm(outputs, eps=MLP_EPS) if normed else None

    def forward(self, x: Tensor) -> Tensor:
        """Returns [R, outputs] of x [R, inputs], in x's format."""
        out = linear(self.second, swish_norm(self.swish, linear(self.first, x), self._fused))
        return out if self.norm is None else layer_norm(self.norm, out, self._fused)


def normal_(layer: nn.Linear, generator: torch.Generator | None) -> None:
    """Fill a layer's weights by Xavier's normal law and its bias with zeros."""
    nn.init.xavier_normal_(layer.weight, generator=generator)
    nn.init.zeros_(layer.bias)


def uniform_(layer: nn.Linear, generator: torch.Generator | None) -> None:
    """Fill a layer's weights by Xavier's uniform law and its bias with zeros."""
    nn.init.xavier_uniform_(layer.weight, generator=generator)
    nn.init.zeros_(layer.bias)
