"""The interpreter of the tests: what tests/interpreter.py replaces gives the values of what it replaces."""

import numpy as np
import pytest
import torch

from dlrm_bench.kernels._triton import INTERPRETED, jit, tl, triton
from dlrm_bench.kernels.embedding.sorted_adagrad import add_run

pytestmark = pytest.mark.skipif(triton is None or not INTERPRETED, reason="no interpreter here")


@jit
def scan_kernel(values, opens, out, axis: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr):
    at = tl.arange(0, rows)[:, None] * columns + tl.arange(0, columns)[None, :]
    sums, _ = tl.associative_scan((tl.load(values + at), tl.load(opens + at)), axis, add_run)
    tl.store(out + at, sums)


@jit
def next_of(number):
    return number + 1


@jit
def next_kernel(number, out):
    tl.store(out, next_of(next_of(tl.load(number))))


@jit
def larger_kernel(a, b, out):
    tl.store(out, tl.maximum(tl.load(a), tl.load(b)))


@jit
def fma_kernel(a, b, c, out):
    tl.store(out, tl.fma(tl.load(a), tl.load(b), tl.load(c)))


@jit
def rounding_kernel(values, out, count: tl.constexpr):
    at = tl.arange(0, count)
    tl.store(out + at, tl.load(values + at).to(out.dtype.element_ty))


@jit
def shapes_kernel(out, rows: tl.constexpr):
    block = tl.zeros([rows, 2], tl.float32)
    tl.store(out, block.shape[0] * 100 + block.numel)


@pytest.mark.parametrize("axis", [0, 1])
def test_a_scan_adds_in_the_order_of_its_axis(axis: int) -> None:
    """To the bit: floating-point sums depend on it."""
    values, opens = torch.randn(8, 4), torch.rand(8, 4) < 0.3
    out = torch.empty_like(values)
    scan_kernel[(1,)](values, opens.int(), out, axis, 8, 4)
    expected = values.clone()
    lines = zip(expected.movedim(axis, 0)[:-1], expected.movedim(axis, 0)[1:], opens.movedim(axis, 0)[1:], strict=True)
    for before, here, begins in lines:
        here.copy_(torch.where(begins, here, before + here))
    assert torch.equal(out, expected)


@pytest.mark.parametrize(("number", "kind"), [(41, torch.int32), (2**31, torch.int64), (2**31 - 3, torch.int32)])
def test_functions_of_a_kernel_add(number: int, kind: torch.dtype) -> None:
    """In each launch: what one patches, it restores."""
    for _ in range(2):
        out = torch.zeros(1, dtype=kind)
        next_kernel[(1,)](torch.tensor([number], dtype=kind), out)
        assert out.item() == number + 2
        with pytest.raises(ValueError, match="outside of JIT functions"):
            tl.load(out)


def test_an_overflow_is_an_error() -> None:
    limit = np.iinfo(np.int32).max
    with pytest.raises(Exception, match="int32 overflow detected for operation add"):
        next_kernel[(1,)](torch.tensor([limit - 1], dtype=torch.int32), torch.zeros(1, dtype=torch.int32))


def test_the_larger_of_nan_and_a_number_is_the_number_as_on_gpus() -> None:
    out = torch.zeros(1)
    larger_kernel[(1,)](torch.tensor([torch.nan]), torch.tensor([3.0]), out)
    assert out.item() == 3


@pytest.mark.parametrize(
    ("kind", "bits"), [(torch.float8_e4m3fn, torch.uint8), (torch.bfloat16, torch.int16)], ids=["e4m3", "bf16"]
)
def test_numbers_round_to_the_nearest(kind: torch.dtype, bits: torch.dtype) -> None:
    """Normal and subnormal numbers, ties among them, zero and NaN."""
    values = torch.cat([torch.linspace(-500, 500, 1001), torch.arange(-20, 20) / 4096, torch.tensor([torch.nan, 0.0])])
    values = torch.cat([values, 1 + torch.arange(64) / 512, torch.arange(16) * 2.0**-135])
    values = torch.cat([values, torch.randn(2048 - len(values))])
    out = torch.empty(len(values), dtype=kind)
    rounding_kernel[(1,)](values, out, len(values))
    assert torch.equal(out.view(bits), values.to(kind).view(bits))


def test_a_value_knows_its_shape() -> None:
    out = torch.zeros(1, dtype=torch.int32)
    shapes_kernel[(1,)](out, 4)
    assert out.item() == 408


def test_an_fma_does_not_round_the_product() -> None:
    number, out = torch.tensor([1 + 2.0**-12]), torch.zeros(1)
    fma_kernel[(1,)](number, number, torch.tensor([-1.0]), out)
    assert out.item() == 2.0**-11 + 2.0**-24
    assert (number * number - 1).item() == 2.0**-11
