"""The dense network with 8-bit factors in its largest products: forward, input gradients and weight gradients of the
cross network and of the top MLP's first layer.

Activations and weights are e4m3, gradients e5m2, which trades precision for range; the kernel that computes a factor
writes it in 8 bits, and in bf16 only if something else reads it. Sums, bias gradients and all other layers are as in
ExplicitDense. Scales are constants, so that a run has no more state than in bf16; numbers that 8 bits cannot represent
are tallied.
"""

import math

import torch

from dlrm_bench.dlrm.batch_shape import BatchShape
from dlrm_bench.dlrm.dcnv2.config import ModelConfig
from dlrm_bench.dlrm.dcnv2.explicit_dense import ExplicitDense
from dlrm_bench.dlrm.runtime.peer_memory import PeerMemory
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.kernels.dense import fused_cross
from dlrm_bench.kernels.dense.fp8 import E4M3, E5M2, Fp8, Fp8Pair, empty, empty_pair, fp8_product
from dlrm_bench.kernels.dense.fp8_copies import fp8_copies, partial_rows
from dlrm_bench.kernels.dense.fp8_weights import WeightCopies, WeightCopy, fp8_weights

# Scales: e4m3 has numbers up to 448 in steps of 1/512 near zero, e5m2 up to 57344 in steps of 1/65536. When random
# labels were memorized, layers' outputs reached 448, y 176, u 26, and weights 0.15.
ACTIVATIONS = 1.0
WEIGHTS = 64.0
"""Scale of weights, for magnitudes up to 7."""
GRADIENTS = 4096.0
"""Scale of gradients, to be multiplied by the global batch, whose mean loss they belong to: for magnitudes up to 14 per
sample."""

_OF_LAYER = ("x", "u", "y", "dy", "du", "v", "w")
"""8-bit tensors of a cross layer."""


class Fp8Dense(ExplicitDense):
    """See ExplicitDense; a part's samples and the widths must be multiples of 16, the top MLP must have more than one
    layer, and on a GPU the fused cross kernels must apply."""

    in_eight_bits = True

    def __init__(
        self,
        model: ModelConfig,
        seed: int,
        shape: BatchShape,
        ranks: Ranks,
        memory: PeerMemory | None = None,
    ) -> None:
        """See ExplicitDense. Collective."""
        super().__init__(model, seed, shape, ranks, memory)
        device, layers, rows = ranks.device, range(model.cross_layers), shape.part_samples
        width, rank, hidden = self.x0.shape[1], model.cross_rank, model.top_mlp[0]
        gradients = 2.0 ** math.floor(math.log2(GRADIENTS * self.global_batch_size))

        tally = self.tallies.of

        def activations(name: str, columns: int) -> Fp8Pair:
            return empty_pair(shape.samples, columns, E4M3, ACTIVATIONS, device, tally(name))

        def gradient(name: str, columns: int) -> Fp8Pair:
            return empty_pair(shape.samples, columns, E5M2, gradients, device, tally(name))

        def copy(name: str) -> WeightCopy:
            rows, columns = self.working[name].shape
            plain, transposed = (empty(*size, E4M3, WEIGHTS, device) for size in ((rows, columns), (columns, rows)))
            return WeightCopy(self.working[name], plain._replace(tally=tally(name)), transposed)

        def tiles(layer: int) -> list[Fp8]:
            of_layer = tally(f"cross.{layer}.y")
            return [fused_cross.empty_y(rows, width, ACTIVATIONS, device, of_layer) for _ in self._rows]

        self._x8 = [activations(f"cross.{layer}.x", width) for layer in layers]
        self._x8.append(activations("top_mlp.0.x", width))
        self._u8 = [activations(f"cross.{layer}.u", rank) for layer in layers]
        self._du8 = [gradient(f"cross.{layer}.du", rank) for layer in layers]
        self._y8 = [tiles(layer) for layer in layers]
        """Each 8-bit y, by layer and part."""
        self._dy8 = [gradient(f"cross.{layer}.dy", width) for layer in layers]
        self._dz8 = gradient("top_mlp.0.dz", hidden)
        self._v8, self._w8 = ([copy(f"cross.{layer}.{name}") for layer in layers] for name in ("v", "w"))
        self._top8 = copy("top_mlp.0.weight")
        self._copies = WeightCopies([*self._v8, *self._w8, self._top8])
        # Tensors that exist only in 8 bits.
        self._u, self._du, self._y, self._dy = [], [], [], []
        sizes = {f"cross.{layers[-1]}": (fused_cross.partial_rows(rows, width, device), width)}
        if len(model.top_mlp) > 2:  # else the loss computes this layer's bias gradient
            sizes["top_mlp.0"] = partial_rows(rows), hidden
        self._partials |= {name: torch.zeros(shape.parts, *size, device=device) for name, size in sizes.items()}

    def _rounded(self) -> list[str]:
        layers = [f"cross.{layer}.{name}" for layer in range(self.model.cross_layers) for name in _OF_LAYER]
        return [*layers, "top_mlp.0.x", "top_mlp.0.dz", "top_mlp.0.weight"]

    def _is_fused(self, width: int, device: torch.device) -> bool:
        return True

    def copy_weights(self) -> None:
        """Rounds the working weights to 8 bits; must run before the first forward after each update."""
        fp8_weights(self._copies)

    def cross_forward(self, layer: int, part: int = 0) -> None:
        """See ExplicitDense; the last layer's output exists only in 8 bits."""
        rows, x0, y8 = self._rows[part], self.x0[self._rows[part]], self._y8[layer][part]
        x8, u8, out8 = (pair.rows(rows) for pair in (self._x8[layer], self._u8[layer], self._x8[layer + 1]))
        if layer == 0:
            fp8_copies(x0, x8)
        fp8_product(x8.plain, self._v8[layer].plain, u8)
        x, out = self._x[layer][rows], self._x[layer + 1][rows] if layer < self.model.cross_layers - 1 else None
        factors, bias = (u8.plain, self._w8[layer].plain), self.working[f"cross.{layer}.bias"]
        fused_cross.fused_cross_forward(x0, x, *factors, bias, y8, out, out8)

    def _top_layer_forward(self, layer: int, rows: slice) -> None:
        if layer > 0:
            super()._top_layer_forward(layer, rows)
            return
        x8, bias = self._x8[-1].rows(rows), self.working["top_mlp.0.bias"]
        fp8_product(x8.plain, self._top8.plain, self._top[1][rows], bias)

    def top_backward(self, part: int = 0) -> None:
        """See ExplicitDense; also computes the gradient of the last cross layer's y."""
        if len(self.model.top_mlp) == 2:  # the loss writes this gradient in bf16
            rows = self._rows[part]
            fp8_copies(self._dz_top[1][rows], self._dz8.rows(rows))
        super().top_backward(part)

    def _top_layer_backward(self, layer: int, part: int) -> None:
        rows, last = self._rows[part], self.model.cross_layers - 1
        dh, dz8 = self._dz_top[layer][rows], self._dz8.rows(rows)
        if layer == 0:
            dy8, partials = self._dy8[last].rows(rows), self._partials[f"cross.{last}"][part]
            factors = dz8.plain, self._top8.transposed
            fused_cross.fused_cross_backward(None, *factors, self.x0[rows], dh, dy8, partials)
        elif layer == 1:
            torch.mm(self._dz_top[2][rows], self.working["top_mlp.1.weight"], out=dh)
            fp8_copies(dh, dz8, self._top[1][rows], self._partials["top_mlp.0"][part])
        else:
            super()._top_layer_backward(layer, part)

    def cross_backward(self, layer: int, part: int = 0) -> None:
        """See ExplicitDense; each layer's backward also computes the gradient of the previous layer's y."""
        rows, v, x0 = self._rows[part], self._v8[layer].transposed, self.x0[self._rows[part]]
        dy8, du8 = self._dy8[layer].rows(rows), self._du8[layer].rows(rows)
        fp8_product(dy8.plain, self._w8[layer].transposed, du8)
        if layer > 0:
            dx, dx_before = self._dx[layer][rows], self._dx[layer - 1][rows]
            partials, dy8_before = self._partials[f"cross.{layer - 1}"][part], self._dy8[layer - 1].rows(rows)
            fused_cross.fused_cross_backward(dx, du8.plain, v, x0, dx_before, dy8_before, partials)
        else:
            dxs, ys = [dx[rows] for dx in self._dx], [of_layer[part] for of_layer in self._y8]
            fused_cross.fused_cross_input_backward(dxs, ys, du8.plain, v, self.dx0[rows])

    def _top_weight_gradient(self, layer: int) -> None:
        if layer > 0:
            super()._top_weight_gradient(layer)
        else:
            self._weight_gradient(self._dz8, self._x8[-1], "top_mlp.0.weight")

    def cross_weight_gradients(self, layer: int) -> None:
        """See ExplicitDense."""
        self._weight_gradient(self._dy8[layer], self._u8[layer], f"cross.{layer}.w")
        self._weight_gradient(self._du8[layer], self._x8[layer], f"cross.{layer}.v")
        self._bias_gradient(f"cross.{layer}")

    def _weight_gradient(self, of_output: Fp8Pair, of_input: Fp8Pair, name: str) -> None:
        # Sums over the batch are the longest, and exact ones take hardly longer: 24.1 us for w, instead of 23.7.
        fp8_product(of_output.transposed, of_input.transposed, self.grad[name], exact=True)
