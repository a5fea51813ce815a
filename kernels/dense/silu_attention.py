"""Causal attention with pointwise SiLU over jagged sequences, as in HSTU (Zhai et al. 2024, arXiv 2402.17152, eq. 2).

Weights are silu(q k^T / sqrt(D)) / max_length instead of a softmax, so no row needs another key's weight. Forward and
backward are tiled GEMMs that store nothing in between; on Hopper, silu_attention.cu runs them. A sequence ends with its
targets (the candidates to rank): a target attends to the history and to itself, never to another target. The [length,
length] weights exist in registers only.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dlrm_bench.kernels._cuda import available
from dlrm_bench.kernels._triton import INTERPRETED, cdiv, jit, next_power_of_2, tl
from dlrm_bench.kernels.dense._silu_attention_hopper import (
    FORWARD,
    KEY,
    PIECE,
    PIECE_BYTES,
    QUERY,
    WIDTH,
    arguments_of,
    launch,
    list_items,
    pieces_at_most,
)
from dlrm_bench.kernels.dense.zero_tail import zero_tail

_TILE, _NUM_WARPS = 64, 4  # rows and keys of a program's tile, at most
# For fp32 that is not rounded to TF32: without tensor cores, a thread holds whole rows of both factors in registers.
# Heads of 128 then spill 184 bytes; with the tiles above, 50 KB, and compiling takes 55 CPU seconds instead of two.
_EXACT_TILE, _EXACT_NUM_WARPS = 16, 8
_TILE_BYTES = 2**15  # of a tile's rows, at most: the backward of keys has six such tiles in shared memory

_PASS_PIECES = 2**18  # of 8 KB: a backward pass's memory, to which one sequence and head's pieces are added


class Sequences(NamedTuple):
    """The sequences of tokens.

    offsets: int32 or int64 [B + 1], tokens of sequence b are offsets[b] to offsets[b + 1] - 1. targets: int32 or int64
    [B], number of targets at the end of a sequence. max_length: an upper bound of the lengths; not checked, because
    lengths are on the device.
    """

    offsets: Tensor
    targets: Tensor
    max_length: int


def silu_attention_forward(q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, out: Tensor) -> None:
    """Stores the attention output of every token in `out`: [T, H, V], overwritten.

    q, k: [T, H, D], v: [T, H, V], T tokens of all sequences, H heads; one dtype, fp32, bf16 or fp16; D and V powers of
    two, at least 16. A token's heads are contiguous; any token stride, so that slices of one projection are accepted.
    Rows past the last sequence become 0.
    """
    _check(q, k, v, out, out)
    _check_sequences(sequences)
    forward = plain_silu_attention_forward
    if q.is_cuda:
        forward = cuda_silu_attention_forward if applies(q, k, v, out) else triton_silu_attention_forward
    forward(q, k, v, sequences, out)
    zero_tail([out.flatten(1)], sequences.offsets[-1:])


def silu_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, dq: Tensor, dk: Tensor, dv: Tensor
) -> None:
    """Stores the gradients of `silu_attention_forward`'s inputs in dq, dk and dv, shaped and laid out like the inputs.

    grad: [T, H, V], the gradient of the output. Rows past the last sequence become 0. Equal inputs give equal bits: no
    sum uses atomics.
    """
    _check(q, k, v, grad, dv)
    _check_sequences(sequences)
    backward = plain_silu_attention_backward
    if q.is_cuda:
        on_hopper = applies(grad, q, k, v, dq, dk, dv)
        backward = cuda_silu_attention_backward if on_hopper else triton_silu_attention_backward
    backward(grad, q, k, v, sequences, dq, dk, dv)
    zero_tail([of.flatten(1) for of in (dq, dk, dv)], sequences.offsets[-1:])


def applies(*tensors: Tensor) -> bool:
    """Whether the Hopper kernels support these tensors: bf16, heads of 128, token strides multiples of 16 bytes."""
    return available() and all(
        t.is_cuda
        and t.dtype == torch.bfloat16
        and t.shape[2] == WIDTH
        and t.stride(0) % 8 == 0
        and t.data_ptr() % 16 == 0
        for t in tensors
    )


def _check(q: Tensor, k: Tensor, v: Tensor, out: Tensor, like_v: Tensor) -> None:
    assert q.shape == k.shape and q.shape[:2] == v.shape[:2], "q, k: [T, H, D], v: [T, H, V]"
    assert out.shape == v.shape == like_v.shape, "output and its gradient: [T, H, V]"
    assert q.dtype == k.dtype == v.dtype == out.dtype, "one dtype"
    for tensor in (q, k, v, out, like_v):
        width = tensor.shape[2]
        assert width >= 16 and width == next_power_of_2(width), f"head width: a power of two, at least 16, not {width}"
        assert tensor.stride(2) == 1 and tensor.stride(1) == width, "a token's heads must be contiguous"


def _check_sequences(sequences: Sequences) -> None:
    offsets, targets, _ = sequences
    assert offsets.shape == (len(targets) + 1,) and targets.dim() == 1, "offsets: [B + 1], targets: [B]"
    for numbers in (offsets, targets):
        assert numbers.dtype in (torch.int32, torch.int64), f"offsets and targets: int32 or int64, not {numbers.dtype}"
        assert numbers.is_contiguous(), "offsets and targets: contiguous"


def plain_silu_attention_forward(q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, out: Tensor) -> None:
    """Computes `silu_attention_forward` in PyTorch, on padded sequences."""
    padded = _Padded(q, k, v, sequences)
    padded.store(torch.einsum("bhij,bjhv->bihv", padded.weights.to(v.dtype), padded.v), out)


def plain_silu_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, dq: Tensor, dk: Tensor, dv: Tensor
) -> None:
    """Computes `silu_attention_backward` in PyTorch, on padded sequences."""
    padded = _Padded(q, k, v, sequences)
    of_out = padded.pad(grad)
    of_weights = _at_least_fp32(torch.einsum("bihv,bjhv->bhij", of_out, padded.v))
    of_scores = (of_weights * padded.slopes).to(q.dtype)
    padded.store(torch.einsum("bhij,bjhd->bihd", of_scores, padded.k), dq)
    padded.store(torch.einsum("bhij,bihd->bjhd", of_scores, padded.q), dk)
    padded.store(torch.einsum("bhij,bihv->bjhv", padded.weights.to(v.dtype), of_out), dv)


def _at_least_fp32(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


class _Padded:
    """Sequences as [B, N, H, ...], their attention weights and the derivatives of the weights: fp32 [B, H, N, N]."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, sequences: Sequences) -> None:
        offsets = sequences.offsets.long()
        lengths, place = offsets.diff(), torch.arange(sequences.max_length, device=q.device)
        self._inside = place < lengths[:, None]
        self._tokens = torch.where(self._inside, offsets[:-1, None] + place, 0)
        self.q, self.k, self.v = self.pad(q), self.pad(k), self.pad(v)
        row, key = place[:, None], place[None, :]
        of_history = key < (lengths - sequences.targets)[:, None, None]
        allowed = (key <= row) & (of_history | (key == row)) & self._inside[:, :, None]
        factor = allowed[:, None] / sequences.max_length
        scale = q.shape[2] ** -0.5
        scores = _at_least_fp32(torch.einsum("bihd,bjhd->bhij", self.q, self.k)) * scale
        sigmoid = scores.sigmoid()
        self.weights = scores * sigmoid * factor
        self.slopes = sigmoid * (1 + scores * (1 - sigmoid)) * factor * scale

    def pad(self, jagged: Tensor) -> Tensor:
        """Returns [T, H, ...] as [B, N, H, ...], with zeros past a sequence's end."""
        if not len(jagged):
            return jagged.new_zeros(*self._tokens.shape, *jagged.shape[1:])
        return jagged[self._tokens] * self._inside[:, :, None, None]

    def store(self, padded: Tensor, out: Tensor) -> None:
        """Stores [B, N, H, ...] in the tokens of `out`."""
        out[self._tokens[self._inside]] = padded[self._inside]


def cuda_silu_attention_forward(q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, out: Tensor) -> None:
    """Computes `silu_attention_forward` on Hopper's tensor cores: one kernel lists tiles, another computes them.

    Requires `applies`. bf16 weights are not yet divided by max_length; that is done in fp32.
    """
    if len(q) == 0 or len(sequences.targets) == 0:
        return
    arguments = arguments_of(FORWARD, (q,), (k, v), (out,), (1 / sequences.max_length,))
    launch(FORWARD, arguments, list_items(q, *sequences))


def cuda_silu_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, dq: Tensor, dk: Tensor, dv: Tensor
) -> None:
    """Computes `silu_attention_backward` on Hopper's tensor cores: first dk, dv and the scores' gradients, in bf16,
    then dq from the latter. Runs in passes, so that 2 GiB suffice for any batch. Sequences are cut at max_length.
    """
    if len(q) == 0 or len(sequences.targets) == 0:
        return
    share = 1 / sequences.max_length
    of_scores = share * q.shape[2] ** -0.5
    by_keys = arguments_of(KEY, (k, v), (q, grad), (dk, dv), (of_scores, share))
    by_queries = arguments_of(QUERY, (), (k,), (dq,), (of_scores,))

    at_most, rows = pieces_at_most(q, *sequences[1:]), cdiv(sequences.max_length, PIECE)
    passes = cdiv(at_most, _PASS_PIECES)
    # A pass's last sequence and head may end beyond it.
    memory = min(at_most, _PASS_PIECES + rows * (rows + 1) // 2)
    pieces = torch.empty(memory * PIECE_BYTES, dtype=torch.uint8, device=q.device)
    work = list_items(q, *sequences, passes, _PASS_PIECES)
    for number in range(passes):
        launch(KEY, by_keys, work, number, pieces)
        launch(QUERY, by_queries, work, number, pieces)


def triton_silu_attention_forward(q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, out: Tensor) -> None:
    """Computes `silu_attention_forward` in one kernel: one program per head and tile of a sequence's tokens."""
    sizes = _sizes(q, v)
    _silu_attention_forward_kernel[_grid(q, sequences, sizes)](
        q, k, v, out, *_common(q, k, v, sequences), out.stride(0), **sizes
    )


def triton_silu_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, dq: Tensor, dk: Tensor, dv: Tensor
) -> None:
    """Computes `silu_attention_backward` in two kernels: queries, then keys and values, one program per tile."""
    common, sizes = _common(q, k, v, sequences), _sizes(q, v)
    grid, grad_row = _grid(q, sequences, sizes), grad.stride(0)
    _silu_attention_query_backward_kernel[grid](q, k, v, grad, dq, *common, grad_row, dq.stride(0), **sizes)
    _silu_attention_key_backward_kernel[grid](
        q, k, v, grad, dk, dv, *common, grad_row, dk.stride(0), dv.stride(0), **sizes
    )


def _grid(q: Tensor, sequences: Sequences, sizes: dict[str, Any]) -> tuple[int, int, int]:
    return cdiv(sequences.max_length, sizes["tile"]), q.shape[1], len(sequences.offsets) - 1


def _common(q: Tensor, k: Tensor, v: Tensor, sequences: Sequences) -> tuple[object, ...]:
    scale, share = q.shape[2] ** -0.5, 1 / sequences.max_length
    return sequences.offsets, sequences.targets, scale, share, q.stride(0), k.stride(0), v.stride(0)


def _sizes(q: Tensor, v: Tensor) -> dict[str, Any]:
    depth, width = q.shape[2], v.shape[2]
    fp32 = q.dtype == torch.float32 and not INTERPRETED
    tf32 = fp32 and torch.backends.cuda.matmul.allow_tf32
    tile, num_warps = (_EXACT_TILE, _EXACT_NUM_WARPS) if fp32 and not tf32 else (_TILE, _NUM_WARPS)
    tile = max(16, min(tile, _TILE_BYTES // (max(depth, width) * q.itemsize)))
    precision = "tf32" if tf32 else "ieee"
    return {"depth": depth, "width": width, "tile": tile, "precision": precision, "num_warps": num_warps}


@jit
def _tile(base, row, start, first, length, head, columns: tl.constexpr, tile: tl.constexpr):
    """Loads a head's [tile, columns]: tokens from `first` on of the sequence that begins at token `start`."""
    token = first + tl.arange(0, tile)
    at = (start + token).to(tl.int64)[:, None] * row + head * columns + tl.arange(0, columns)[None, :]
    return tl.load(base + at, (token < length)[:, None], other=0.0)


@jit
def _store_tile(base, row, start, first, length, head, values, columns: tl.constexpr, tile: tl.constexpr):
    token = first + tl.arange(0, tile)
    at = (start + token).to(tl.int64)[:, None] * row + head * columns + tl.arange(0, columns)[None, :]
    tl.store(base + at, values.to(base.dtype.element_ty), (token < length)[:, None])


@jit
def _allowed(row_first, key_first, length, history, tile: tl.constexpr):
    """Whether a row attends to a key: bool [rows, keys]."""
    row = row_first + tl.arange(0, tile)[:, None]
    key = key_first + tl.arange(0, tile)[None, :]
    return (key <= row) & ((key < history) | (key == row)) & (row < length)


@jit
def _silu_attention_forward_kernel(
    q, k, v, out, offsets, targets, scale, share, q_row, k_row, v_row, out_row,
    depth: tl.constexpr, width: tl.constexpr, tile: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    first, head, sequence = tl.program_id(0) * tile, tl.program_id(1), tl.program_id(2)
    start = tl.load(offsets + sequence)
    length = (tl.load(offsets + sequence + 1) - start).to(tl.int32)
    history = length - tl.load(targets + sequence).to(tl.int32)
    if first < length:
        queries = _tile(q, q_row, start, first, length, head, depth, tile)
        total = tl.zeros([tile, width], tl.float32)
        key = 0
        while key <= first:  # tiles up to the diagonal's
            keys = _tile(k, k_row, start, key, length, head, depth, tile)
            score = tl.dot(queries, tl.trans(keys), input_precision=precision) * scale
            weight = tl.where(_allowed(first, key, length, history, tile), score * tl.sigmoid(score) * share, 0.0)
            values = _tile(v, v_row, start, key, length, head, width, tile)
            total += tl.dot(weight.to(values.dtype), values, input_precision=precision)
            key += tile
        _store_tile(out, out_row, start, first, length, head, total, width, tile)


@jit
def _silu_attention_query_backward_kernel(
    q, k, v, grad, dq, offsets, targets, scale, share, q_row, k_row, v_row, grad_row, dq_row,
    depth: tl.constexpr, width: tl.constexpr, tile: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    first, head, sequence = tl.program_id(0) * tile, tl.program_id(1), tl.program_id(2)
    start = tl.load(offsets + sequence)
    length = (tl.load(offsets + sequence + 1) - start).to(tl.int32)
    history = length - tl.load(targets + sequence).to(tl.int32)
    if first < length:
        queries = _tile(q, q_row, start, first, length, head, depth, tile)
        of_out = _tile(grad, grad_row, start, first, length, head, width, tile)
        total = tl.zeros([tile, depth], tl.float32)
        key = 0
        while key <= first:
            keys = _tile(k, k_row, start, key, length, head, depth, tile)
            values = _tile(v, v_row, start, key, length, head, width, tile)
            score = tl.dot(queries, tl.trans(keys), input_precision=precision) * scale
            sigmoid = tl.sigmoid(score)
            slope = sigmoid * (1 + score * (1 - sigmoid)) * (share * scale)
            of_weight = tl.dot(of_out, tl.trans(values), input_precision=precision)
            of_score = tl.where(_allowed(first, key, length, history, tile), of_weight * slope, 0.0)
            total += tl.dot(of_score.to(keys.dtype), keys, input_precision=precision)
            key += tile
        _store_tile(dq, dq_row, start, first, length, head, total, depth, tile)


@jit
def _silu_attention_key_backward_kernel(
    q, k, v, grad, dk, dv, offsets, targets, scale, share, q_row, k_row, v_row, grad_row, dk_row, dv_row,
    depth: tl.constexpr, width: tl.constexpr, tile: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    first, head, sequence = tl.program_id(0) * tile, tl.program_id(1), tl.program_id(2)
    start = tl.load(offsets + sequence)
    length = (tl.load(offsets + sequence + 1) - start).to(tl.int32)
    history = length - tl.load(targets + sequence).to(tl.int32)
    if first < length:
        keys = _tile(k, k_row, start, first, length, head, depth, tile)
        values = _tile(v, v_row, start, first, length, head, width, tile)
        of_keys = tl.zeros([tile, depth], tl.float32)
        of_values = tl.zeros([tile, width], tl.float32)
        row = first
        end = tl.where(first < history, length, first + 1)  # only a target's own row attends to it
        while row < end:
            queries = _tile(q, q_row, start, row, length, head, depth, tile)
            of_out = _tile(grad, grad_row, start, row, length, head, width, tile)
            score = tl.dot(queries, tl.trans(keys), input_precision=precision) * scale
            sigmoid = tl.sigmoid(score)
            allowed = _allowed(row, first, length, history, tile)
            weight = tl.where(allowed, score * sigmoid * share, 0.0)
            of_values += tl.dot(tl.trans(weight.to(of_out.dtype)), of_out, input_precision=precision)
            slope = sigmoid * (1 + score * (1 - sigmoid)) * (share * scale)
            of_weight = tl.dot(of_out, tl.trans(values), input_precision=precision)
            of_score = tl.where(allowed, of_weight * slope, 0.0)
            of_keys += tl.dot(tl.trans(of_score.to(queries.dtype)), queries, input_precision=precision)
            row += tile
        _store_tile(dk, dk_row, start, first, length, head, of_keys, depth, tile)
        _store_tile(dv, dv_row, start, first, length, head, of_values, width, tile)
