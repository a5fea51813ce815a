"""A small MLP of three layers in one launch, for batches whose separate GEMMs take longer to launch than to run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dlrm_bench.kernels._call import function
from dlrm_bench.kernels._triton import cdiv, jit, tl

_DEPTH = 64  # depth of the second layer's product per step
_INPUTS, _WIDEST = 16, 512
# Elements of the last weight, which a program loads whole: with this many, it uses up to 206 KB of a Hopper's 227 KB of
# shared memory; with twice as many, 257 KB or more.
_LAST_WEIGHT = 2**16
_FEW_ROWS, _ROWS, _WARPS = 16, 64, 8  # per program; _FEW_ROWS if _ROWS would leave multiprocessors idle
_FEW = 2048


def applies(widths: Sequence[int], inputs: int, dtype: torch.dtype) -> bool:
    """Whether the kernel supports these layers."""
    powers = all(width & (width - 1) == 0 and _DEPTH <= width <= _WIDEST for width in widths)
    fits = len(widths) == 3 and widths[1] * widths[2] <= _LAST_WEIGHT
    return fits and powers and inputs == _INPUTS and dtype == torch.bfloat16


class SmallMLP(NamedTuple):
    """Writes features, rounded and zero-padded, to `inputs`; then applies relu(inputs @ weight.T + bias) three times,
    into `hidden`, and the last also into `out`. NaN stays NaN.

    Products accumulate in fp32, and each layer's output is rounded once. All tensors but `out` are contiguous.
    """

    features: Tensor
    """fp32 [batch, n], n at most 16."""
    weights: Sequence[Tensor]
    """bf16 [k, 16], [m, k], [n, m]: powers of two from 64 to 512, m times n at most 2**16."""
    biases: Sequence[Tensor]
    """bf16, one element for each row of the weight."""
    inputs: Tensor
    """bf16 [batch, 16]."""
    hidden: Sequence[Tensor]
    """bf16 [batch, rows of each weight]."""
    out: Tensor
    """bf16, of the last layer's shape, any row stride."""

    def launch(self) -> None:
        """Checks the arguments and computes the three layers."""
        features, weights, inputs, hidden, out = self.features, self.weights, self.inputs, self.hidden, self.out
        batch = len(features)
        assert features.dtype == torch.float32 and features.is_contiguous() and features.shape[1] <= _INPUTS, "features"
        assert applies([len(weight) for weight in weights], inputs.shape[1], inputs.dtype), "unsupported layers"
        assert all(w.shape[1] == n for w, n in zip(weights, [_INPUTS, *map(len, weights)], strict=False)), "a chain"
        assert all(h.shape == (batch, len(w)) for h, w in zip(hidden, weights, strict=True)), "hidden: [batch, width]"
        assert all(t.is_contiguous() for t in (*weights, *self.biases, inputs, *hidden)), "contiguous tensors only"
        assert out.shape == hidden[-1].shape and out.stride(1) == 1, "out: [batch, width]"
        (self.triton if features.is_cuda else self.plain)()

    def plain(self) -> None:
        """Computes the layers in PyTorch."""
        self.inputs.zero_()[:, : self.features.shape[1]].copy_(self.features)
        x = self.inputs
        for weight, bias, to in zip(self.weights, self.biases, self.hidden, strict=True):
            to.copy_((x.float() @ weight.float().t() + bias.float()).relu())
            x = to
        self.out.copy_(x)

    def triton(self) -> None:
        """Computes the layers in one kernel."""
        batch = len(self.features)
        rows = _FEW_ROWS if batch < _FEW else _ROWS
        _small_mlp_kernel[(cdiv(batch, rows),)](
            self.features,
            *self.weights,
            *self.biases,
            self.inputs,
            *self.hidden,
            self.out,
            batch,
            self.out.stride(0),
            self.features.shape[1],
            *(len(weight) for weight in self.weights),
            _INPUTS,
            _DEPTH,
            rows,
            num_warps=_WARPS,
        )


small_mlp = function(SmallMLP, SmallMLP.launch)
plain_small_mlp = function(SmallMLP, SmallMLP.plain)
triton_small_mlp = function(SmallMLP, SmallMLP.triton)


@jit
def _relu(x):
    # By default max(NaN, 0) is 0: no loss would show the NaN, and gradients of earlier layers would be 0 * NaN.
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
