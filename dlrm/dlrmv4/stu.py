"""A layer of DLRMv4's sequence transduction unit (STU; Zhai et al. 2024, arXiv 2402.17152) over jagged tokens.

u, v, q, k = norm(x) W1 + b1;   a = attention(q, k, v);   s = silu(u);   y = x + dropout([s, a, s * norm(a)]) W2

The reference's README says that x stands in the middle of the joined input; its code has a there (hstu_compute_output
calls pytorch_norm_mul_dropout with the attention's output as x).
"""

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from dlrm_bench.dlrm.dlrmv4.attention import attention, last_attention
from dlrm_bench.dlrm.dlrmv4.config import ModelConfig
from dlrm_bench.dlrm.dlrmv4.fp8_stu import LayerTallies
from dlrm_bench.dlrm.dlrmv4.fused_stu import EPS, LayerOptions, LayerWeights, fused_layer
from dlrm_bench.kernels.dense._dropout import Dropout


class StuLayer(nn.Module):
    """Maps tokens [N, width] to tokens [N, width], in fp32 or bf16 as they come."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self._heads, self._inner, self._dropout = config.heads, config.inner, config.layer_dropout
        self._recompute, self._fused = config.recompute_layers, config.kernels == "fused"
        self._tallies: LayerTallies | None = None
        self.norm_weight = nn.Parameter(torch.empty(config.width))
        self.norm_bias = nn.Parameter(torch.empty(config.width))
        self.uvqk_weight = nn.Parameter(torch.empty(config.width, 4 * config.inner))
        self.uvqk_bias = nn.Parameter(torch.empty(4 * config.inner))
        self.output_norm_weight = nn.Parameter(torch.empty(config.inner))
        self.output_norm_bias = nn.Parameter(torch.empty(config.inner))
        self.output_weight = nn.Parameter(torch.empty(3 * config.inner, config.width))

    def init_weights(self, generator: torch.Generator | None) -> None:
        """Fill the weights as the reference does: Xavier's uniform law, norms 1, biases 0."""
        for weight in (self.uvqk_weight, self.output_weight):
            nn.init.xavier_uniform_(weight, generator=generator)
        for weight in (self.norm_weight, self.output_norm_weight):
            nn.init.ones_(weight)
        for bias in (self.norm_bias, self.uvqk_bias, self.output_norm_bias):
            nn.init.zeros_(bias)

    def round_products(self, tallies: LayerTallies) -> None:
        """Gives the forward products factors in e4m3 from now on (fp8_stu.py). For fused kernels."""
        assert self._fused, "fused kernels"
        self._tallies = tallies

    def rounded_weights(self, factors: bool) -> list[str]:
        """Returns the names of the weights that are used rounded to the tokens' format, and in no other way. factors:
        whether there are factors of columns."""
        if self._tallies is not None:
            return []
        return ["output_weight"] if factors else ["uvqk_weight", "output_weight"]

    def forward(
        self,
        tokens: Tensor,
        offsets: Tensor,
        length: int,
        candidates: bool = False,
        dropout: Dropout | None = None,
        factors: Tensor | None = None,
    ) -> Tensor:
        """Returns tokens [N, width], or the candidates' tokens only, [B, width].

        offsets: sequence b is tokens offsets[b] to offsets[b + 1] - 1, int64 [B + 1]. length: the divisor of
        attention; no sequence is longer. dropout: the masks of fused kernels; plain ones draw from torch's generator.
        factors: of the projection's columns, fp32 [4 * inner], from `factors_of_columns`; 1 unless given.
        """
        if self._fused:
            options = LayerOptions(self._heads, length, self._recompute, candidates, dropout, self._tallies, factors)
            return fused_layer(tokens, self._weights(), offsets, options)
        uvqk: tuple[Tensor, Tensor] = self.uvqk_weight, self.uvqk_bias
        if factors is not None:
            uvqk = self.uvqk_weight * factors, self.uvqk_bias * factors
        layer = self._of_candidates if candidates else self._of_all
        if self._recompute and torch.is_grad_enabled():
            return checkpoint(layer, tokens, uvqk, offsets, length, use_reentrant=False)
        return layer(tokens, uvqk, offsets, length)

    def _weights(self) -> LayerWeights:
        return LayerWeights(
            self.norm_weight,
            self.norm_bias,
            self.uvqk_weight,
            self.uvqk_bias,
            self.output_norm_weight,
            self.output_norm_bias,
            self.output_weight,
        )

    def _of_all(self, tokens: Tensor, uvqk: tuple[Tensor, Tensor], offsets: Tensor, length: int) -> Tensor:
        projected = _project(self.normed(tokens), uvqk, slice(None))
        attended = attention(projected, offsets, self._heads, length)
        return self.output(tokens, functional.silu(projected[:, : self._inner]), attended)

    def _of_candidates(self, tokens: Tensor, uvqk: tuple[Tensor, Tensor], offsets: Tensor, length: int) -> Tensor:
        u, v, q, k = (slice(part * self._inner, (part + 1) * self._inner) for part in range(4))
        normed, ends = self.normed(tokens), offsets[1:] - 1
        gate, query = _project(normed[ends], uvqk, u), _project(normed[ends], uvqk, q)
        key, value = _project(normed, uvqk, k), _project(normed, uvqk, v)
        attended = last_attention(query, key, value, offsets, self._heads, length)
        return self.output(tokens[ends], functional.silu(gate), attended)

    def normed(self, tokens: Tensor) -> Tensor:
        """Returns the norm of tokens [N, width], in their format."""
        return _norm(tokens, self.norm_weight, self.norm_bias).to(tokens.dtype)

    def output(self, tokens: Tensor, gate: Tensor, attended: Tensor) -> Tensor:
        """Returns the layer's tokens of those it was given [N, width], the gate silu(u) and attention [N, inner]."""
        gate, wide = gate.float(), attended.float()
        gated = gate * _norm(attended, self.output_norm_weight, self.output_norm_bias)
        joined = functional.dropout(torch.cat([gate, wide, gated], dim=1), self._dropout, self.training)
        return torch.addmm(tokens, joined.to(tokens.dtype), self.output_weight.to(tokens.dtype))


def factors_of_columns(attention: Tensor, inner: int) -> Tensor:
    """Returns factors of a projection's columns that multiply attention by `attention`, fp32 []: attention is linear in
    its values, and there are fewer weights than values."""
    factors = attention.new_ones(4 * inner)
    factors[inner : 2 * inner].copy_(attention)
    return factors


def _project(normed: Tensor, uvqk: tuple[Tensor, Tensor], columns: slice) -> Tensor:
    """Returns `columns` of u, v, q and k of all heads side by side, [N, 4 * inner], of normed tokens [N, width]."""
    weight, bias = uvqk[0][:, columns], uvqk[1][columns]
    return torch.addmm(bias.to(normed.dtype), normed, weight.to(normed.dtype))


def _norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Returns the norm of x in fp32; weights are rounded to x's format first, as the reference's are."""
    weight, bias = (of.to(x.dtype).float() for of in (weight, bias))
    return functional.layer_norm(x.float(), weight.shape, weight, bias, EPS)
