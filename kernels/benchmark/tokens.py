"""Benchmark cases for kernels over all tokens of DLRMv4's early batches, width 512, bf16, and for their final sums."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from dlrm_bench.kernels.benchmark.attention import LONGEST, jagged_lengths
from dlrm_bench.kernels.benchmark.timing import Case
from dlrm_bench.kernels.dense import cross
from dlrm_bench.kernels.dense._dropout import Dropout
from dlrm_bench.kernels.dense.column_sums import column_sums
from dlrm_bench.kernels.dense.flat_adam import AdamOptions, AdamState, flat_adam, step_numbers
from dlrm_bench.kernels.dense.fp8 import E4M3, Fp8
from dlrm_bench.kernels.dense.gated_norm import gated_norm_backward, gated_norm_forward
from dlrm_bench.kernels.dense.norm import norm_backward, norm_forward
from dlrm_bench.kernels.dense.sorted_sums import SortedKeys, sort_keys, sorted_sums
from dlrm_bench.kernels.dense.swish_norm import swish_norm_backward, swish_norm_forward
from dlrm_bench.kernels.dense.token_input import TokenPlaces, no_rows, token_input_backward, token_input_forward
from dlrm_bench.kernels.dense.zero_tail import zero_tail
from dlrm_bench.kernels.non_finite import Watch

WIDTH, CONTEXT = 512, 8  # MLPerf DLRMv4's
POSITIONS, TIMES, _HIDDEN = 8192, 2049, 256
_SAMPLES = (1024, 128)
_EPS = 1e-6


def _tokens(count: int, columns: int = WIDTH) -> Tensor:
    return torch.randn(count, columns, device="cuda").bfloat16()


def _in_eight_bits(count: int, columns: int, tallied: bool = True) -> Fp8:
    tally = torch.zeros(2, dtype=torch.int64, device="cuda") if tallied else None
    return Fp8(torch.empty(count, columns, dtype=E4M3, device="cuda"), 8.0, tally)


def _dropout(rate: float) -> Dropout:
    return Dropout(rate, torch.tensor([1], device="cuda"), 1)


def _counts() -> Iterator[tuple[int, Tensor, str]]:
    for samples in _SAMPLES:
        count = sum(jagged_lengths(samples))
        yield count, torch.tensor([count], device="cuda"), f"{count} tokens of {samples} samples"


def norm_cases() -> Iterator[Case]:
    """Yields the forward also to e4m3, without and with a tally; the backward as a layer runs it, with a residual's
    gradient, and the norm recomputed."""
    for count, end, shape in _counts():
        x, grad, residual = (_tokens(count) for _ in range(3))
        weight, bias = torch.randn(2, WIDTH, device="cuda")
        given = x, weight, bias, end
        yield Case("norm_forward", shape, 2 * x.nbytes, partial(norm_forward, *given, grad, _EPS, True))
        for tallied in (False, True):
            name, out8 = f"{shape}, e4m3{' tallied' * tallied}", _in_eight_bits(count, WIDTH, tallied)
            yield Case("norm_forward", name, 1.5 * x.nbytes, partial(norm_forward, *given, out8, _EPS, True))
        out, dnorm = torch.empty_like(x), torch.empty(2, WIDTH, device="cuda")
        backward = partial(norm_backward, grad, *given, residual, out, grad, dnorm, _EPS, True)
        yield Case("norm_backward", shape, 5 * x.nbytes, backward)


def swish_norm_cases() -> Iterator[Case]:
    """Yields hidden rows of distinct events: 50 per sample, and 200 if samples are spread over eight ranks."""
    for count in (51_200, 204_800):
        x, grad, out = (_tokens(count, _HIDDEN) for _ in range(3))
        (weight, bias), dnorm = torch.randn(2, 2, _HIDDEN, device="cuda")
        shape = f"[{count}, {_HIDDEN}]"
        yield Case("swish_norm_forward", shape, 2 * x.nbytes, partial(swish_norm_forward, x, weight, bias, out, _EPS))
        backward = partial(swish_norm_backward, grad, x, weight, bias, out, dnorm, _EPS)
        yield Case("swish_norm_backward", shape, 3 * x.nbytes, backward)


def gated_norm_cases() -> Iterator[Case]:
    """Yields cases in which u and its gradient are slices of a projection, with and without dropout."""
    for count, end, shape in _counts():
        projected, of_projected, attended, of_attended = (
            _tokens(count, columns) for columns in (4 * WIDTH, 4 * WIDTH, WIDTH, WIDTH)
        )
        joined = _tokens(count, 3 * WIDTH)
        (weight, bias), dnorm = torch.randn(2, 2, WIDTH, device="cuda")
        given = projected[:, :WIDTH], attended, weight, bias, end
        of_given = of_projected[:, :WIDTH], of_attended, dnorm
        for dropout in (None, _dropout(0.1)):
            name = shape + (", dropout" if dropout else "")
            forward = partial(gated_norm_forward, *given, dropout, joined, _EPS)
            yield Case("gated_norm_forward", name, 5 * attended.nbytes, forward)
            forward = partial(gated_norm_forward, *given, dropout, _in_eight_bits(count, 3 * WIDTH), _EPS)
            yield Case("gated_norm_forward", f"{name}, e4m3 tallied", 3.5 * attended.nbytes, forward)
            backward = partial(gated_norm_backward, joined, *given, dropout, *of_given, _EPS)
            yield Case("gated_norm_backward", name, 10 * attended.nbytes, backward)


def _places(samples: int, events: int) -> TokenPlaces:
    """Returns histories of neighbouring anchors: each sample's events are a range of the distinct events, by time."""
    lengths = torch.tensor(jagged_lengths(samples), device="cuda")
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    history = lengths - CONTEXT - 1
    sample = torch.arange(samples, device="cuda").repeat_interleave(history)
    number = torch.arange(len(sample), device="cuda") - (history.cumsum(0) - history)[sample]
    event = (sample * (events // samples) + number) % events
    query = torch.full((samples,), 6_000_000, dtype=torch.int32, device="cuda")
    ago = (history[sample] - number) ** 2 // 2 // 5 * 5
    return TokenPlaces(offsets, event.int(), (6_000_000 - ago).int(), query, CONTEXT, LONGEST)


def _named() -> Iterator[tuple[int, TokenPlaces, int, str]]:
    """Yields number of samples, places, number of rows, and the rows' name. Events: 50 per sample, and 132 if each of
    eight ranks has every eighth sample of generated data, which has 29 items per sample and uses 40 of the 87 rows of
    item and action."""
    for samples, each in (*((of, 50) for of in _SAMPLES), (_SAMPLES[0], 132)):
        yield samples, _places(samples, each * samples), (each + 1) * samples, "events"
    samples = _SAMPLES[0]
    places, named = _places(samples, 132 * samples), 40 * samples
    row = places.event.long() * 7919 % named * 87 // 40  # scattered
    yield samples, places._replace(event=row.int()), 88 * samples, "rows of items"


def token_input_cases() -> Iterator[Case]:
    """Yields cases whose bytes are the tokens, each token's row numbers, and rows of events and weights once."""
    for samples, places, count, named in _named():
        events, context = _tokens(count), _tokens(CONTEXT * samples).view(samples, CONTEXT, WIDTH)
        position, time = torch.randn(POSITIONS, WIDTH, device="cuda"), torch.randn(TIMES, WIDTH, device="cuda")
        out = _tokens(len(places.event) + (CONTEXT + 1) * samples)
        shape = f"{len(out)} tokens of {samples} samples, {len(events)} {named}"
        read = events.nbytes + context.nbytes + 4 * WIDTH * LONGEST + 8 * len(places.event)
        rows, dropout = no_rows(len(out), events, time), _dropout(0.2)
        given = events, context, position, time, places, WIDTH**0.5, dropout, out, rows
        forward = partial(token_input_forward, *given)
        yield Case("token_input_forward", shape, out.nbytes + read + 8 * len(out), forward)
        backward = partial(token_input_backward, out, places, dropout, torch.empty_like(out), position)
        yield Case("token_input_backward", shape, 2 * out.nbytes + position.nbytes, backward)


def _keys() -> Iterator[tuple[Tensor, int, str]]:
    """Yields the key of each token, the number of keys, and their name."""
    for _, places, count, named in _named():
        yield places.event, count, named
    for samples in _SAMPLES:
        places = _places(samples, 50 * samples)
        yield ((places.query[0] - places.timestamp).float() / 60).sqrt().int(), TIMES, "times"


def sorted_sums_cases() -> Iterator[Case]:
    """Yields sums over events, item rows and time buckets, with keys sorted beforehand by one sort."""
    for numbers, count, name in _keys():
        rows, out = _tokens(len(numbers)), torch.empty(count, WIDTH, device="cuda")
        shape, size = f"{len(rows)} tokens to {count} {name}", rows.nbytes + 12 * len(rows) + out.nbytes
        yield Case("sorted_sums", shape, size, partial(sorted_sums, rows, sort_keys(numbers, count), 1.0, out))

        def with_sort(rows: Tensor = rows, numbers: Tensor = numbers, out: Tensor = out) -> SortedKeys:
            keys = sort_keys(numbers, len(out))
            sorted_sums(rows, keys, 1.0, out)
            return keys

        yield Case("sorted_sums", f"{shape}, with the sort", size, with_sort)


def zero_tail_cases() -> Iterator[Case]:
    """Yields a buffer with five percent of its tokens unused, and a full one."""
    out = _tokens(2_131_968)
    for share in (0.95, 1.0):
        end = torch.tensor([int(len(out) * share)], device="cuda")
        empty = (len(out) - int(end)) * 2 * WIDTH
        yield Case("zero_tail", f"{len(out)} tokens, {share:.0%} full", empty, partial(zero_tail, [out], end))


def column_sums_cases() -> Iterator[Case]:
    for batch in (6912, 512):
        partials = torch.rand(cross.partial_rows(batch), 3456, device="cuda")
        out = torch.empty(3456, dtype=torch.bfloat16, device="cuda")
        yield Case("column_sums", f"{list(partials.shape)}, fp32", partials.nbytes, partial(column_sums, partials, out))


def flat_adam_cases() -> Iterator[Case]:
    """Yields the update of DLRMv4's dense weights, whose norm reads the gradient a second time, and the numbers that it
    makes of the norm."""
    count = 15_200_000
    weights, mean, square, gradient = torch.rand(4, count, device="cuda").unbind()
    state = AdamState(torch.zeros(1, device="cuda"), mean, square)
    watch = Watch(torch.zeros(1, dtype=torch.int32, device="cuda"), torch.zeros(1, dtype=torch.int64, device="cuda"))
    rate, options = torch.full((1,), 1e-6, device="cuda"), AdamOptions((0.95, 0.999), 1e-8, 1.0)
    update = partial(flat_adam, weights, state, gradient, 2, rate, options, watch)
    yield Case("flat_adam", f"[{count}], fp32", 32 * count, update)
    update = partial(update, torch.empty(count, dtype=torch.bfloat16, device="cuda"))
    yield Case("flat_adam", f"[{count}], fp32 and bf16", 34 * count, update)
    numbers = partial(step_numbers, gradient[0], state.step, 2, rate, options, watch.stopped)
    yield Case("step_numbers", "two betas", 64, numbers)
