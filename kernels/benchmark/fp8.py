"""The benchmark's cases of products in eight bits, each after what it takes the place of in bf16."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from dlrm_bench.kernels.benchmark.timing import Case
from dlrm_bench.kernels.dense.fp8 import E4M3, E5M2, Fp8, empty, fp8_product, quantise
from dlrm_bench.kernels.dense.fp8_weights import WeightCopies, WeightCopy, fp8_weights

BATCHES = (3456, 512)
# Of MLPerf's network, by what they compute: columns, depth, format of the first factor, whether bias and ReLU follow.
PRODUCTS = {
    "u": (512, 3456, E4M3, False),
    "du": (512, 3456, E5M2, False),
    "top MLP": (1024, 3456, E4M3, True),
    "by the top MLP's input": (3456, 1024, E5M2, False),
}


def _rounded(x: Tensor, dtype: torch.dtype) -> Fp8:
    rows, columns = x.shape
    out = empty(rows, columns, dtype, 1.0, x.device)
    out.take(x)
    return out


def fp8_cases() -> Iterator[Case]:
    for batch in BATCHES:
        for name, (columns, depth, dtype, relu) in PRODUCTS.items():
            a, b = (torch.randn(rows, depth, device="cuda").bfloat16() for rows in (batch, columns))
            bias = torch.randn(columns, device="cuda").bfloat16() if relu else None
            out, moved = torch.empty(batch, columns, device="cuda").bfloat16(), batch * (depth + 2 * columns)
            shape = f"{name}: [{batch}, {depth}] by {columns}"
            yield in_bf16(shape, moved + batch * depth, a, b, out, bias)
            factors = _rounded(a, dtype), _rounded(b, E4M3)
            yield Case("fp8_product", shape, moved, partial(fp8_product, *factors, out, None, bias))
            out8 = _rounded(out, dtype)
            both = partial(fp8_product, *factors, out, out8, bias)
            yield Case("fp8_product", f"{shape}, output in both", moved + out.numel(), both)
        for columns in (3456, 512):
            x = torch.randn(batch, columns, device="cuda").bfloat16()
            yield Case("quantise", f"[{batch}, {columns}]", 3 * x.numel(), partial(quantise, x, _rounded(x, E4M3)))


def in_bf16(shape: str, moved: float, a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None) -> Case:
    """What a product in eight bits takes the place of."""
    if bias is None:
        return Case("GEMM, bf16", shape, moved, partial(torch.mm, a, b.t(), out=out))
    return Case("GEMM, bf16", shape, moved, partial(torch._addmm_activation, bias, a, b.t(), out=out))


def fp8_weights_cases() -> Iterator[Case]:
    """Those of MLPerf's cross network and of its top MLP's first layer."""
    shapes = [(512, 3456), (3456, 512)] * 3 + [(1024, 3456)]
    copies = []
    for rows, columns in shapes:
        weight = torch.randn(rows, columns, device="cuda").bfloat16()
        plain, transposed = _rounded(weight, E4M3), _rounded(weight.t().contiguous(), E4M3)
        copies.append(WeightCopy(weight, plain, transposed))
    elements = sum(rows * columns for rows, columns in shapes)
    weights = WeightCopies(copies)
    yield Case("fp8_weights", f"{elements / 1e6:.1f} M elements", 4 * elements, partial(fp8_weights, weights))
