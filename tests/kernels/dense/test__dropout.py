"""Masks from a counter: Philox as published, Triton's as the plain one, shares that are kept."""

import pytest
import torch

from dlrm_bench.kernels._triton import jit, tl
from dlrm_bench.kernels.dense import _dropout
from dlrm_bench.kernels.dense._dropout import Dropout, draw_seed, dropout_words, plain_words, scale_of, threshold_of
from tests.kernels.devices import DEVICE, needs_triton


def seed(value: int) -> torch.Tensor:
    return torch.tensor([value], device=DEVICE)


def test_ten_rounds_are_the_published_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """The known answers of Random123's kat_vectors, of a counter and a key of zeros."""
    monkeypatch.setattr(_dropout, "_ROUNDS", 10)
    zero = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    words = plain_words(Dropout(0.1, seed(0), 0), zero, zero, zero)
    assert [int(word) for word in words] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


@jit
def _words_kernel(seed, out, stream, columns: tl.constexpr):
    first, second = tl.arange(0, columns)[None, :] * 77_777, tl.arange(0, 2)[:, None] * 900_000_000
    at = out + tl.arange(0, 2)[:, None] * columns + tl.arange(0, columns)[None, :]
    a, b, c, d = dropout_words(tl.load(seed), stream, first + second * 0, second, second * 0 + 9)
    tl.store(at, a.to(tl.int64))
    tl.store(at + 2 * columns, b.to(tl.int64))
    tl.store(at + 4 * columns, c.to(tl.int64))
    tl.store(at + 6 * columns, d.to(tl.int64))


@needs_triton
@pytest.mark.parametrize("value", [0, 5, -3, 2**62 - 1])
def test_triton_has_the_plain_words(value: int) -> None:
    out = torch.empty(4, 2, 16, dtype=torch.int64, device=DEVICE)
    _words_kernel[(1,)](seed(value), out, 3, 16)
    first, second = torch.arange(16, device=DEVICE) * 77_777, torch.arange(2, device=DEVICE)[:, None] * 900_000_000
    assert torch.equal(out, torch.stack(plain_words(Dropout(0.1, seed(value), 3), first, second, first * 0 + 9)))


def test_words_differ_by_seed_and_stream() -> None:
    place = torch.arange(1000, device=DEVICE)
    words = [
        torch.stack(plain_words(Dropout(0.1, seed(value), stream), place, place, place))
        for value, stream in ((1, 0), (1, 1), (2, 0), (1 + 2**32, 0))
    ]
    for index, one in enumerate(words):
        for other in words[:index]:
            assert (one == other).float().mean() < 1e-3


def test_seeds_are_those_of_torchs_generator() -> None:
    torch.manual_seed(3)
    first, second = draw_seed(DEVICE), draw_seed(DEVICE)
    torch.manual_seed(3)
    assert torch.equal(draw_seed(DEVICE), first)
    assert not torch.equal(first, second)


@pytest.mark.gpu
def test_a_replayed_graph_draws_a_new_seed() -> None:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drawn = draw_seed(DEVICE)
    seeds = set()
    for _ in range(3):
        graph.replay()
        seeds.add(int(drawn))
    assert len(seeds) == 3


@pytest.mark.parametrize("rate", [0.1, 0.2, 0.5])
def test_scale_keeps_the_mean(rate: float) -> None:
    dropout = Dropout(rate, seed(0), 0)
    assert abs(threshold_of(dropout) / 65536 - rate) < 2**-17
    assert scale_of(dropout) == pytest.approx(1 / (1 - rate), rel=1e-4)
    assert scale_of(dropout) * (1 - threshold_of(dropout) / 65536) == 1
