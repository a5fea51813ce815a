"""A layer by fused kernels: as the plain one, whatever lies past the last token, in graphs, with equal bits."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dlrm_bench.dlrm.dlrmv4.config import ModelConfig
from dlrm_bench.dlrm.dlrmv4.counts import activation_bytes
from dlrm_bench.dlrm.dlrmv4.stu import StuLayer
from dlrm_bench.kernels.dense._dropout import Dropout, draw_seed
from tests.dlrm.dlrmv4.cases import STILL
from tests.kernels.devices import DEVICE, two_replays

BASE = replace(STILL, preprocessor_hidden=32)
OFFSETS = torch.tensor([0, 9, 30, 71], device=DEVICE)
CANDIDATES = pytest.mark.parametrize("candidates", [False, True], ids=["all", "candidates"])


def made_layer(**changes: object) -> StuLayer:
    layer = StuLayer(replace(BASE, **changes))  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(3)
    for weight in layer.parameters():
        torch.nn.init.normal_(weight, 0.2, 0.3, generator=generator)
    return layer.to(DEVICE)


def made_tokens(padding: int, config: ModelConfig = BASE) -> Tensor:
    tokens = torch.randn(71 + padding, config.width, generator=torch.Generator().manual_seed(4)).to(DEVICE)
    tokens[71:] = 0
    return tokens


def results(layer: StuLayer, tokens: Tensor, candidates: bool, dropout: Dropout | None = None) -> list[Tensor]:
    """Output, gradient of tokens, gradients of weights; that of the output is of sequences alone."""
    given = tokens.clone().requires_grad_()
    layer.zero_grad()
    out = layer(given, OFFSETS, 50, candidates, dropout)
    grad = torch.linspace(-1, 1, out.shape[1] * 71, device=DEVICE).view(71, -1)
    (out[:71] * grad[: len(out)]).sum().backward()
    assert given.grad is not None
    return [out.detach(), given.grad, *(weight.grad.clone() for weight in layer.parameters())]


@CANDIDATES
@pytest.mark.parametrize("recompute", [False, True])
def test_rows_past_the_last_sequence_change_nothing(recompute: bool, candidates: bool) -> None:
    plain = results(made_layer(), made_tokens(0), candidates)
    layer = made_layer(kernels="fused", recompute_layers=recompute)
    for padding in (0, 6):
        out, of_tokens, *of_weights = results(layer, made_tokens(padding), candidates)
        torch.testing.assert_close(out[:71], plain[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(of_tokens[:71], plain[1], rtol=1e-5, atol=1e-4)
        assert not of_tokens[71:].any()
        assert candidates or not out[71:].any()
        for ours, theirs in zip(of_weights, plain[2:], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-5 * float(theirs.abs().max()))


@CANDIDATES
def test_recompute_drops_the_same(candidates: bool) -> None:
    torch.manual_seed(0)
    dropout = Dropout(0.3, draw_seed(DEVICE), 1)
    kept, again = (
        results(made_layer(kernels="fused", recompute_layers=of), made_tokens(2), candidates, dropout)
        for of in (False, True)
    )
    for one, other in zip(kept, again, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@CANDIDATES
@pytest.mark.parametrize("recompute", [False, True])
def test_keeps_as_many_bytes_as_are_counted(recompute: bool, candidates: bool) -> None:
    """Of each token; rows of candidates alone count for nothing."""
    kept = 0

    def keep(saved: Tensor) -> Tensor:
        nonlocal kept
        kept += saved.nbytes if len(saved) == 71 else 0
        return saved

    layer = made_layer(kernels="fused", recompute_layers=recompute)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
        for last in (False, candidates):
            layer(made_tokens(0).requires_grad_(), OFFSETS, 50, last)
    counted = replace(BASE, layers=2, last_layer="candidates" if candidates else "all")
    assert kept == activation_bytes(counted, 71, recompute=recompute, number_bytes=4)


@pytest.mark.gpu
@CANDIDATES
def test_equal_bits_run_by_run_on_a_gpu(candidates: bool) -> None:
    layer = made_layer(kernels="fused", head_width=128, width=512)
    tokens = made_tokens(5, replace(BASE, width=512))
    dropout = Dropout(0.3, torch.tensor([7], device=DEVICE), 1)
    first, again = (results(layer, tokens, candidates, dropout) for _ in range(2))
    for one, other in zip(first, again, strict=True):
        assert torch.equal(one, other)


@pytest.mark.gpu
def test_a_replayed_graph_drops_anew() -> None:
    layer, tokens = made_layer(kernels="fused"), made_tokens(5)

    def run() -> Tensor:
        with torch.no_grad():
            return layer(tokens, OFFSETS, 50, False, Dropout(0.3, draw_seed(DEVICE), 1))

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    outs = two_replays(graph, out)
    assert not torch.equal(*outs)
    assert all(of.isfinite().all() for of in outs)
