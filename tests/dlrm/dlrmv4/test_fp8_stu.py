"""A layer with e4m3 factors: as its definition by rounded factors, near the layer without, counted, equal bits."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from dlrm_bench.dlrm.dense.tallies import Tallies
from dlrm_bench.dlrm.dlrmv4.attention import attention, last_attention
from dlrm_bench.dlrm.dlrmv4.fp8_stu import ACTIVATIONS, WEIGHTS, LayerTallies
from dlrm_bench.dlrm.dlrmv4.fused_stu import EPS
from dlrm_bench.dlrm.dlrmv4.stu import StuLayer
from dlrm_bench.kernels.dense._dropout import Dropout, draw_seed
from dlrm_bench.kernels.dense.fp8 import E4M3
from tests.dlrm.dlrmv4.test_fused_stu import BASE, CANDIDATES, OFFSETS, made_layer, made_tokens, results
from tests.kernels.dense.test_fp8 import needs_hopper
from tests.kernels.devices import DEVICE, two_replays

RECOMPUTE = pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
TOKENS = 71
EXACT = DEVICE.type == "cpu"
FORMAT = torch.float32 if EXACT else torch.bfloat16
"""Of tokens: GPUs have products of e4m3 plus a bias to bf16 alone."""
WIDE = 512
"""MLPerf's width."""
WIDTHS = pytest.mark.parametrize("width", [BASE.width, WIDE])
MASKS = Dropout(0.3, torch.tensor([7], device=DEVICE), 1)


def fused(width: int, recompute: bool = False) -> StuLayer:
    """A layer of the small model, or of MLPerf's with its initial weights, but for norms."""
    if width == BASE.width:
        return made_layer(kernels="fused", recompute_layers=recompute)
    layer = StuLayer(replace(BASE, kernels="fused", recompute_layers=recompute, head_width=128, width=WIDE, heads=4))
    generator = torch.Generator().manual_seed(3)
    layer.init_weights(generator)
    for name, weight in layer.named_parameters():
        if "norm" in name or "bias" in name:
            weight.data += 0.2 * torch.randn(weight.shape, generator=generator)
    return layer.to(DEVICE)


def rounding(width: int = BASE.width, recompute: bool = False) -> tuple[StuLayer, Tallies]:
    layer = fused(width, recompute)
    tallies = Tallies(LayerTallies.names(1), DEVICE)
    layer.round_products(LayerTallies.of(tallies, 0))
    return layer, tallies


def tokens_of(padding: int, width: int = BASE.width) -> Tensor:
    return made_tokens(padding, replace(BASE, width=width)).to(FORMAT)


def in_e4m3(x: Tensor, scale: float) -> Tensor:
    return (x.detach().float() * scale).clamp(-448, 448).to(E4M3).float() / scale


def by_definition(layer: StuLayer, tokens: Tensor, candidates: bool) -> Tensor:
    """The layer's output by PyTorch's operators, in fp32 with results that are kept rounded to the tokens' format;
    factors of the products over all tokens rounded to e4m3 by hand."""
    weights = {name: weight.detach() for name, weight in layer.named_parameters()}
    norms = [[kept(weights[f"{name}_{kind}"]) for kind in ("weight", "bias")] for name in ("norm", "output_norm")]
    inner, heads, length = len(norms[1][0]), BASE.heads if len(norms[0][0]) == BASE.width else 4, 50
    tokens, bias = tokens.float(), kept(weights["uvqk_bias"])
    normed = functional.layer_norm(tokens, tokens.shape[1:], *norms[0], EPS)
    projected = kept(in_e4m3(normed, ACTIVATIONS) @ in_e4m3(weights["uvqk_weight"], WEIGHTS) + bias)
    if candidates:
        ends = OFFSETS[1:] - 1
        exact = kept(kept(normed[ends]) @ kept(weights["uvqk_weight"]) + bias)
        gate, query = exact[:, :inner], exact[:, 2 * inner : 3 * inner]
        _, value, _, key = projected.chunk(4, dim=1)
        attended = last_attention(query, key, value, OFFSETS, heads, length)
        tokens, output = tokens[ends], kept(weights["output_weight"])
    else:
        gate, attended = projected[:, :inner], attention(projected, OFFSETS, heads, length)
        output = in_e4m3(weights["output_weight"], WEIGHTS)
    s, attended = functional.silu(gate), kept(attended)
    joined = torch.cat([s, attended, s * functional.layer_norm(attended, (inner,), *norms[1], EPS)], dim=1)
    return tokens + (kept(joined) if candidates else in_e4m3(joined, ACTIVATIONS)) @ output


def kept(x: Tensor) -> Tensor:
    return x.to(FORMAT).float()


def apart(one: Tensor, other: Tensor) -> float:
    return float((one.float() - other.float()).norm() / other.float().norm())


@CANDIDATES
@WIDTHS
def test_equals_its_definition_by_rounded_factors(width: int, candidates: bool) -> None:
    layer, _ = rounding(width)
    tokens = tokens_of(0, width)
    expected = by_definition(layer, tokens, candidates)
    with torch.no_grad():
        out = layer(tokens, OFFSETS, 50, candidates)
        unrounded = fused(width)(tokens, OFFSETS, 50, candidates)
    # A sum in another order may round a number to the adjacent one, 1/16 away, here and there.
    assert apart(out, expected) < (1e-3 if EXACT else 6e-3), apart(out, expected)
    assert apart(out, unrounded) > (2e-3 if EXACT else 4e-3), "e4m3 must have been used"


@CANDIDATES
@RECOMPUTE
@WIDTHS
def test_is_near_the_layer_without(width: int, recompute: bool, candidates: bool) -> None:
    """Output and gradients, within what rounding to 4 bits leaves of sums; rows past the end change nothing."""
    expected = results(fused(width), tokens_of(0, width), candidates, MASKS)
    layer, tallies = rounding(width, recompute)
    names = ["output", "tokens", *(name for name, _ in layer.named_parameters())]
    for padding in (0, 6):
        found = results(layer, tokens_of(padding, width), candidates, MASKS)
        assert candidates or not found[0][TOKENS:].any()
        assert not found[1][TOKENS:].any()
        found[:2] = [of[:TOKENS] for of in found[:2]]
        for name, ours, theirs in zip(names, found, expected, strict=True):
            assert ours.isfinite().all(), name
            assert apart(ours, theirs) < (0.03 if name == "output" else 0.12), (name, apart(ours, theirs))
        assert apart(found[0], expected[0]) > 1e-3, "e4m3 must have been used"
    assert not tallies.counts.any()


@CANDIDATES
def test_a_recomputed_projection_has_equal_bits(candidates: bool) -> None:
    """And so have all results, run by run."""
    runs = [
        results(rounding(BASE.width, recompute)[0], tokens_of(2), candidates, MASKS)
        for recompute in (False, True, False)
    ]
    for kept, again, third in zip(*runs, strict=True):
        assert torch.equal(kept, again)
        assert torch.equal(kept, third)


@CANDIDATES
@RECOMPUTE
def test_counts_each_number_that_e4m3_cannot_represent_once(recompute: bool, candidates: bool) -> None:
    layer, tallies = rounding(BASE.width, recompute)
    tokens = tokens_of(3)
    with torch.no_grad():
        layer.norm_weight[5], layer.norm_bias[5] = 448 / ACTIVATIONS, 0  # so numbers beyond 1 are too large
        layer.uvqk_weight[1, -1] = layer.uvqk_weight[2, 3] = 1.1 * 448 / WEIGHTS  # of k, and of u
        layer.output_weight[3, 3] = -1.1 * 448 / WEIGHTS
        layer.output_norm_weight[0] = 1e4
    normed = functional.layer_norm(tokens[:TOKENS].float(), tokens.shape[1:], None, None, EPS)
    large = int((normed[:, 5].abs() > 1).sum())
    assert large > 0
    results(layer, tokens, candidates)
    counts = dict(zip(tallies.names, tallies.counts.tolist(), strict=True))
    assert counts["layers.0.normed"] == [large, 0]
    assert counts["layers.0.uvqk_weight"] == [1 if candidates else 2, 0]
    assert counts["layers.0.output_weight"] == [0 if candidates else 1, 0]
    assert (counts["layers.0.joined"][0] > 0) != candidates
    tokens[4, 4] = torch.nan
    results(layer, tokens, candidates)
    assert tallies.of("layers.0.normed")[1] == BASE.width


@needs_hopper
def test_is_captured_in_a_graph() -> None:
    layer, tallies = rounding(WIDE)
    tokens = tokens_of(5, WIDE)

    def run() -> Tensor:
        given = tokens.clone().requires_grad_()
        out = layer(given, OFFSETS, 50, False, Dropout(0.3, draw_seed(DEVICE), 1))
        return torch.cat([out.detach(), torch.autograd.grad(out.float().sum(), given)[0]])

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    outs = two_replays(graph, out)
    assert not torch.equal(*outs), "each replay draws its own masks"
    assert all(of.isfinite().all() for of in outs)
    tokens[3, 3] = torch.nan
    graph.replay()
    assert tallies.of("layers.0.normed")[1] == WIDE
