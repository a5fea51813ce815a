"""Forward products of an STU layer's tokens with factors in e4m3; fused_stu.py has the rest of the layer.

The kernels of the norm and of the gated norm write their outputs in e4m3, and in no other format. The backward pass is
that of bf16: it computes both outputs again, in bf16, and multiplies by the weights in bf16. Scales are constants, so
that a run has no more state than in bf16; numbers that e4m3 cannot represent are tallied.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dlrm_bench.dlrm.dense.tallies import Tallies
from dlrm_bench.kernels.dense.fp8 import E4M3, Fp8, fp8_product, rounded

# Scales: e4m3 has numbers up to 448 in steps of 1/512 near zero.
ACTIVATIONS = 4.0
"""Scale of normed tokens and of joined rows, for magnitudes up to 112. A norm's output is at most sqrt(width), 22.6,
times its weight, plus its bias. Attention, a third of a joined row, can be small, as it is divided by the longest
sequence; below 1/4096 it becomes 0, which changes the product less than rounding the gate does."""
WEIGHTS = 64.0
"""Scale of weights, for magnitudes up to 7."""


class LayerTallies(NamedTuple):
    """A layer's counts, each int64 [2] (kernels.dense.fp8.Fp8), of its tensors in e4m3."""

    normed: Tensor
    uvqk_weight: Tensor
    joined: Tensor
    output_weight: Tensor

    @staticmethod
    def names(layers: int) -> list[str]:
        """Returns the names of the tallies of all layers."""
        return [name for layer in range(layers) for name in LayerTallies._of_layer(layer)]

    @staticmethod
    def of(tallies: Tallies, layer: int) -> LayerTallies:
        """Returns a layer's counts, views."""
        return LayerTallies(*map(tallies.of, LayerTallies._of_layer(layer)))

    @staticmethod
    def _of_layer(layer: int) -> list[str]:
        return [f"layers.{layer}.{name}" for name in LayerTallies._fields]


def weight_in_e4m3(weight: Tensor, tally: Tensor) -> Fp8:
    """Returns a weight [rows, columns] as [columns, rows]: products sum over the last dimension of both factors."""
    return rounded(weight.t(), WEIGHTS, tally)


def unfilled(like: Tensor, columns: int, tally: Tensor | None) -> Fp8:
    """Returns memory for activations [rows of `like`, columns]. tally: None where they are computed a second time."""
    return Fp8(like.new_empty(len(like), columns, dtype=E4M3), ACTIVATIONS, tally)


def product(rows: Fp8, weight: Fp8, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """Returns the product, plus a bias of that dtype: bf16, on CPUs also fp32.

    Tensor cores add up the whole depth, 512 or 1,536, with some 14 bits (fp8_product): a small error beside that of the
    factors, up to 1/16 of each number.
    """
    out = torch.empty(len(rows.values), len(weight.values), dtype=dtype, device=rows.values.device)
    fp8_product(rows, weight, out, bias=bias)
    return out
