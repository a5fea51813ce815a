"""Benchmark cases for 8-bit products, each after the bf16 product that it replaces."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from dlrm_bench.kernels.benchmark.timing import Case
from dlrm_bench.kernels.dense.fp8 import E4M3, E5M2, Fp8, Fp8Pair, empty, empty_pair, fp8_product
from dlrm_bench.kernels.dense.fp8_copies import fp8_copies, partial_rows
from dlrm_bench.kernels.dense.fp8_weights import WeightCopies, WeightCopy, fp8_weights

BATCHES = (3456, 512)
# Products of MLPerf's network: columns, depth, format of the first factor, and whether bias and ReLU follow.
PRODUCTS = {
    "u": (512, 3456, E4M3, False),
    "du": (512, 3456, E5M2, False),
    "top MLP": (1024, 3456, E4M3, True),
    "by the top MLP's input": (3456, 1024, E5M2, False),
}
# Weight gradients: rows and columns.
GRADIENTS = {"w": (3456, 512), "v": (512, 3456), "top MLP": (1024, 3456)}
TOKENS = 2_131_968
"""Tokens of 1,024 samples of MLPerf's DLRMv4: the rows of its layers' products."""


def _rounded(x: Tensor, dtype: torch.dtype) -> Fp8:
    rows, columns = x.shape
    out = empty(rows, columns, dtype, 1.0, x.device)
    out.take(x)
    return out


def _pair(x: Tensor, dtype: torch.dtype) -> Fp8Pair:
    batch, columns = x.shape
    return empty_pair(batch, columns, dtype, 1.0, x.device)


def fp8_cases() -> Iterator[Case]:
    for batch in BATCHES:
        for name, (columns, depth, dtype, relu) in PRODUCTS.items():
            a, b = (torch.randn(rows, depth, device="cuda").bfloat16() for rows in (batch, columns))
            bias = torch.randn(columns, device="cuda").bfloat16() if relu else None
            out, moved = torch.empty(batch, columns, device="cuda").bfloat16(), batch * (depth + 2 * columns)
            shape = f"{name}: [{batch}, {depth}] by {columns}"
            yield in_bf16(shape, moved + batch * depth, a, b, out, bias)
            factors = _rounded(a, dtype), _rounded(b, E4M3)
            yield Case("fp8_product", shape, moved, partial(fp8_product, *factors, out, bias))
            in_pair = partial(fp8_product, *factors, _pair(out, dtype), bias)
            yield Case("fp8_product", f"{shape}, output in eight bits", moved, in_pair)
        for name, (rows, columns) in GRADIENTS.items():
            a, b = (torch.randn(n, 2 * batch, device="cuda").bfloat16() for n in (rows, columns))
            out, moved = torch.empty(rows, columns, device="cuda").bfloat16(), 2 * batch * (rows + columns)
            shape = f"gradient by {name}: [{rows}, {2 * batch}] by {columns}"
            yield in_bf16(shape, 2 * moved, a.t().contiguous().t(), b.t().contiguous().t(), out, None)
            factors = _rounded(a, E5M2), _rounded(b, E4M3)
            yield Case("fp8_product", shape, moved, partial(fp8_product, *factors, out, exact=True))
    yield from layer_products()


def layer_products() -> Iterator[Case]:
    """Yields the forward products of a layer of DLRMv4 and of its last layer for candidates: projections with a bias;
    the output's, to which bf16 adds the tokens in the product and e4m3 in a pass of its own."""
    for name, depth, columns in (("uvqk", 512, 2048), ("keys and values", 512, 1024), ("output", 1536, 512)):
        a, b = (torch.randn(rows, depth, device="cuda").bfloat16() for rows in (TOKENS, columns))
        tokens = torch.randn(TOKENS, columns, device="cuda").bfloat16() if name == "output" else None
        bias = torch.randn(columns, device="cuda").bfloat16() if tokens is None else None
        out, shape = torch.empty(TOKENS, columns, device="cuda").bfloat16(), f"{name}: [{TOKENS}, {depth}] by {columns}"
        added = bias if tokens is None else tokens
        yield Case("GEMM, bf16", shape, 2 * a.numel() + 2 * out.numel(), partial(torch.addmm, added, a, b.t(), out=out))
        factors, moved = (_rounded(a, E4M3), _rounded(b, E4M3)), a.numel() + 2 * out.numel()
        product = partial(fp8_product, *factors, out, bias=bias)
        yield Case("fp8_product", shape, moved, product)
        if tokens is not None:
            yield Case(
                "fp8_product", f"{shape}, tokens added", moved + 4 * out.numel(), partial(_add, product, out, tokens)
            )


def _add(product: Callable[[], None], out: Tensor, tokens: Tensor) -> None:
    product()
    out += tokens


def fp8_copies_cases() -> Iterator[Case]:
    for batch in BATCHES:
        x, other = (torch.randn(batch, 3456, device="cuda").bfloat16() for _ in range(2))
        partials = torch.empty(partial_rows(batch), 3456, device="cuda")
        shape = f"[{batch}, 3456]"
        yield Case("fp8_copies", shape, 4 * x.numel(), partial(fp8_copies, x, _pair(x, E4M3)))
        masked = partial(fp8_copies, x, _pair(x, E5M2), other, partials)
        yield Case("fp8_copies", f"{shape} after a ReLU", 6 * x.numel(), masked)


def in_bf16(shape: str, moved: float, a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None) -> Case:
    """Returns the bf16 case that an 8-bit product replaces."""
    if bias is None:
        return Case("GEMM, bf16", shape, moved, partial(torch.mm, a, b.t(), out=out))
    return Case("GEMM, bf16", shape, moved, partial(torch._addmm_activation, bias, a, b.t(), out=out))


def fp8_weights_cases() -> Iterator[Case]:
    """Yields the weights of MLPerf's cross network and of its top MLP's first layer."""
    shapes = [(512, 3456), (3456, 512)] * 3 + [(1024, 3456)]
    copies = []
    for rows, columns in shapes:
        weight = torch.randn(rows, columns, device="cuda").bfloat16()
        plain, transposed = _rounded(weight, E4M3), _rounded(weight.t().contiguous(), E4M3)
        copies.append(WeightCopy(weight, plain, transposed))
    elements = sum(rows * columns for rows, columns in shapes)
    weights = WeightCopies(copies)
    yield Case("fp8_weights", f"{elements / 1e6:.1f} M elements", 4 * elements, partial(fp8_weights, weights))
