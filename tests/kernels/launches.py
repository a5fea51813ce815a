"""Launches of the Triton kernels over the tokens of DLRMv4's static pipeline, of small sizes, without a GPU."""

import torch

from dlrm_bench.kernels.dense import (
    gated_norm,
    last_query_attention,
    norm,
    silu_attention,
    sorted_sums,
    token_input,
    zero_tail,
)
from dlrm_bench.kernels.dense._dropout import Dropout
from dlrm_bench.kernels.dense.fp8 import E4M3, Fp8
from dlrm_bench.kernels.input_dist import history_events

OVER_TOKENS = (
    gated_norm,
    history_events,
    last_query_attention,
    norm,
    silu_attention,
    sorted_sums,
    token_input,
    zero_tail,
)
SAMPLES, WIDTH, LONGEST, EVENTS = 6, 16, 300, 64
OFFSETS = torch.arange(SAMPLES + 1) * 10
TALLY = torch.zeros(2, dtype=torch.int64)
DROPOUT = Dropout(0.2, torch.zeros(1, dtype=torch.int64), 1)


def int32(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def layers(tokens: int) -> None:
    """Launches what a layer does over these tokens, forward and backward."""
    x, weight, end = torch.zeros(tokens, WIDTH), torch.zeros(WIDTH), OFFSETS[-1:]
    dnorm = torch.zeros(2, WIDTH)
    norm.triton_norm_forward(x, weight, weight, end, x, 1e-6)
    norm.triton_norm_backward(x, x, weight, weight, end, x, x, x, dnorm, 1e-6)
    joined = torch.zeros(tokens, 3 * WIDTH)
    x8, joined8 = (Fp8(torch.empty_like(of, dtype=E4M3), 8.0, TALLY) for of in (x, joined))
    norm.triton_norm_forward(x, weight, weight, end, x8, 1e-6)
    gated_norm.triton_gated_norm_forward(x, x, weight, weight, end, DROPOUT, joined8, 1e-6)
    gated_norm.triton_gated_norm_forward(x, x, weight, weight, end, DROPOUT, joined, 1e-6)
    gated_norm.triton_gated_norm_backward(joined, x, x, weight, weight, end, DROPOUT, x, x, dnorm, 1e-6)
    q = k = v = out = x.unflatten(1, (1, WIDTH))
    sequences = silu_attention.Sequences(OFFSETS, torch.ones_like(OFFSETS[1:]), LONGEST)
    silu_attention.triton_silu_attention_forward(q, k, v, sequences, out)
    silu_attention.triton_silu_attention_backward(out, q, k, v, sequences, q, k, v)
    jagged, last = last_query_attention.Jagged(OFFSETS, LONGEST), torch.zeros(SAMPLES, 1, WIDTH)
    last_query_attention.triton_last_query_attention_forward(last, k, v, jagged, last)
    last_query_attention.triton_last_query_attention_backward(last, last, k, v, jagged, last, k, v)
    zero_tail.triton_zero_tail([x], end)


def first_input(tokens: int) -> None:
    """Launches what makes these tokens, forward and backward."""
    count = tokens - 9 * SAMPLES
    event, query = int32(count), int32(SAMPLES)
    places = token_input.TokenPlaces(OFFSETS, event, event, query, 8, LONGEST)
    events, context = torch.zeros(EVENTS + SAMPLES, WIDTH), torch.zeros(SAMPLES, 8, WIDTH)
    position, time = torch.zeros(LONGEST, WIDTH), torch.zeros(20, WIDTH)
    x, rows = torch.zeros(tokens, WIDTH), token_input.no_rows(tokens, events, time)
    token_input.triton_token_input_forward(events, context, position, time, places, 4.0, DROPOUT, x, rows)
    token_input.triton_token_input_backward(x, places, DROPOUT, x, position)
    sorted_sums.triton_sorted_sums(x, sorted_sums.sort_keys(rows.event, len(events)), 4.0, events)
    history_events.triton_history_events(int32(3, SAMPLES), query, OFFSETS, int32(3, EVENTS + 1), event)
