"""A small MLP of three layers in one launch, for batches whose GEMMs one by one take longer to start than to run."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dlrm_bench.kernels._triton import cdiv, jit, tl

_DEPTH = 64  # of the second layer's product at a time
_INPUTS, _WIDEST = 16, 512
_FEW_ROWS, _ROWS, _WARPS = 16, 64, 8  # of one program; the former where they leave multiprocessors idle
_FEW = 2048


def applies(widths: Sequence[int], inputs: int, dtype: torch.dtype) -> bool:
    """Whether the kernel takes such layers."""
    powers = all(width & (width - 1) == 0 and _DEPTH <= width <= _WIDEST for width in widths)
    return len(widths) == 3 and powers and inputs == _INPUTS and dtype == torch.bfloat16


def small_mlp(
    features: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    inputs: Tensor,
    hidden: Sequence[Tensor],
    out: Tensor,
) -> None:
    """inputs = features, rounded, and columns of zeros; then, three times, relu(inputs @ weight.T + bias), into hidden;
    the last one into `out` too. NaN stays NaN.

    features: fp32 [batch, n], contiguous, n at most 16. weights: bf16 [512, 16] at most, [256, 512], [128, 256];
    biases: of as many rows; all widths powers of two from 64 on. inputs: bf16 [batch, 16]; hidden: bf16 [batch, rows of
    each weight], contiguous; out: like the last, of any row stride. Products are added up in fp32, and each layer's
    output is rounded once.
    """
    batch = len(features)
    assert features.dtype == torch.float32 and features.is_contiguous() and features.shape[1] <= _INPUTS, "features"
    assert applies([len(weight) for weight in weights], inputs.shape[1], inputs.dtype), "layers that the kernel takes"
    assert all(w.shape[1] == n for w, n in zip(weights, [_INPUTS, *map(len, weights)], strict=False)), "a chain"
    assert all(h.shape == (batch, len(w)) for h, w in zip(hidden, weights, strict=True)), "hidden: [batch, width]"
    assert all(t.is_contiguous() for t in (*weights, *biases, inputs, *hidden)), "contiguous tensors only"
    assert out.shape == hidden[-1].shape and out.stride(1) == 1, "out: [batch, width]"
    mlp = triton_small_mlp if features.is_cuda else plain_small_mlp
    mlp(features, weights, biases, inputs, hidden, out)


def plain_small_mlp(
    features: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    inputs: Tensor,
    hidden: Sequence[Tensor],
    out: Tensor,
) -> None:
    """What `small_mlp` does, in PyTorch."""
    inputs.zero_()[:, : features.shape[1]].copy_(features)
    x = inputs
    for weight, bias, to in zip(weights, biases, hidden, strict=True):
        to.copy_((x.float() @ weight.float().t() + bias.float()).relu())
        x = to
    out.copy_(x)


def triton_small_mlp(
    features: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    inputs: Tensor,
    hidden: Sequence[Tensor],
    out: Tensor,
) -> None:
    """What `small_mlp` does, in one kernel."""
    batch, rows = len(features), _FEW_ROWS if len(features) < _FEW else _ROWS
    _small_mlp_kernel[(cdiv(batch, rows),)](
        features,
        *weights,
        *biases,
        inputs,
        *hidden,
        out,
        batch,
        out.stride(0),
        features.shape[1],
        *(len(weight) for weight in weights),
        _INPUTS,
        _DEPTH,
        rows,
        num_warps=_WARPS,
    )


@jit
def _relu(x):
    # Without the argument 0 of NaN: no loss would show it, and gradients of the layers before it would be 0 * NaN.
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)


@jit
def _small_mlp_kernel(
    features,
    weight0,
    weight1,
    weight2,
    bias0,
    bias1,
    bias2,
    inputs,
    hidden0,
    hidden1,
    hidden2,
    out,
    batch,
    out_stride,
    num_features: tl.constexpr,
    width0: tl.constexpr,
    width1: tl.constexpr,
    width2: tl.constexpr,
    num_inputs: tl.constexpr,
    depth: tl.constexpr,
    rows: tl.constexpr,
) -> None:
    row = (tl.program_id(0) * rows + tl.arange(0, rows)).to(tl.int64)[:, None]
    exists = row < batch
    feature = tl.arange(0, num_inputs)[None, :]
    x = tl.load(features + row * num_features + feature, exists & (feature < num_features), other=0.0)
    x = x.to(inputs.dtype.element_ty)
    tl.store(inputs + row * num_inputs + feature, x, exists)

    column1 = tl.arange(0, width1)[None, :]
    total = tl.zeros([rows, width1], tl.float32)
    for start in range(0, width0, depth):
        column0 = start + tl.arange(0, depth)
        w0 = tl.load(weight0 + column0[None, :] * num_inputs + tl.arange(0, num_inputs)[:, None])
        h0 = tl.dot(x, w0) + tl.load(bias0 + column0).to(tl.float32)[None, :]
        h0 = _relu(h0).to(x.dtype)
        tl.store(hidden0 + row * width0 + column0[None, :], h0, exists)
        w1 = tl.load(weight1 + column1 * width0 + column0[:, None])
        total = tl.dot(h0, w1, total)
    h1 = _relu(total + tl.load(bias1 + column1).to(tl.float32)).to(x.dtype)
    tl.store(hidden1 + row * width1 + column1, h1, exists)

    column2 = tl.arange(0, width2)[None, :]
    w2 = tl.load(weight2 + column2 * width1 + tl.arange(0, width1)[:, None])
    h2 = _relu(tl.dot(h1, w2) + tl.load(bias2 + column2).to(tl.float32)).to(x.dtype)
    tl.store(hidden2 + row * width2 + column2, h2, exists)
    tl.store(out + row * out_stride + column2, h2, exists)
