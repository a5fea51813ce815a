"""The cross network's fused products: plain twins against autograd, CUDA against the plain twins."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dlrm_bench.kernels._cuda import available
from dlrm_bench.kernels.dense.fused_cross import (
    _blocks_of_columns,
    applies,
    cuda_fused_cross_backward,
    cuda_fused_cross_forward,
    cuda_fused_cross_input_backward,
    fused_cross_backward,
    fused_cross_forward,
    fused_cross_input_backward,
    partial_rows,
    plain_fused_cross_backward,
    plain_fused_cross_forward,
    plain_fused_cross_input_backward,
)

CPU = torch.device("cpu")
BF16 = torch.bfloat16
# Rows and columns of one tile and of many; fewer tiles than multiprocessors; edges inside of tiles; more blocks on the
# same columns than columns, and the reverse; depths of one to eight chunks.
SHAPES = [
    (1, 8, 8),
    (64, 128, 64),
    (37, 264, 40),
    (515, 3464, 512),
    (2051, 136, 72),
    (700, 4000, 256),
    (5000, 40, 448),
    (3456, 3456, 512),
]


def randn(*shape: int, device: str | torch.device = "cuda", scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device=device) * scale).to(BF16)


def test_equals_autograd() -> None:
    """A network of two layers and a scalar product, by the plain functions."""
    batch, width, depth = 13, 40, 8
    x0, dx2 = torch.randn(2, batch, width).unbind()
    weights = [tuple(torch.randn(*shape) for shape in ((depth, width), (width, depth), (width,))) for _ in range(2)]
    leaves = [x0, *(tensor for layer in weights for tensor in layer)]
    for leaf in leaves:
        leaf.requires_grad_()
    x = x0
    for v, w, bias in weights:
        x = x0 * (x @ v.t() @ w.t() + bias) + x
    (x * dx2).sum().backward()

    with torch.no_grad():
        xs, us, ys = [x0.detach()], [], []
        for v, w, bias in weights:
            us.append(xs[-1] @ v.t())
            ys.append(torch.empty_like(x0))
            xs.append(torch.empty_like(x0))
            fused_cross_forward(x0, xs[-2], us[-1], w, bias, ys[-1], xs[-1])
        (v0, w0, _), (v1, w1, _) = weights
        dy1, dx1, dy0, dx0 = (torch.empty_like(x0) for _ in range(4))
        partials = torch.empty(partial_rows(batch, width, CPU), width)
        torch.mul(dx2, x0, out=dy1)
        fused_cross_backward(dx2, dy1 @ w1, v1, x0, dx1, dy0, partials)
        fused_cross_input_backward([dx1, dx2], ys, dy0 @ w0, v0, dx0)
    torch.testing.assert_close(xs[-1], x.detach())
    expected = [leaf.grad for leaf in leaves]
    got = [dx0]
    for du, dy, u, x, dbias in ((dy0 @ w0, dy0, us[0], x0, partials.sum(0)), (dy1 @ w1, dy1, us[1], xs[1], dy1.sum(0))):
        got += [du.t() @ x, dy.t() @ u, dbias]
    torch.testing.assert_close([tensor.detach() for tensor in got], expected, rtol=1e-4, atol=1e-4)


def test_applies_to_what_the_kernels_take_only() -> None:
    assert not applies(64, 128, 64, BF16, CPU)
    if available():
        cuda = torch.device("cuda")
        assert applies(64, 128, 64, BF16, cuda)
        assert not applies(64, 128, 64, torch.float32, cuda)
        assert not any(applies(64, *sizes, BF16, cuda) for sizes in ((129, 64), (128, 65), (128, 576)))


@pytest.mark.parametrize("shape", [(3456, 3456), (6912, 3456), (64, 128), (1, 8), (5000, 40), (100, 30000)])
def test_blocks_of_columns_covers_every_block(shape: tuple[int, int]) -> None:
    rows, columns = -(-shape[0] // 64), -(-shape[1] // 128)
    tiles, multiprocessors = rows * columns, 132
    blocks = min(multiprocessors, tiles)
    of_columns: dict[int, set[int]] = {}
    for block in range(blocks):
        for tile in range(block * tiles // blocks, (block + 1) * tiles // blocks):
            of_columns.setdefault(tile // rows, set()).add(block)
    assert max(len(seen) for seen in of_columns.values()) == _blocks_of_columns(*shape, multiprocessors)


def needs_hopper(test: Callable[..., None]) -> Callable[..., None]:
    skip = pytest.mark.skipif(not available(), reason="needs a Hopper GPU (sm_90a) and cuda-bindings")
    return pytest.mark.gpu(skip(test))


def close(got: Tensor, expected: Tensor) -> None:
    """Equal but for the last bit here and there: bf16 of fp32 sums that were added up in another order."""
    difference = (got.float() - expected.float()).norm()
    assert difference <= 3e-4 * expected.float().norm() + 1e-6, (difference / expected.float().norm()).item()
    torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)


@needs_hopper
@pytest.mark.parametrize("shape", SHAPES)
def test_cuda_equals_plain(shape: tuple[int, int, int]) -> None:
    batch, width, depth = shape
    x0, x, g = (randn(batch, width) for _ in range(3))
    u, w, v, bias = randn(batch, depth), randn(width, depth, scale=0.05), randn(depth, width, scale=0.05), randn(width)
    partials = torch.full((partial_rows(batch, width, x.device), width), torch.nan, device="cuda")
    results = []
    for forward, backward in (
        (cuda_fused_cross_forward, cuda_fused_cross_backward),
        (plain_fused_cross_forward, plain_fused_cross_backward),
    ):
        y, out, dx, dy = (torch.full_like(x, torch.nan) for _ in range(4))
        forward(x0, x, u, w, bias, y, out)
        backward(g, u, v, x0, dx, dy, partials.fill_(torch.nan))
        results.append((y, out, dx, dy, partials.sum(0)))
    for got, expected in zip(*results, strict=True):
        close(got, expected)


@needs_hopper
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("shape", SHAPES)
def test_cuda_input_backward_equals_plain(shape: tuple[int, int, int], layers: int) -> None:
    batch, width, depth = shape
    gs, ys = ([randn(batch, width) for _ in range(layers)] for _ in range(2))
    du, v = randn(batch, depth), randn(depth, width, scale=0.05)
    got, expected = (torch.full((batch, width), torch.nan, device="cuda", dtype=BF16) for _ in range(2))
    cuda_fused_cross_input_backward(gs, ys, du, v, got)
    plain_fused_cross_input_backward(gs, ys, du, v, expected)
    close(got, expected)


@needs_hopper
def test_equal_inputs_give_equal_bits_in_graphs_too() -> None:
    batch, width, depth = 1000, 3456, 512
    g, x0, dx, dy, out = (randn(batch, width) for _ in range(5))
    du, v = randn(batch, depth), randn(depth, width, scale=0.05)
    partials = torch.zeros(partial_rows(batch, width, g.device), width, device="cuda")

    def run() -> None:
        fused_cross_backward(g, du, v, x0, dx, dy, partials)
        fused_cross_input_backward([dx, g], [x0, dy], du, v, out)

    run()
    expected = [tensor.clone() for tensor in (dx, dy, partials, out)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(50):
        for tensor in (dx, dy, partials, out):
            tensor.fill_(torch.nan)
        graph.replay()
        assert all(map(torch.equal, (dx, dy, partials, out), expected))
