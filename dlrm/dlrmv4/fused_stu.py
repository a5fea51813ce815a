"""An STU layer by fused kernels: what stu.py computes, with its backward pass written out.

Memory kept for the backward pass, in bytes per token (bf16, width 512): 1,024 for the layer's input, 1,024 for
attention, and 4,096 for the projection unless it is recomputed; a last layer for candidates only keeps the input and
2,048 for keys and values. Three layers with 1,024 samples of 2,082 tokens keep 32.7 GB, or 10.9 GB with recomputation;
the backward pass of a layer also needs 8.7 GB for the gradients of the projection, 6.5 GB for those of the joined rows,
and a few more rows of tokens. Norms, gates and dropout masks are recomputed in the kernels that need them.

With tallies, the forward products over all tokens have factors in e4m3 (fp8_stu.py); a projection that the backward
pass recomputes is the same to the bit. Products of candidates alone and all others stay in the tokens' format.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dlrm_bench.dlrm.dlrmv4.attention import by_heads
from dlrm_bench.dlrm.dlrmv4.fp8_stu import LayerTallies, product, unfilled, weight_in_e4m3
from dlrm_bench.kernels.dense._dropout import Dropout
from dlrm_bench.kernels.dense.fp8 import Fp8
from dlrm_bench.kernels.dense.gated_norm import gated_norm_backward, gated_norm_forward
from dlrm_bench.kernels.dense.last_query_attention import (
    Jagged,
    last_query_attention_backward,
    last_query_attention_forward,
)
from dlrm_bench.kernels.dense.norm import norm_backward, norm_forward
from dlrm_bench.kernels.dense.silu_attention import Sequences, silu_attention_backward, silu_attention_forward

EPS = 1e-6
"""Epsilon of a layer's norms (modules/stu.py of the reference)."""


class LayerWeights(NamedTuple):
    """The weights of an STU layer, as in stu.py: fp32, or those of products in the tokens' number format."""

    norm_weight: Tensor
    norm_bias: Tensor
    uvqk: Tensor
    uvqk_bias: Tensor
    output_norm_weight: Tensor
    output_norm_bias: Tensor
    output: Tensor


class LayerOptions(NamedTuple):
    """Options of a layer: number of attention heads; divisor of attention; whether backward recomputes the projection;
    whether only candidates have an output; dropout of the output product's input; tallies of a layer with products in
    e4m3, whose tokens are bf16 (on CPUs also fp32); factors of the projection's columns, fp32 [4 * inner]."""

    heads: int
    length: int
    recompute: bool
    candidates: bool
    dropout: Dropout | None
    tallies: LayerTallies | None = None
    factors: Tensor | None = None


def fused_layer(tokens: Tensor, weights: LayerWeights, offsets: Tensor, options: LayerOptions) -> Tensor:
    """Returns the layer's tokens, [N, width], or the candidates', [B, width], of tokens [N, width].

    offsets: int64 [B + 1]. Rows past the last sequence must be finite. They have no part in the gradients of weights,
    and a gradient of 0.
    """
    layer = _CandidatesLayer if options.candidates else _Layer
    return layer.apply(tokens, offsets, options, *weights)


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, offsets: Tensor, options: LayerOptions, *given: Tensor) -> Tensor:
        exact, end, tallies = LayerWeights(*given), offsets[-1:], options.tallies
        columns = [_scaled(of, options.factors, tokens.dtype) for of in (exact.uvqk, exact.uvqk_bias)]
        weights = exact._replace(uvqk=columns[0], uvqk_bias=columns[1], output=exact.output.to(tokens.dtype))
        rounded = None
        if tallies is not None:
            rounded = weight_in_e4m3(_scaled(exact.uvqk, options.factors, torch.float32), tallies.uvqk_weight)
        projected, _ = _projected(tokens, weights, end, (weights.uvqk, weights.uvqk_bias), rounded, tallies)
        u, v, q, k = by_heads(projected, options.heads)
        attended = tokens.new_empty(len(tokens), len(weights.output_norm_bias))
        sequences = Sequences(offsets, torch.ones_like(offsets[1:]), options.length)
        silu_attention_forward(q, k, v, sequences, attended.unflatten(1, (options.heads, -1)))
        ctx.save_for_backward(tokens, *sequences[:2], attended, None if options.recompute else projected, *weights)
        ctx.options, ctx.rounded = options, rounded if options.recompute else None
        if tallies is None:
            joined = _joined(u.flatten(1), attended, weights, end, options)
            return torch.addmm(tokens, joined, weights.output)
        joined8 = unfilled(tokens, 3 * attended.shape[1], tallies.joined)
        _join(u.flatten(1), attended, weights, end, options, joined8)
        return product(joined8, weight_in_e4m3(exact.output, tallies.output_weight), tokens.dtype).add_(tokens)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        tokens, offsets, targets, attended, projected, *kept = ctx.saved_tensors
        weights, end, options, grad = LayerWeights(*kept), offsets[-1:], ctx.options, grads[0].contiguous()
        normed = None
        if projected is None:
            projected, normed = _projected(tokens, weights, end, (weights.uvqk, weights.uvqk_bias), ctx.rounded, None)
        u, v, q, k = by_heads(projected, options.heads)
        of_projected, of_attended = torch.empty_like(projected), torch.empty_like(attended)
        du, dv, dq, dk = by_heads(of_projected, options.heads)

        joined, of_joined = _through_join(
            grad, u.flatten(1), attended, weights, end, options, du.flatten(1), of_attended
        )
        of_output = torch.mm(joined.t(), grad)
        del joined
        of_out, sequences = of_attended.unflatten(1, (options.heads, -1)), Sequences(offsets, targets, options.length)
        silu_attention_backward(of_out, q, k, v, sequences, dq, dk, dv)
        of_normed = torch.mm(of_projected, weights.uvqk.t())
        of_tokens, normed, of_norm = _through_norm(of_normed, tokens, weights, end, grad, normed)
        of_uvqk, of_bias = torch.mm(normed.t(), of_projected), of_projected.sum(0, dtype=torch.float32)
        if options.factors is not None:
            of_uvqk, of_bias = of_uvqk * options.factors, of_bias * options.factors
        of_weights = LayerWeights(of_norm[0], of_norm[1], of_uvqk, of_bias, of_joined[0], of_joined[1], of_output)
        return of_tokens, None, None, *of_weights


class _CandidatesLayer(torch.autograd.Function):
    """Keys and values of all tokens; u, queries and all else of the candidates."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, offsets: Tensor, options: LayerOptions, *given: Tensor) -> Tensor:
        exact, ends, tallies = LayerWeights(*given), offsets[1:] - 1, options.tallies
        weights = exact._replace(output=exact.output.to(tokens.dtype))
        of_some, of_all = (_projection(exact, part, options.factors, tokens.dtype) for part in (0, 1))
        rounded = None
        if tallies is not None:
            rounded = weight_in_e4m3(_projection(exact, 1, options.factors, torch.float32)[0], tallies.uvqk_weight)
        last = tokens[ends]
        values_keys, normed = _projected(tokens, weights, offsets[-1:], of_all, rounded, tallies)
        gates_queries = _of_candidates(last, None if normed is None else normed[ends], weights, of_some)
        attended = gates_queries.new_empty(len(ends), len(weights.output_norm_bias))
        q, k, v = _last_heads(gates_queries, values_keys, options)
        jagged = Jagged(offsets, options.length)
        last_query_attention_forward(q, k, v, jagged, attended.unflatten(1, (options.heads, -1)))
        joined = _joined(gates_queries.chunk(2, dim=1)[0], attended, weights, None, options)
        again = (None, None) if options.recompute else (gates_queries, values_keys)
        ctx.save_for_backward(tokens, offsets, ends, attended, *again, *of_some, *of_all, *weights)
        ctx.options, ctx.rounded = options, rounded if options.recompute else None
        return torch.addmm(last, joined, weights.output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        tokens, offsets, ends, attended, gates_queries, values_keys, *kept = ctx.saved_tensors
        of_some, of_all, weights = kept[:2], kept[2:4], LayerWeights(*kept[4:])
        options, grad, end = ctx.options, grads[0].contiguous(), offsets[-1:]
        normed = None
        if values_keys is None:
            values_keys, normed = _projected(tokens, weights, end, of_all, ctx.rounded, None)
            gates_queries = _of_candidates(tokens[ends], None if normed is None else normed[ends], weights, of_some)
        of_gates_queries, of_values_keys = torch.empty_like(gates_queries), torch.empty_like(values_keys)
        of_attended = torch.empty_like(attended)

        gate, of_gate = (of.chunk(2, dim=1)[0] for of in (gates_queries, of_gates_queries))
        joined, of_joined = _through_join(grad, gate, attended, weights, None, options, of_gate, of_attended)
        of_output = torch.mm(joined.t(), grad)
        of_out = of_attended.unflatten(1, (options.heads, -1))
        q, k, v = _last_heads(gates_queries, values_keys, options)
        dq, dk, dv = _last_heads(of_gates_queries, of_values_keys, options)
        last_query_attention_backward(of_out, q, k, v, Jagged(offsets, options.length), dq, dk, dv)

        of_normed = torch.mm(of_values_keys, of_all[0].t())
        of_normed.index_add_(0, ends, torch.mm(of_gates_queries, of_some[0].t()))  # each row once
        of_tokens, normed, of_norm = _through_norm(of_normed, tokens, weights, end, None, normed)
        of_tokens.index_add_(0, ends, grad)
        parts = (normed[ends], of_gates_queries), (normed, of_values_keys)
        of_uvqk = _joined_parts([torch.mm(rows.t(), of) for rows, of in parts], options.factors)
        of_bias = _joined_parts([of.sum(0, dtype=torch.float32)[None] for _, of in parts], options.factors)[0]
        of_weights = LayerWeights(of_norm[0], of_norm[1], of_uvqk, of_bias, of_joined[0], of_joined[1], of_output)
        return of_tokens, None, None, *of_weights


def _scaled(columns: Tensor, factors: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Returns columns times their factors, in a format, rounded once and in one launch."""
    if factors is None:
        return columns.to(dtype)
    return torch.mul(columns, factors, out=columns.new_empty(columns.shape, dtype=dtype))


def _normed(tokens: Tensor, weights: LayerWeights, end: Tensor | None) -> Tensor:
    normed = torch.empty_like(tokens)
    norm_forward(tokens, weights.norm_weight, weights.norm_bias, end, normed, EPS, rounds=True)
    return normed


def _projected(
    tokens: Tensor,
    weights: LayerWeights,
    end: Tensor,
    projection: Sequence[Tensor],
    rounded: Fp8 | None,
    tallies: LayerTallies | None,
) -> tuple[Tensor, Tensor | None]:
    """Returns the product of normed tokens with a projection's weight plus its bias, and the normed tokens, or None if
    they are in e4m3: with `rounded`, that weight in e4m3."""
    weight, bias = projection
    if rounded is None:
        normed = _normed(tokens, weights, end)
        return torch.addmm(bias, normed, weight), normed
    normed8 = unfilled(tokens, tokens.shape[1], None if tallies is None else tallies.normed)
    norm_forward(tokens, weights.norm_weight, weights.norm_bias, end, normed8, EPS, rounds=True)
    return product(normed8, rounded, tokens.dtype, bias), None


def _joined(gate: Tensor, attended: Tensor, weights: LayerWeights, end: Tensor | None, options: LayerOptions) -> Tensor:
    joined = attended.new_empty(len(attended), 3 * attended.shape[1])
    _join(gate, attended, weights, end, options, joined)
    return joined


def _join(
    gate: Tensor,
    attended: Tensor,
    weights: LayerWeights,
    end: Tensor | None,
    options: LayerOptions,
    out: Tensor | Fp8,
) -> None:
    norm = weights.output_norm_weight, weights.output_norm_bias
    gated_norm_forward(gate, attended, *norm, end, options.dropout, out, EPS)


def _through_join(
    grad: Tensor,
    gate: Tensor,
    attended: Tensor,
    weights: LayerWeights,
    end: Tensor | None,
    options: LayerOptions,
    of_gate: Tensor,
    of_attended: Tensor,
) -> tuple[Tensor, Tensor]:
    """Returns the joined rows and the gradients of their norm, and stores those of gate and attention."""
    joined = torch.mm(grad, weights.output.t())  # the joined rows' gradient, overwritten below by the rows
    norm = weights.output_norm_weight, weights.output_norm_bias
    of_norm = norm[0].new_empty(2, len(norm[0]))
    gated_norm_backward(joined, gate, attended, *norm, end, options.dropout, of_gate, of_attended, of_norm, EPS)
    return joined, of_norm


def _through_norm(
    of_normed: Tensor,
    tokens: Tensor,
    weights: LayerWeights,
    end: Tensor,
    residual: Tensor | None,
    normed: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradient of the tokens, the normed tokens, and the gradients of the norm; unless `normed` is given,
    the normed tokens reuse of_normed."""
    of_tokens = torch.empty_like(tokens) if normed is None else of_normed
    again, norm = of_normed if normed is None else None, weights[:2]
    of_norm = norm[0].new_empty(2, len(norm[0]))
    norm_backward(of_normed, tokens, *norm, end, residual, of_tokens, again, of_norm, EPS, rounds=True)
    return of_tokens, of_normed if normed is None else normed, of_norm


def _of_candidates(
    tokens: Tensor, normed: Tensor | None, weights: LayerWeights, projection: Sequence[Tensor]
) -> Tensor:
    """Returns gates and queries, [rows, 2 * inner], of the candidates' tokens [rows, width]. normed: their norm, if all
    tokens' was computed in that format."""
    weight, bias = projection
    return torch.addmm(bias, _normed(tokens, weights, None) if normed is None else normed, weight)


def _projection(weights: LayerWeights, part: int, factors: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns weight and bias of gates and queries, part 0, or of values and keys, part 1, in a format."""
    of_part = None if factors is None else _parts(factors[None], part)
    weight, bias = (_scaled(_parts(of, part), of_part, dtype) for of in (weights.uvqk, weights.uvqk_bias[None]))
    return weight.flatten(1), bias.flatten()


def _joined_parts(parts: Sequence[Tensor], factors: Tensor | None) -> Tensor:
    """Returns columns u, v, q and k of those of both parts, times their factors."""
    u, q, v, k = (of for part in parts for of in part.chunk(2, dim=1))
    joined = torch.cat([u, v, q, k], dim=1)
    return joined if factors is None else joined * factors


def _parts(uvqk: Tensor, part: int) -> Tensor:
    """Returns columns u and q, part 0, or v and k, part 1, as a view [rows, 2, inner]."""
    return uvqk.unflatten(1, (4, -1))[:, part::2]


def _last_heads(gates_queries: Tensor, values_keys: Tensor, options: LayerOptions) -> tuple[Tensor, Tensor, Tensor]:
    """Returns q, k and v by heads."""
    (_, query), (value, key) = (
        of.unflatten(1, (2, options.heads, -1)).unbind(1) for of in (gates_queries, values_keys)
    )
    return query, key, value
