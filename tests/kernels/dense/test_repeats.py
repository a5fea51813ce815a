"""Cross-cutting: products by Hopper's own instructions, and what rounds to eight bits, give equal bits a thousand times
beside other work, which changes when each of their warps gets its turn and its data."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from dlrm_bench.kernels.dense import fused_cross
from dlrm_bench.kernels.dense.fp8 import E4M3, E5M2, Fp8Pair, empty, empty_pair, fp8_product
from dlrm_bench.kernels.dense.fp8_copies import fp8_copies, partial_rows
from dlrm_bench.kernels.dense.fp8_weights import WeightCopies, WeightCopy, fp8_weights
from tests.kernels.dense.test_fp8 import BF16, in_eight_bits, needs_hopper, randn

LAUNCHES = 1000
BATCH, WIDTH, DEPTH = 1040, 3472, 512
"""Many tiles of each block, with edges inside of the last ones."""


class Case(NamedTuple):
    run: Callable[[], None]
    outputs: list[Tensor]


def of_pair(pair: Fp8Pair) -> list[Tensor]:
    return [part.values.view(torch.uint8) for part in pair]


def eight_bit_cases() -> Iterator[tuple[str, Case]]:
    a, b, bias = in_eight_bits(randn(BATCH, WIDTH)), in_eight_bits(randn(DEPTH, WIDTH, scale=0.05)), randn(DEPTH)
    out = torch.empty(BATCH, DEPTH, device="cuda", dtype=BF16)
    yield "product, relu", Case(partial(fp8_product, a, b, out, bias), [out])
    for dtype in (E4M3, E5M2):
        factor, pair = in_eight_bits(randn(BATCH, WIDTH), dtype), empty_pair(BATCH, DEPTH, dtype, 2.0, out.device)
        yield f"product to {dtype}", Case(partial(fp8_product, factor, b, pair), of_pair(pair))
    x, mask, copies = randn(BATCH, WIDTH), randn(BATCH, WIDTH), empty_pair(BATCH, WIDTH, E5M2, 2.0, out.device)
    sums = torch.empty(partial_rows(BATCH), WIDTH, device="cuda")
    yield "copies", Case(partial(fp8_copies, x, copies), of_pair(copies))
    yield "copies, relu", Case(partial(fp8_copies, x, copies, mask, sums), [*of_pair(copies), sums])
    sizes = ((DEPTH, WIDTH), (WIDTH, DEPTH))
    weight = WeightCopy(randn(*sizes[0]), *(empty(*size, E4M3, 64.0, out.device) for size in sizes))
    tensors = [copy.values.view(torch.uint8) for copy in weight[1:]]
    yield "weights", Case(partial(fp8_weights, WeightCopies([weight])), tensors)


def fused_cases(eight: bool) -> Iterator[tuple[str, Case]]:
    x0, x, g = (randn(BATCH, WIDTH) for _ in range(3))
    u, w, bias = randn(BATCH, DEPTH), randn(WIDTH, DEPTH, scale=0.05), randn(WIDTH)
    y, out, dx, dy, dx0 = (torch.empty_like(x) for _ in range(5))
    partials = torch.empty(fused_cross.partial_rows(BATCH, WIDTH, x.device), WIDTH, device="cuda")
    if not eight:
        v = w.t().contiguous()
        yield "forward", Case(partial(fused_cross.fused_cross_forward, x0, x, u, w, bias, y, out), [y, out])
        backward = partial(fused_cross.fused_cross_backward, g, u, v, x0, dx, dy, partials)
        yield "backward", Case(backward, [dx, dy, partials])
        by_input = partial(fused_cross.fused_cross_input_backward, [g, x], [x0, x], u, v, dx0)
        yield "backward by x0", Case(by_input, [dx0])
        return
    u8, du8, w8 = in_eight_bits(u), in_eight_bits(u, E5M2), in_eight_bits(w, E4M3, 64.0)
    tiles, of_x = (fused_cross.empty_y(BATCH, WIDTH, 16.0, x.device) for _ in range(2))
    fused_cross.take_y(of_x, x)
    out8, dy8 = (empty_pair(BATCH, WIDTH, dtype, 16.0, x.device) for dtype in (E4M3, E5M2))
    forward = partial(fused_cross.fused_cross_forward, x0, x, u8, w8, bias, tiles, out, out8)
    yield "forward", Case(forward, [tiles.values.view(torch.uint8), out, *of_pair(out8)])
    for name, gradient in (("backward", g), ("backward of the output", None)):
        backward = partial(fused_cross.fused_cross_backward, gradient, du8, w8, x0, dx, dy8, partials)
        yield name, Case(backward, [dx, *of_pair(dy8), partials])
    by_input = partial(fused_cross.fused_cross_input_backward, [g, x], [of_x, of_x], du8, w8, dx0)
    yield "backward by x0", Case(by_input, [dx0])


class OtherWork:
    """Products and copies on a stream of their own, as long as the launches that they run beside."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._factors = randn(1024, 2048), randn(2048, 1024)
        self._product = torch.empty(1024, 1024, device="cuda", dtype=BF16)
        self._memory = torch.zeros(2, 1 << 22, device="cuda")

    def launch(self, turn: int) -> None:
        with torch.cuda.stream(self._stream):
            for _ in range(turn % 3):  # never in step with the launches beside it
                torch.mm(*self._factors, out=self._product)
            self._memory[1].copy_(self._memory[0])


def wrong_launches(case: Case, launches: int = LAUNCHES) -> int:
    """Returns how many of the launches gave other bits than one that ran alone."""
    case.run()
    torch.cuda.synchronize()
    expected = [tensor.clone() for tensor in case.outputs]
    wrong, work = torch.zeros((), dtype=torch.int64, device="cuda"), OtherWork()
    for turn in range(launches):
        work.launch(turn)
        for tensor in case.outputs:
            tensor.view(torch.uint8).fill_(turn % 251)
        case.run()
        differs = [
            (tensor.view(torch.uint8) != one.view(torch.uint8)).any()
            for tensor, one in zip(case.outputs, expected, strict=True)
        ]
        wrong += torch.stack(differs).any()
    return int(wrong)


CASES: list[tuple[str, Callable[[], Iterator[tuple[str, Case]]]]] = [
    ("eight bits", eight_bit_cases),
    ("fused in bf16", partial(fused_cases, eight=False)),
    ("fused in eight bits", partial(fused_cases, eight=True)),
]


@needs_hopper
@pytest.mark.parametrize("make", [make for _, make in CASES], ids=[name for name, _ in CASES])
def test_a_thousand_launches_beside_other_work_give_equal_bits(make: Callable[[], Iterator[tuple[str, Case]]]) -> None:
    torch.manual_seed(1)
    assert {name: wrong for name, case in make() if (wrong := wrong_launches(case))} == {}


@needs_hopper
def test_a_launch_that_differs_is_counted() -> None:
    x, out = randn(64, 64), torch.empty(64, 64, device="cuda", dtype=BF16)
    launches = iter(range(100))

    def run() -> None:
        out.copy_(x)
        if next(launches) == 7:
            out[3, 5] += 1

    assert wrong_launches(Case(run, [out]), launches=20) == 1
