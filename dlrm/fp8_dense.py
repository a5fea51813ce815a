"""The dense network with its largest products in eight bits: those of the cross network and of the top MLP's first
layer, forward and by their inputs.

Activations and weights are e4m3, gradients e5m2, which has fewer digits for more powers of two; both are written by the
kernel that writes them in bf16. Weight gradients, all sums and everything else are as in ExplicitDense: bf16 factors,
summed up in fp32. Scales are constants, so that a run has no more state than in bf16.
"""

import math

import torch

from dlrm_bench.dlrm.batch_shape import BatchShape
from dlrm_bench.dlrm.config import ModelConfig
from dlrm_bench.dlrm.explicit_dense import ExplicitDense
from dlrm_bench.dlrm.peer_memory import PeerMemory
from dlrm_bench.dlrm.ranks import Ranks
from dlrm_bench.kernels.dense import cross, fused_cross, mlp
from dlrm_bench.kernels.dense.fp8 import E4M3, E5M2, Fp8, empty, fp8_product, quantise
from dlrm_bench.kernels.dense.fp8_weights import WeightCopies, WeightCopy, fp8_weights

# Scales: e4m3 has numbers up to 448 in steps of 1/512 near zero, e5m2 up to 57344 in steps of 1/65536. With random
# labels, learnt by heart, layers' outputs came to 338, u to 12, and weights to 0.15.
ACTIVATIONS = 1.0
WEIGHTS = 64.0
"""Of numbers up to 7."""
GRADIENTS = 4096.0
"""Over the samples of the global batch, as gradients are of its mean loss: of numbers up to 14 of a sample's own."""


class Fp8Dense(ExplicitDense):
    """See ExplicitDense; widths and cross_rank are multiples of 16, and on a GPU the fused cross kernels apply."""

    in_eight_bits = True

    def __init__(
        self,
        model: ModelConfig,
        seed: int,
        shape: BatchShape,
        ranks: Ranks,
        memory: PeerMemory | None = None,
    ) -> None:
        """Collective; as ExplicitDense's."""
        super().__init__(model, seed, shape, ranks, memory)
        samples, device, layers = shape.samples, ranks.device, range(model.cross_layers)
        width, rank = self.x0.shape[1], model.cross_rank
        gradients = 2.0 ** math.floor(math.log2(GRADIENTS * self.global_batch_size))

        def activations(columns: int) -> Fp8:
            return empty(samples, columns, E4M3, ACTIVATIONS, device)

        def gradient(columns: int) -> Fp8:
            return empty(samples, columns, E5M2, gradients, device)

        def copy(name: str) -> WeightCopy:
            rows, columns = self.working[name].shape
            sizes = ((rows, columns), (columns, rows))
            return WeightCopy(self.working[name], *(empty(*size, E4M3, WEIGHTS, device) for size in sizes))

        self._has_top = len(model.top_mlp) > 1
        """Whether the top MLP's first layer is not the one that the loss is computed with."""
        self._x8 = [None, *(activations(width) for _ in layers)]
        """By layer; the first one's x0 comes in bf16 from where it was looked up."""
        if not self._has_top:
            self._x8[-1] = None
        self._u8, self._du8 = [activations(rank) for _ in layers], [gradient(rank) for _ in layers]
        self._dy8 = [gradient(width) for _ in layers]
        self._dz8 = gradient(model.top_mlp[0])
        self._v8, self._w8 = ([copy(f"cross.{layer}.{name}") for layer in layers] for name in ("v", "w"))
        self._top8 = copy("top_mlp.0.weight") if self._has_top else None
        self._copies = WeightCopies([*self._v8, *self._w8, *([self._top8] if self._top8 else [])])

    def _is_fused(self, width: int, device: torch.device) -> bool:
        return True

    def copy_weights(self) -> None:
        """Rounds the working weights to eight bits: before the first forward after each update."""
        fp8_weights(self._copies)

    def cross_forward(self, layer: int, part: int = 0) -> None:
        """See ExplicitDense."""
        rows, x8, u8, out8 = self._rows[part], self._x8[layer], self._u8[layer], self._x8[layer + 1]
        x, u, y, out = (t[rows] for t in (self._x[layer], self._u[layer], self._y[layer], self._x[layer + 1]))
        if x8 is None:
            torch.mm(x, self.working[f"cross.{layer}.v"].t(), out=u)
            quantise(u, u8.rows(rows))
        else:
            fp8_product(x8.rows(rows), self._v8[layer].plain, u, u8.rows(rows))
        factors, bias = (u8.rows(rows), self._w8[layer].plain), self.working[f"cross.{layer}.bias"]
        fused_cross.fused_cross_forward(self.x0[rows], x, *factors, bias, y, out, out8.rows(rows) if out8 else None)

    def _top_layer_forward(self, layer: int, rows: slice) -> None:
        x8 = self._x8[-1]
        if layer > 0 or x8 is None or self._top8 is None:
            super()._top_layer_forward(layer, rows)
        else:
            bias = self.working["top_mlp.0.bias"]
            fp8_product(x8.rows(rows), self._top8.plain, self._top[1][rows], relu_bias=bias)

    def top_backward(self, part: int = 0) -> None:
        """See ExplicitDense."""
        rows = self._rows[part]
        dz8 = self._dz8.rows(rows)
        if len(self.model.top_mlp) == 2:
            quantise(self._dz_top[1][rows], dz8)
        super().top_backward(part)

    def _top_layer_backward(self, layer: int, part: int) -> None:
        rows = self._rows[part]
        dh, dz8 = self._dz_top[layer][rows], self._dz8.rows(rows)
        if layer == 0 and self._top8 is not None:
            fp8_product(dz8, self._top8.transposed, dh)
            return
        torch.mm(self._dz_top[layer + 1][rows], self.working[f"top_mlp.{layer}.weight"], out=dh)
        partials = self._partials[f"top_mlp.{layer - 1}"][part]
        mlp.bias_relu_backward(dh, self._top[layer][rows], dh, partials, dz8 if layer == 1 else None)

    def cross_backward(self, layer: int, part: int = 0) -> None:
        """See ExplicitDense."""
        rows, v = self._rows[part], self._v8[layer].transposed
        dx, dy, du = (t[rows] for t in (self._dx[layer], self._dy[layer], self._du[layer]))
        dy8, du8, x0 = self._dy8[layer].rows(rows), self._du8[layer].rows(rows), self.x0[rows]
        if layer == self.model.cross_layers - 1:
            cross.cross_output_backward(dx, x0, dy, self._partials[f"cross.{layer}"][part], dy8)
        fp8_product(dy8, self._w8[layer].transposed, du, du8)
        if layer > 0:
            dx_before, dy_before = (t[layer - 1][rows] for t in (self._dx, self._dy))
            partials, dy8_before = self._partials[f"cross.{layer - 1}"][part], self._dy8[layer - 1].rows(rows)
            fused_cross.fused_cross_backward(dx, du8, v, x0, dx_before, dy_before, partials, dy8_before)
        else:
            dxs, ys = ([t[rows] for t in tensors] for tensors in (self._dx, self._y))
            fused_cross.fused_cross_input_backward(dxs, ys, du8, v, self.dx0[rows])
