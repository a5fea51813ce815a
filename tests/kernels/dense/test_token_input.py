"""The first layer's input: against its definition token by token and autograd, Triton against plain."""

import pytest
import torch
from torch import Tensor

from dlrm_bench.kernels.dense import token_input
from dlrm_bench.kernels.dense._dropout import Dropout
from dlrm_bench.kernels.dense.token_input import (
    TokenPlaces,
    no_rows,
    plain_token_input_backward,
    plain_token_input_forward,
    token_input_backward,
    token_input_factors,
    token_input_forward,
    triton_token_input_backward,
    triton_token_input_forward,
)
from tests.kernels.devices import DEVICE, needs_triton

CASES = {
    "none": [],
    "no events": [0, 0],
    "one event": [1],
    "some": [3, 0, 21, 1],
    "several groups of samples": [1, 0, 12, 2, 0],
}
CONTEXT, EVENTS, POSITIONS, BUCKETS = 8, 5, 40, 50
SEED = torch.tensor([987654321987654321], device=DEVICE)
DROPOUTS = {"still": None, "dropout": Dropout(0.2, SEED, 0)}


def draw(case: str, padding: int, dtype: torch.dtype = torch.float32, width: int = 16):
    """Events, context, weights of place and time, places; `padding` rows of events past the last one."""
    lengths = CASES[case]
    generator = torch.Generator().manual_seed(len(lengths))
    samples, total = len(lengths), sum(lengths)

    def rows(*shape: int) -> Tensor:
        return torch.randn(*shape, width, generator=generator).to(DEVICE)

    def whole(high: int, count: int) -> Tensor:
        return torch.randint(0, high, (count,), generator=generator).int().to(DEVICE)

    offsets = torch.tensor([0, *(length + CONTEXT + 1 for length in lengths)]).cumsum(0).to(DEVICE)
    query = 100_000 + whole(60_000, samples)
    places = TokenPlaces(
        offsets=offsets,
        event=whole(EVENTS, total + padding),
        timestamp=100_000 + whole(60_000, total + padding),
        query=query,
        context=CONTEXT,
        max_length=max([CONTEXT + 1, *(length + CONTEXT + 1 for length in lengths)]),
    )
    given = rows(EVENTS + samples).to(dtype), rows(samples, CONTEXT).to(dtype), rows(POSITIONS), rows(BUCKETS)
    return given, places, total + (CONTEXT + 1) * samples


def by_token(given, places: TokenPlaces, factor: float) -> tuple[Tensor, list[int], list[int]]:
    """The definition: tokens, and rows of events and time of each."""
    events, context, position, time = given
    tokens, of_event, of_time = [], [], []
    offsets, query = places.offsets.tolist(), places.query.tolist()
    event, number = places.event.tolist(), 0
    for sample in range(len(query)):
        length = offsets[sample + 1] - offsets[sample]
        for place in range(length):
            if place < CONTEXT:
                row, seconds, of_place, named = context[sample, place], 0, place, len(events)
            else:
                of_place = length - 1 - place + CONTEXT
                named, seconds = EVENTS + sample, query[sample]
                if place < length - 1:
                    named, seconds = event[number], int(places.timestamp[number])
                    number += 1
                row = events[named]
            before = torch.tensor(float(query[sample] - seconds)).clamp(min=1e-6)
            bucket = min(BUCKETS - 1, int((before / torch.tensor(60.0)).sqrt()))
            tokens.append(row * factor + position[of_place] + time[bucket])
            of_event.append(named)
            of_time.append(bucket)
    empty = context.new_zeros(0, events.shape[1])
    return torch.stack(tokens) if tokens else empty, of_event, of_time


@pytest.mark.parametrize("kind", DROPOUTS)
@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("forward", "backward"),
    [
        (token_input_forward, token_input_backward),
        (plain_token_input_forward, plain_token_input_backward),
        pytest.param(triton_token_input_forward, triton_token_input_backward, marks=needs_triton),
    ],
    ids=["chosen", "plain", "triton"],
)
def test_equals_the_definition_and_its_derivative(
    forward, backward, case: str, padding: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_input, "_GROUPS", 2)
    monkeypatch.setattr(token_input, "_LEAST_GROUP", 1)
    given, places, total = draw(case, padding)
    dropout, factor, count = DROPOUTS[kind], 4.0, total + padding
    exact = [of.double().requires_grad_() for of in given]
    expected, of_event, of_time = by_token(exact, places, factor)
    factors = token_input_factors(dropout, count, 16, places)[:total]
    out = torch.full((count, 16), torch.nan, device=DEVICE)
    rows = no_rows(count, given[0], given[3])
    forward(*given, places, factor, dropout, out, rows)
    torch.testing.assert_close(out[:total].double(), expected * factors, rtol=1e-5, atol=1e-5)
    assert not out[total:].any()
    assert rows.event.tolist() == of_event + [EVENTS + len(places.query)] * padding
    assert rows.time.tolist() == of_time + [BUCKETS] * padding

    grad = torch.randn(count, 16, device=DEVICE)
    grad[total:] = torch.nan
    dposition, through = torch.full_like(given[2], torch.nan), torch.full_like(grad, 5)
    backward(grad, places, dropout, through, dposition)
    torch.testing.assert_close(through[:total], grad[:total] * factors)
    assert (through[total:] == 5).all()
    if total:
        (of_position,) = torch.autograd.grad(expected * factors, exact[2], grad[:total].double())
    else:
        of_position = torch.zeros_like(exact[2])
    torch.testing.assert_close(dposition.double(), of_position, rtol=1e-5, atol=1e-5)


def test_factors_keep_the_share_and_differ_by_sample_and_place() -> None:
    offsets = torch.arange(5, device=DEVICE) * 400
    nothing = torch.zeros(0, dtype=torch.int32, device=DEVICE)
    places = TokenPlaces(offsets, nothing, nothing, nothing, CONTEXT, 400)
    dropped = token_input_factors(DROPOUTS["dropout"], 1600, 64, places) == 0
    assert float(dropped.float().mean()) == pytest.approx(0.2, abs=0.005)
    by_sample = dropped.view(4, 400, 64)
    assert float((by_sample[0] & by_sample[1]).float().mean()) == pytest.approx(0.04, abs=0.005)
    for other in range(1, 9):
        both = dropped[8:] & dropped.roll(other, 0)[8:]
        assert float(both.float().mean()) == pytest.approx(0.04, abs=0.005), other


@pytest.mark.gpu
@pytest.mark.parametrize("kind", DROPOUTS)
def test_bf16_on_a_gpu(kind: str) -> None:
    given, places, total = draw("some", 3, torch.bfloat16, 512)
    outs = torch.empty(2, total + 3, 512, device=DEVICE).bfloat16().unbind()
    rows = [no_rows(total + 3, given[0], given[3]) for _ in outs]
    for forward, out, of in zip((triton_token_input_forward, plain_token_input_forward), outs, rows, strict=True):
        forward(*given, places, 22.6, DROPOUTS[kind], out, of)
    torch.testing.assert_close(*outs, rtol=1e-2, atol=1e-2)
    assert torch.equal(rows[0].event, rows[1].event)
    assert torch.equal(rows[0].time, rows[1].time)


def test_shapes_are_checked() -> None:
    given, places, total = draw("some", 0)
    rows = no_rows(total, given[0], given[3])
    with pytest.raises(AssertionError, match="one dtype"):
        token_input_forward(*given, places, 4.0, None, torch.empty(total, 16, device=DEVICE).double(), rows)
    given = given[0], given[1], given[2][:8].contiguous(), given[3]
    with pytest.raises(AssertionError, match="all candidates and positions"):
        token_input_forward(*given, places, 4.0, None, torch.empty(total, 16, device=DEVICE), rows)
