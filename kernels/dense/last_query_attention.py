"""Causal SiLU attention of each sequence's last token only, for a last layer of which only that row is read.

The last token attends to its whole sequence, itself included: silu(q k^T / sqrt(D)) / max_length, as in
`silu_attention` with the last token as the only target. Keys and values are read once, and their gradients written
once: the kernels are memory-bound. A sequence is cut into runs of 256 tokens, whose sums are added up in order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dlrm_bench.kernels._triton import cdiv, jit, next_power_of_2, tl
from dlrm_bench.kernels.dense.zero_tail import zero_tail

_RUN = 256  # tokens per program
_TILE = 16  # tokens that a program loads at once
_NUM_WARPS = 2


class Jagged(NamedTuple):
    """The sequences of tokens.

    offsets: int32 or int64 [B + 1], tokens of sequence b are offsets[b] to offsets[b + 1] - 1. max_length: an upper
    bound of the lengths; not checked, because lengths are on the device.
    """

    offsets: Tensor
    max_length: int


class LastQueryAttention(torch.autograd.Function):
    """Differentiable `last_query_attention_forward` of q [B, H, D], k [T, H, D], v [T, H, V]: returns [B, H, V]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, max_length: int) -> Tensor:
        out = v.new_empty(len(q), *v.shape[1:])
        last_query_attention_forward(q, k, v, Jagged(offsets, max_length), out)
        ctx.save_for_backward(q, k, v, offsets)
        ctx.max_length = max_length
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, offsets = ctx.saved_tensors
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        last_query_attention_backward(grads[0].contiguous(), q, k, v, Jagged(offsets, ctx.max_length), dq, dk, dv)
        return dq, dk, dv, None, None


def last_query_attention_forward(q: Tensor, k: Tensor, v: Tensor, sequences: Jagged, out: Tensor) -> None:
    """Stores the attention output of every sequence's last token in `out`: [B, H, V], overwritten; 0 if empty.

    q: [B, H, D], the last tokens' queries; k: [T, H, D], v: [T, H, V], T tokens of all sequences, H heads. One dtype,
    fp32, bf16 or fp16; D and V powers of two, at least 16. A token's heads are contiguous; any token stride. Sums in
    fp32.
    """
    _check(q, k, v, out, sequences)
    forward = triton_last_query_attention_forward if q.is_cuda else plain_last_query_attention_forward
    forward(q, k, v, sequences, out)


def last_query_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, sequences: Jagged, dq: Tensor, dk: Tensor, dv: Tensor
) -> None:
    """Stores the gradients of `last_query_attention_forward`'s inputs in dq, dk and dv, shaped like the inputs.

    grad: [B, H, V], the gradient of the output. Rows of dk and dv past the last sequence become 0. Equal inputs give
    equal bits: no sum uses atomics.
    """
    _check(q, k, v, grad, sequences)
    assert dq.shape == q.shape and dk.shape == k.shape and dv.shape == v.shape, "gradients are shaped like inputs"
    backward = triton_last_query_attention_backward if q.is_cuda else plain_last_query_attention_backward
    backward(grad, q, k, v, sequences, dq, dk, dv)
    zero_tail([of.flatten(1) for of in (dk, dv)], sequences.offsets[-1:])


def _check(q: Tensor, k: Tensor, v: Tensor, out: Tensor, sequences: Jagged) -> None:
    assert len(q) == len(out) == len(sequences.offsets) - 1, "q and the output: one row for each sequence"
    assert q.shape[1:] == k.shape[1:] and k.shape[:2] == v.shape[:2] and out.shape[1:] == v.shape[1:], "[.., H, D or V]"
    assert q.dtype == k.dtype == v.dtype == out.dtype, "one dtype"
    for tensor in (q, k, v, out):
        width = tensor.shape[2]
        assert width >= 16 and width == next_power_of_2(width), f"head width: a power of two, at least 16, not {width}"
        assert tensor.stride(2) == 1 and tensor.stride(1) == width, "a token's heads must be contiguous"


def _scores(q: Tensor, k: Tensor, sequences: Jagged) -> tuple[Tensor, Tensor]:
    """Returns each token's sequence, int64 [N], N tokens of all sequences, and its scores, [N, H], at least fp32."""
    lengths = sequences.offsets.long().diff()
    of = torch.arange(len(q), device=q.device).repeat_interleave(lengths)
    exact = torch.promote_types(q.dtype, torch.float32)
    return of, (q.to(exact)[of] * k[: len(of)].to(exact)).sum(2) * q.shape[2] ** -0.5


def _summed(by_token: Tensor, of: Tensor, sequences: int) -> Tensor:
    """Returns sums over the tokens of each sequence: [sequences, H, ...]."""
    return by_token.new_zeros(sequences, *by_token.shape[1:]).index_add_(0, of, by_token)


def plain_last_query_attention_forward(q: Tensor, k: Tensor, v: Tensor, sequences: Jagged, out: Tensor) -> None:
    """Computes `last_query_attention_forward` in PyTorch."""
    of, scores = _scores(q, k, sequences)
    weights = torch.nn.functional.silu(scores) / sequences.max_length
    out.copy_(_summed(weights[:, :, None] * v[: len(of)].to(scores.dtype), of, len(q)))


def plain_last_query_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, sequences: Jagged, dq: Tensor, dk: Tensor, dv: Tensor
) -> None:
    """Computes `last_query_attention_backward` in PyTorch."""
    of, scores = _scores(q, k, sequences)
    exact, count, scale = scores.dtype, len(of), q.shape[2] ** -0.5
    sigmoid = scores.sigmoid()
    slopes = sigmoid * (1 + scores * (1 - sigmoid)) * scale / sequences.max_length
    of_out = grad.to(exact)[of]
    of_scores = ((of_out * v[:count].to(exact)).sum(2) * slopes)[:, :, None]
    dq.copy_(_summed(of_scores * k[:count].to(exact), of, len(q)))
    dk[:count] = (of_scores * q.to(exact)[of]).to(dk.dtype)
    dv[:count] = ((scores * sigmoid / sequences.max_length)[:, :, None] * of_out).to(dv.dtype)


def triton_last_query_attention_forward(q: Tensor, k: Tensor, v: Tensor, sequences: Jagged, out: Tensor) -> None:
    """Computes `last_query_attention_forward` in two kernels: sums of runs of 256 tokens, then their totals."""
    runs, partials = _partials(out, sequences)
    _last_query_forward_kernel[(runs, q.shape[1], len(q))](
        q, k, v, partials, *_common(q, k, v, sequences), **_sizes(q, v)
    )
    _add_up_runs(partials, sequences, out)


def triton_last_query_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, sequences: Jagged, dq: Tensor, dk: Tensor, dv: Tensor
) -> None:
    """Computes `last_query_attention_backward` in two kernels: one for dk, dv and partial sums of dq, one for dq."""
    runs, partials = _partials(dq, sequences)
    rows = grad.stride(0), dk.stride(0), dv.stride(0)
    _last_query_backward_kernel[(runs, q.shape[1], len(q))](
        q, k, v, grad, partials, dk, dv, *_common(q, k, v, sequences), *rows, **_sizes(q, v)
    )
    _add_up_runs(partials, sequences, dq)


def _partials(out: Tensor, sequences: Jagged) -> tuple[int, Tensor]:
    """Returns the number of runs in the longest sequence, and memory for their sums: fp32 [runs, B, H, ...]."""
    runs = max(cdiv(sequences.max_length, _RUN), 1)
    return runs, torch.empty(runs, *out.shape, dtype=torch.float32, device=out.device)


def _add_up_runs(partials: Tensor, sequences: Jagged, out: Tensor) -> None:
    _, count, heads, width = partials.shape
    _last_query_sum_kernel[(heads, count)](
        partials, out, sequences.offsets, out.stride(0), count, heads, width=width, run=_RUN, num_warps=1
    )


def _common(q: Tensor, k: Tensor, v: Tensor, sequences: Jagged) -> tuple[object, ...]:
    scale, share = q.shape[2] ** -0.5, 1 / sequences.max_length
    return sequences.offsets, scale, share, q.stride(0), k.stride(0), v.stride(0), len(q), q.shape[1]


def _sizes(q: Tensor, v: Tensor) -> dict[str, object]:
    return {"depth": q.shape[2], "width": v.shape[2], "run": _RUN, "tile": _TILE, "num_warps": _NUM_WARPS}


@jit
def _row(base, row, index, head, columns: tl.constexpr):
    """Loads a head of one row, fp32 [1, columns]."""
    at = index.to(tl.int64) * row + head * columns + tl.arange(0, columns)
    return tl.load(base + at).to(tl.float32)[None, :]


@jit
def _at(start, token, row, head, columns: tl.constexpr):
    return (start + token).to(tl.int64)[:, None] * row + head * columns + tl.arange(0, columns)[None, :]


@jit
def _keys_and_values(k, v, start, token, length, k_row, v_row, head, depth: tl.constexpr, width: tl.constexpr):
    """Loads one head of these tokens of a sequence, fp32 [tile, depth] and [tile, width]; 0 past its end."""
    inside = (token < length)[:, None]
    keys = tl.load(k + _at(start, token, k_row, head, depth), inside, other=0.0)
    values = tl.load(v + _at(start, token, v_row, head, width), inside, other=0.0)
    return keys.to(tl.float32), values.to(tl.float32)


@jit
def _scores_of(query, keys, scale):
    """Returns the scores of keys, fp32 [tile], and the sigmoids of the scores."""
    score = tl.sum(keys * query, 1) * scale
    return score, tl.sigmoid(score)


@jit
def _store_partial(partials, total, run, sequence, head, count, heads, columns: tl.constexpr):
    at = ((run.to(tl.int64) * count + sequence) * heads + head) * columns
    tl.store(partials + at + tl.arange(0, columns), total)


@jit
def _last_query_forward_kernel(
    q, k, v, partials, offsets, scale, share, q_row, k_row, v_row, count, heads,
    depth: tl.constexpr, width: tl.constexpr, run: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    first, head, sequence = tl.program_id(0) * run, tl.program_id(1), tl.program_id(2)
    start = tl.load(offsets + sequence)
    length = (tl.load(offsets + sequence + 1) - start).to(tl.int32)
    if first < length:
        query = _row(q, q_row, sequence, head, depth)
        total = tl.zeros([tile, width], tl.float32)
        key = first
        while key < tl.minimum(first + run, length):
            token = key + tl.arange(0, tile)
            keys, values = _keys_and_values(k, v, start, token, length, k_row, v_row, head, depth, width)
            score, sigmoid = _scores_of(query, keys, scale)
            total += (score * sigmoid * share)[:, None] * values
            key += tile
        _store_partial(partials, tl.sum(total, 0), tl.program_id(0), sequence, head, count, heads, width)


@jit
def _last_query_backward_kernel(
    q, k, v, grad, partials, dk, dv, offsets, scale, share, q_row, k_row, v_row, count, heads, grad_row, dk_row, dv_row,
    depth: tl.constexpr, width: tl.constexpr, run: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    first, head, sequence = tl.program_id(0) * run, tl.program_id(1), tl.program_id(2)
    start = tl.load(offsets + sequence)
    length = (tl.load(offsets + sequence + 1) - start).to(tl.int32)
    if first < length:
        query = _row(q, q_row, sequence, head, depth)
        of_out = _row(grad, grad_row, sequence, head, width)
        total = tl.zeros([tile, depth], tl.float32)
        key = first
        while key < tl.minimum(first + run, length):
            token = key + tl.arange(0, tile)
            inside = (token < length)[:, None]
            keys, values = _keys_and_values(k, v, start, token, length, k_row, v_row, head, depth, width)
            score, sigmoid = _scores_of(query, keys, scale)
            of_values = (score * sigmoid * share)[:, None] * of_out
            slope = sigmoid * (1 + score * (1 - sigmoid)) * (share * scale)
            of_score = (tl.sum(values * of_out, 1) * slope)[:, None]
            tl.store(dv + _at(start, token, dv_row, head, width), of_values.to(dv.dtype.element_ty), inside)
            tl.store(dk + _at(start, token, dk_row, head, depth), (of_score * query).to(dk.dtype.element_ty), inside)
            total += of_score * keys
            key += tile
        _store_partial(partials, tl.sum(total, 0), tl.program_id(0), sequence, head, count, heads, depth)


@jit
def _last_query_sum_kernel(partials, out, offsets, out_row, count, heads, width: tl.constexpr, run: tl.constexpr):
    """Adds up the runs of each sequence in order, skipping runs past its end."""
    head, sequence = tl.program_id(0), tl.program_id(1)
    length = (tl.load(offsets + sequence + 1) - tl.load(offsets + sequence)).to(tl.int32)
    column = tl.arange(0, width)
    total = tl.zeros([width], tl.float32)
    part = 0
    while part * run < length:
        total += tl.load(partials + ((part * count + sequence).to(tl.int64) * heads + head) * width + column)
        part += 1
    at = sequence.to(tl.int64) * out_row + head * width + column
    tl.store(out + at, total.to(out.dtype.element_ty))
