"""Copies of weights in eight bits: the plain function, and the kernel against it."""

import pytest
import torch
from torch import Tensor

from dlrm_bench.kernels._cuda import available
from dlrm_bench.kernels.dense.fp8 import E4M3, E5M2, empty
from dlrm_bench.kernels.dense.fp8_weights import WeightCopies, WeightCopy, _tiles, fp8_weights

SCALE = 64.0
# A tile of the kernel and many, with edges inside of one.
SHAPES = [(16, 16), (64, 64), (48, 80), (272, 144), (512, 3456), (3456, 512)]


def copy_of(weight: Tensor) -> WeightCopy:
    rows, columns = weight.shape
    return WeightCopy(
        weight, *(empty(*size, E4M3, SCALE, weight.device) for size in ((rows, columns), (columns, rows)))
    )


def check(weights: list[Tensor]) -> None:
    copies = WeightCopies([copy_of(weight) for weight in weights])
    for factor in (1, 3):  # of the weights as they are at the time; the largest are beyond e4m3's range
        for weight in weights:
            weight.mul_(factor)
        fp8_weights(copies)
        for weight, plain, transposed in copies.copies:
            expected = empty(*weight.shape, E4M3, SCALE, weight.device)
            expected.take(weight)
            assert torch.equal(plain.values.view(torch.uint8), expected.values.view(torch.uint8))
            assert torch.equal(transposed.values.view(torch.uint8).t(), expected.values.view(torch.uint8))


def test_copies_have_both_layouts() -> None:
    check([torch.randn(*shape) for shape in SHAPES[:3]])


@pytest.mark.gpu
@pytest.mark.skipif(not available(), reason="needs a Hopper GPU (sm_90a) and cuda-bindings")
def test_kernel_rounds_as_pytorch_does() -> None:
    check([torch.randn(*shape, device="cuda").to(torch.bfloat16) for shape in SHAPES])


def test_tiles_cover_each_weight_once() -> None:
    copies = [copy_of(torch.zeros(*shape, dtype=torch.bfloat16)) for shape in SHAPES]
    tiles = iter(_tiles(copies))
    for weight, plain, transposed in copies:
        seen = torch.zeros(weight.shape)
        while not seen.all():
            *addresses, sizes, start = next(tiles)
            assert addresses == [weight.data_ptr(), plain.values.data_ptr(), transposed.values.data_ptr(), 0]
            assert (sizes % 2**32, sizes >> 32) == weight.shape
            seen[start % 2**32 :, start >> 32 :][:64, :64] += 1
        assert (seen == 1).all()
    assert next(tiles, None) is None


def test_refuses_what_the_kernel_does_not_take() -> None:
    weight = torch.zeros(16, 16)
    with pytest.raises(AssertionError, match="multiples of 16"):
        WeightCopies([copy_of(torch.zeros(8, 16))])
    with pytest.raises(AssertionError, match="one scale"):
        WeightCopies([copy_of(weight)._replace(plain=empty(16, 16, E4M3, 1.0, weight.device))])
    with pytest.raises(AssertionError, match="e4m3"):
        WeightCopies([copy_of(weight)._replace(plain=empty(16, 16, E5M2, SCALE, weight.device))])
    with pytest.raises(AssertionError, match="contiguous"):
        WeightCopies([copy_of(torch.zeros(32, 16).t())])
    weight, plain, transposed = copy_of(torch.zeros(16, 32))
    with pytest.raises(AssertionError, match="like its transpose"):
        WeightCopies([WeightCopy(weight, transposed, plain)])
    with pytest.raises(AssertionError, match="contiguous"):
        WeightCopies([WeightCopy(weight, plain, plain._replace(values=plain.values.t()))])


@pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_counts_of_each_weight_what_eight_bits_do_not_hold(place: str) -> None:
    weights = [torch.randn(*shape, device=place).to(torch.bfloat16).clamp(-6, 6) for shape in SHAPES[:4]]
    tallies = torch.zeros(len(weights), 2, dtype=torch.int64, device=place)
    weights[1][3, 5], weights[1][63, 63], weights[3][271, 143], weights[3][0, 0] = 7.5, -100, torch.inf, torch.nan
    copies = [copy_of(weight) for weight in weights]
    of_tally = zip(copies, tallies.unbind(), strict=True)
    counting = WeightCopies([copy._replace(plain=copy.plain._replace(tally=tally)) for copy, tally in of_tally])
    for times in (1, 2):
        fp8_weights(counting)
        assert tallies.tolist() == [[0, 0], [2 * times, 0], [0, 0], [0, 2 * times]]
