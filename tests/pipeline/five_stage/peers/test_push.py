"""Blocks in the ranks' buffers, and sums of what came: plain functions element by element, kernels against these."""

import random
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import dlrm_bench.pipeline.five_stage.peers.push as push_module
from dlrm_bench.pipeline.five_stage.peers.push import (
    WIDEST,
    Block,
    PushTable,
    RankBuffers,
    plain_push,
    plain_sum_of_ranks,
    push,
    sum_of_ranks,
    triton_push,
    triton_sum_of_ranks,
)
from tests.kernels.devices import DEVICE, needs_triton

BLOCKS = {
    "rows of a matrix": [Block(0, 24, 16, 40, 5, 8), Block(8, 24, 0, 16, 5, 16), Block(0, 0, 0, 0, 0, 0)],
    "odd rows": [Block(3, 7, 1, 9, 5, 3), Block(1, 7, 50, 3, 3, 3)],
    "one row": [Block(0, 0, 8, 0, 1, 1000), Block(1000, 0, 0, 0, 1, 24)],
    "the same for all": [Block(0, 12, 64, 8, 4, 8)] * 4,
    "a row again and again": [Block(4, 0, 0, 8, 6, 8), Block(4, 0, 48, 8, 600, 8)],
    "nothing": [Block(0, 0, 0, 0, 0, 8), Block(0, 4, 0, 4, 3, 0)],
}
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8)


def buffers(ranks: int, nbytes: int, rank: int = 0) -> RankBuffers:
    """Buffers full of a number that nobody sends, each in memory of its own, as on several GPUs."""
    return RankBuffers([torch.full((nbytes,), 0xA5, dtype=torch.uint8, device=DEVICE) for _ in range(ranks)], rank)


def source_of(dtype: torch.dtype, count: int = 4096) -> Tensor:
    drawn = torch.randint(0, 100, (count,), generator=torch.Generator().manual_seed(0))
    return drawn.to(dtype).to(DEVICE)


def test_every_element_is_where_its_block_says() -> None:
    source = torch.arange(100, dtype=torch.int32, device=DEVICE)
    blocks = [Block(20, 10, 4, 8, 3, 2), Block(0, 0, 0, 0, 0, 1), Block(99, 0, 0, 0, 1, 1)]
    outs = buffers(3, 96)
    push(source, PushTable(list(enumerate(blocks)), 4, WIDEST, DEVICE), outs)
    first, second, third = (of.view(torch.int32).tolist() for of in outs.tensors)
    unsent = torch.full((4,), 0xA5, dtype=torch.uint8).view(torch.int32).item()
    expected = [unsent] * 24
    assert second == expected
    assert third == [99, *expected[1:]]
    for row in range(3):
        expected[4 + 8 * row : 6 + 8 * row] = [20 + 10 * row, 21 + 10 * row]
    assert first == expected


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("skipped", [0, 1, 4])
@pytest.mark.parametrize("blocks", BLOCKS.values(), ids=BLOCKS)
def test_the_kernel_equals_the_plain_function(blocks: list[Block], skipped: int, dtype: torch.dtype) -> None:
    source = source_of(dtype)[skipped:]
    table = PushTable(list(enumerate(blocks)), source.itemsize, _alignment(source), DEVICE)
    got, expected = buffers(len(blocks), 1 << 16), buffers(len(blocks), 1 << 16)
    triton_push(source, table, got)
    plain_push(source, table, expected)
    for ours, plain in zip(got.tensors, expected.tensors, strict=True):
        assert torch.equal(ours, plain)
    if skipped == 1:  # by three programs, which most of these blocks do not give equal parts
        with patch.object(push_module, "_FEW", 3), patch.object(push_module, "_UNITS_OF_FEW", 128):
            triton_push(source, table, again := buffers(len(blocks), 1 << 16), beside=True)
        assert all(map(torch.equal, again.tensors, expected.tensors))
    assert any(bool((of != 0xA5).any()) for of in got.tensors) == any(block.elements for block in blocks)


def _alignment(source: Tensor) -> int:
    return next(size for size in (16, 8, 4, 2, 1) if source.data_ptr() % size == 0)


@needs_triton
@pytest.mark.parametrize("seed", range(8))
def test_any_blocks(seed: int) -> None:
    """Of rows at any places and distances, of different sizes on three ranks, up to the end of the source."""
    draw = random.Random(seed)
    step = draw.choice([1, 2, 4, 16])
    blocks = []
    for _ in range(3):
        rows, columns = draw.randint(0, 40), step * draw.randint(0, 9)
        source, target, *gaps = (step * draw.randint(0, 9) for _ in range(4))
        blocks.append(Block(source, columns + gaps[0], target, columns + gaps[1], rows, columns))
    values = source_of(torch.float16, 16 * (40 * 18 + 9))
    table = PushTable(list(enumerate(blocks)), 2, WIDEST, DEVICE)
    ends = [of.source + (of.rows - 1) * of.source_stride + of.columns for of in blocks if of.elements]
    values = values[: max(ends, default=0)].clone()
    assert table.unit >= min(16, 2 * step)
    got, expected = buffers(3, 1 << 16), buffers(3, 1 << 16)
    triton_push(values, table, got)
    plain_push(values, table, expected)
    assert all(map(torch.equal, got.tensors, expected.tensors))


@needs_triton
@pytest.mark.parametrize("programs", [1 << 14, 4])
def test_a_rank_is_sent_any_number_of_blocks(programs: int) -> None:
    """Large and small ones, to one rank three and to another none; by fewer programs than they have parts."""
    blocks = [(2, Block(0, 0, 0, 0, 1, 3000)), (0, Block(8, 0, 0, 0, 1, 8)), (2, Block(3000, 0, 4000, 0, 1, 12))]
    blocks += [(2, Block(16, 0, 3500, 0, 1, 4)), (0, Block(0, 8, 8, 8, 3, 8))]
    source = source_of(torch.float32)
    table = PushTable(blocks, 4, WIDEST, DEVICE)
    got, expected = buffers(3, 1 << 16), buffers(3, 1 << 16)
    with patch.object(push_module, "_PROGRAMS", programs):
        triton_push(source, table, got)
    plain_push(source, table, expected)
    assert all(map(torch.equal, got.tensors, expected.tensors))
    assert torch.equal(got.tensors[2].view(torch.float32)[4000:4012], source[3000:3012])
    assert bool((got.tensors[1] == 0xA5).all())


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("divisor", [2, 3, 8])
def test_elements_are_divided_on_their_way(divisor: int, dtype: torch.dtype) -> None:
    source = torch.randn(4096, generator=torch.Generator().manual_seed(0)).to(DEVICE).to(dtype)
    blocks = [(0, Block(0, 64, 0, 32, 20, 32)), (1, Block(5, 0, 3, 0, 1, 900))]
    table = PushTable(blocks, source.itemsize, WIDEST, DEVICE)
    got, expected = buffers(2, 1 << 14), buffers(2, 1 << 14)
    triton_push(source, table, got, divisor=divisor)
    plain_push(source, table, expected, divisor)
    ours, plain = got.tensors[1].view(dtype)[3:903], expected.tensors[1].view(dtype)[3:903]
    assert torch.equal(plain, source[5:905].clone().div_(divisor))
    # The interpreter rounds to bf16 in its own way, and a CPU divides, where GPUs multiply by the reciprocal.
    exact = DEVICE.type == "cuda" or (divisor != 3 and dtype != torch.bfloat16)
    torch.testing.assert_close(ours, plain, **({"rtol": 0, "atol": 0} if exact else {}))
    rest = got.tensors[0].view(dtype)[640:], expected.tensors[0].view(dtype)[640:]
    assert torch.equal(rest[0].view(torch.uint8), rest[1].view(torch.uint8))


def test_only_numbers_are_divided() -> None:
    with pytest.raises(AssertionError, match="divided"):
        push(source_of(torch.int64), PushTable([], 8, WIDEST, DEVICE), buffers(2, 64), divisor=2)


def test_the_widest_loads_are_those_that_everything_is_aligned_to() -> None:
    def unit(*blocks: Block, itemsize: int = 4, alignment: int = WIDEST) -> int:
        return PushTable(list(enumerate(blocks)), itemsize, alignment, DEVICE).unit

    aligned = Block(0, 64, 0, 128, 7, 32)
    assert unit(aligned) == 16
    assert unit(aligned, alignment=8) == 8
    assert unit(aligned, aligned._replace(target=2)) == 8
    assert unit(aligned, aligned._replace(source_stride=65)) == 4
    assert unit(aligned._replace(source_stride=65, rows=1)) == 16  # a single row has no distance
    assert unit(aligned, Block(1, 1, 1, 1, 0, 1)) == 16  # nothing is sent
    assert unit(Block(0, 3, 0, 3, 8, 3)) == 16  # rows without gaps are a single one
    assert unit(Block(0, 3, 0, 4, 8, 3)) == 4
    assert unit(Block(1, 0, 0, 0, 1, 3), itemsize=2) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_sums_are_in_rank_order_and_rounded_once(dtype: torch.dtype) -> None:
    terms = torch.tensor([[1e4, -0.0, 1.0], [-1e4, -0.0, 2**-8], [2**-9, -0.0, 2**-8]], device=DEVICE).to(dtype)
    out = torch.empty(3, dtype=dtype, device=DEVICE)
    sum_of_ranks(terms, out)
    expected = (terms[0].float() + terms[1].float()) + terms[2].float()
    assert torch.equal(out, expected.to(dtype))
    assert torch.signbit(out[1])
    sum_of_ranks(terms[:2].contiguous(), out, 0.5)
    assert torch.equal(out, (terms[0] / 2 + terms[1] / 2))
    out.copy_(terms[1])
    sum_of_ranks(torch.stack([terms[0], terms[1] * float("nan")]), out, 0.5, own=1)
    assert torch.equal(out, (terms[0] / 2 + terms[1] / 2))


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("count", [0, 1, 33, 2048, 5000])
def test_the_sums_kernel_equals_the_plain_function(count: int, ranks: int, dtype: torch.dtype) -> None:
    terms = torch.randn(ranks, count, generator=torch.Generator().manual_seed(0)).to(DEVICE).to(dtype)
    for scale, own in ((1.0, None), (1 / ranks, None), (1 / ranks, 0), (1 / ranks, ranks - 1)):
        got, expected = torch.empty_like(terms[0]), torch.empty_like(terms[0])
        received = terms.clone()
        if own is not None:
            got.copy_(terms[own])
            received[own] = float("nan")
        triton_sum_of_ranks(received, got, scale, own)
        plain_sum_of_ranks(terms, expected, scale)
        # The interpreter rounds to bf16 in its own way, and a GPU may round a product and a sum at once.
        exact = (scale == 1.0 or ranks != 3) and not (DEVICE.type == "cpu" and dtype == torch.bfloat16)
        torch.testing.assert_close(got, expected, **({"rtol": 0, "atol": 0} if exact else {}))
