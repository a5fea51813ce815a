"""Where kernel tests run: on the GPU, or else in Triton's interpreter."""

import pytest
import torch
from torch import Tensor

from dlrm_bench.kernels._triton import triton
from dlrm_bench.kernels.dense.fp8 import E4M3, Fp8

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
needs_triton = pytest.mark.skipif(triton is None, reason="needs Triton (pip install triton)")


def unfilled_e4m3(rows: int, columns: int, scale: float) -> Fp8:
    """Returns a matrix of NaN with an empty tally."""
    values = torch.full((rows, columns), torch.nan, device=DEVICE).to(E4M3)
    return Fp8(values, scale, torch.zeros(2, dtype=torch.int64, device=DEVICE))


def assert_rounds(got: Fp8, numbers: Tensor) -> None:
    """Asserts that a kernel stored and counted what `Fp8.take` makes of the same numbers, fp32: one in a million is
    counted otherwise, and here and there is the adjacent number, where sums in another order differ in the last bit."""
    expected = unfilled_e4m3(*numbers.shape, got.scale)
    expected.take(numbers)
    assert got.tally is not None
    assert expected.tally is not None
    (large, lost), (large_too, lost_too) = got.tally.tolist(), expected.tally.tolist()
    assert lost == lost_too
    assert abs(large - large_too) <= numbers.numel() / 1e6, (large, large_too)
    ours, theirs = got.float(), expected.float()
    assert torch.equal(ours.isnan(), theirs.isnan())
    ours, theirs = ours.nan_to_num(), theirs.nan_to_num()
    torch.testing.assert_close(ours, theirs, rtol=2**-3, atol=2**-9 / got.scale)
    differ = int((ours != theirs).sum())
    assert differ <= 2 + numbers.numel() // 1000, f"{differ} of {numbers.numel()} numbers are rounded otherwise"


def two_replays(graph: torch.cuda.CUDAGraph, out: Tensor) -> list[Tensor]:
    """Returns what each of two replays leaves in `out`."""
    outs = []
    for _ in range(2):
        graph.replay()
        outs.append(out.clone())
    return outs
