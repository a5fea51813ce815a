"""The first layer's input in one pass: rows of events and context, scaled, plus position and time, with dropout.

Tokens of a sequence are eight of context, then its events, oldest first, and the candidate. A token's position selects
a row of the position weight: context by its number, other tokens counted from the end, so that (sample, row) names each
token once. A program with eight rows of the weight handles these tokens in many samples and sums gradients in
registers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dlrm_bench.kernels._call import function
from dlrm_bench.kernels._triton import cdiv, jit, next_power_of_2, tl
from dlrm_bench.kernels.dense._dropout import Dropout, dropout_words, dropped, plain_words, scale_of, threshold_of
from dlrm_bench.kernels.dense.zero_tail import zero_tail

_ROWS = 8  # positions per program: those that share a dropout mask's counters
_COLUMNS = 128
_GROUPS = 16  # maximum number of sample groups: each has sums for all positions
_LEAST_GROUP = 4  # minimum number of samples per program


class TokenPlaces(NamedTuple):
    """Positions of tokens, and the rows that they read.

    offsets: int64 [B + 1], sequence b is tokens offsets[b] to offsets[b + 1] - 1. event: int32 or int64 [T], row of
    each event. timestamp: int32 [T], query: int32 [B], both seconds. context: number of a sample's context tokens.
    max_length: an upper bound of the number of tokens in a sequence.
    """

    offsets: Tensor
    event: Tensor
    timestamp: Tensor
    query: Tensor
    context: int
    max_length: int


class TokenRows(NamedTuple):
    """Rows of each token from `token_input_forward`, int32 [N]."""

    event: Tensor
    """Row in the joined events; the number of such rows for context and for unused tokens."""
    time: Tensor
    """Row of the time weight; the number of such rows for unused tokens."""


def no_rows(tokens: int, events: Tensor, time: Tensor) -> TokenRows:
    """Returns rows for `tokens` unused tokens. events, time: the matrices that the rows refer to."""
    event, bucket = (torch.full((tokens,), len(of), dtype=torch.int32, device=events.device) for of in (events, time))
    return TokenRows(event, bucket)


class _Tokens(NamedTuple):
    """Sample, row of the position weight, and validity of each of N tokens, int64 [N]."""

    sample: Tensor
    row: Tensor
    inside: Tensor

    @classmethod
    def of(cls, count: int, places: TokenPlaces) -> _Tokens:
        token = torch.arange(count, device=places.offsets.device)
        sample = torch.searchsorted(places.offsets[1:].contiguous(), token, right=True)
        sample.clamp_(max=max(0, len(places.offsets) - 2))
        from_start = token - places.offsets[sample]
        from_end = places.offsets[sample + 1] - 1 - token
        row = torch.where(from_start < places.context, from_start, from_end + places.context)
        inside = token < places.offsets[-1]
        return cls(sample, torch.where(inside, row, 0), inside)


def token_input_factors(dropout: Dropout | None, count: int, width: int, places: TokenPlaces) -> Tensor:
    """Returns the dropout factor of each element of `count` tokens: fp32 [count, width], 0 or greater than 1; 1 without
    dropout."""
    if dropout is None or not count or len(places.offsets) == 1:
        return torch.ones(count, width, device=places.offsets.device)
    tokens = _Tokens.of(count, places)
    column, place = torch.arange(width, device=tokens.row.device), tokens.row[:, None]
    # A counter's eight halves belong to eight positions.
    words = torch.stack(plain_words(dropout, column, tokens.sample[:, None], place // _ROWS))
    word = words.gather(0, (place % _ROWS // 2).expand(1, count, width))[0]
    bits = word >> 16 * (place % 2) & 0xFFFF
    return (bits >= threshold_of(dropout)) * scale_of(dropout)


class TokenInputForward(NamedTuple):
    """Stores factor * row + position + time of each token, with `dropout`, in `out`; 0 for unused tokens.

    N may be more than offsets[-1]. Computed in fp32.
    """

    events: Tensor
    """[E + B, W], distinct events followed by the samples' candidates, contiguous, W a power of two."""
    context: Tensor
    """[B, C, W], contiguous, of the events' dtype."""
    position: Tensor
    """fp32 [P, W], P >= max_length."""
    time: Tensor
    """fp32 [M, W]; the row is the square root of the minutes from a token to the query, rounded down; context has time
    0 and the candidate the query's time."""
    places: TokenPlaces
    factor: float
    dropout: Dropout | None
    out: Tensor
    """[N, W], contiguous, of the events' dtype."""
    rows: TokenRows
    """Must be initialized by `no_rows`."""

    def launch(self) -> None:
        """Checks the arguments and computes `out` and `rows`."""
        self._check()
        (self.triton if self.out.is_cuda else self.plain)()

    def _check(self) -> None:
        events, context, position, time, places, *_, out, _ = self
        width, samples = out.shape[1], len(places.offsets) - 1
        assert events.dtype == context.dtype == out.dtype, "one dtype"
        assert position.dtype == time.dtype == torch.float32, "weights of position and time: fp32"
        assert context.shape == (samples, places.context, width), "context: [B, C, W]"
        assert len(events) >= samples and len(position) >= places.max_length, "rows for all candidates and positions"
        matrices = events, position, time, out
        assert all(of.shape[1] == width and of.is_contiguous() for of in matrices), "[*, W], contiguous"
        assert context.is_contiguous() and width == next_power_of_2(width), f"width: a power of two, not {width}"
        assert len(places.event) == len(places.timestamp), "event and timestamp: one of each per event"
        assert places.timestamp.dtype == places.query.dtype == torch.int32, "times: int32"

    def plain(self) -> None:
        """Computes `out` and `rows` in PyTorch."""
        places, (count, width) = self.places, self.out.shape
        if not len(self.context):
            self.out.zero_()
            return
        tokens = _Tokens.of(count, places)
        sample, is_candidate = tokens.sample, tokens.row == places.context
        is_event = tokens.inside & (tokens.row > places.context)
        row = torch.where(is_candidate, len(self.events) - len(self.context) + sample, 0)
        seconds = torch.where(is_candidate, places.query[sample], 0)
        if len(places.event):
            own = (places.context + 1) * sample + places.context
            event = torch.where(is_event, torch.arange(count, device=row.device) - own, 0)
            row = torch.where(is_event, places.event.long()[event], row)
            seconds = torch.where(is_event, places.timestamp[event], seconds)
        before = (places.query[sample] - seconds).float().clamp(min=1e-6)
        minutes = before / torch.full((), 60.0, device=row.device)
        bucket = minutes.sqrt().long().clamp(max=len(self.time) - 1)
        self.rows.event.copy_(torch.where(is_event | is_candidate & tokens.inside, row, len(self.events)))
        self.rows.time.copy_(torch.where(tokens.inside, bucket, len(self.time)))
        of_context = self.context[sample, tokens.row.clamp(max=places.context - 1)]
        of_row = torch.where((tokens.row < places.context)[:, None], of_context, self.events[row])
        total = of_row.float() * self.factor + self.position[tokens.row] + self.time[bucket]
        dropped = total * token_input_factors(self.dropout, count, width, places)
        self.out.copy_(torch.where(tokens.inside[:, None], dropped, 0))

    def triton(self) -> None:
        """Computes `out` and `rows` in two kernels: one for tokens, one for the padding."""
        events, context, position, time, places, factor, dropout, out, rows = self
        zero_tail([out], places.offsets[-1:])
        samples, width = len(context), out.shape[1]
        _token_input_forward_kernel[_grid(places, samples, width)](
            events, context, position, time, *places[:4], out, *rows, len(events) - samples, len(time), len(position),
            factor, samples, *_dropout(dropout, places), places.context, width, *_tile(samples, width), num_warps=1,
        )  # fmt: skip


class TokenInputBackward(NamedTuple):
    """Stores grad after `dropout` in `through`, and its sums over the tokens of each position in dposition. Equal
    inputs give equal bits."""

    grad: Tensor
    """[N, W], contiguous, the gradient of `TokenInputForward`'s `out`."""
    places: TokenPlaces
    dropout: Dropout | None
    through: Tensor
    """Like grad, and may be grad. Rows of unused tokens stay unchanged."""
    dposition: Tensor
    """fp32 [P, W]."""

    def launch(self) -> None:
        """Checks the arguments and computes the gradients."""
        grad, places, _, through, dposition = self
        assert grad.is_contiguous() and through.is_contiguous() and through.shape == grad.shape, "[N, W], contiguous"
        assert dposition.dtype == torch.float32 and len(dposition) >= places.max_length, "dposition: fp32 [P, W]"
        (self.triton if grad.is_cuda else self.plain)()

    def plain(self) -> None:
        """Computes the gradients in PyTorch."""
        grad, places, dropout, through, dposition = self
        dposition.zero_()
        if len(places.offsets) > 1:
            tokens = _Tokens.of(len(grad), places)
            inside = tokens.inside[:, None]
            factors = token_input_factors(dropout, len(grad), grad.shape[1], places)
            dropped = torch.where(inside, grad.float() * factors, 0)
            dposition.index_add_(0, tokens.row, dropped)
            through.copy_(torch.where(inside, dropped.to(grad.dtype), through))

    def triton(self) -> None:
        """Computes the gradients in one kernel, and the sums over sample groups in another."""
        grad, places, dropout, through, dposition = self
        samples, width = len(places.offsets) - 1, grad.shape[1]
        grid = _grid(places, samples, width)
        partials = torch.empty(grid[2], grid[0] * _ROWS, width, dtype=torch.float32, device=grad.device)
        _token_input_backward_kernel[grid](
            grad, through, places.offsets, partials, samples, *_dropout(dropout, places), places.context, width,
            *_tile(samples, width), num_warps=1,
        )  # fmt: skip
        rows = min(len(dposition), partials.shape[1])
        torch.sum(partials[:, :rows], 0, out=dposition[:rows])
        dposition[rows:].zero_()


def _grid(places: TokenPlaces, samples: int, width: int) -> tuple[int, int, int]:
    return cdiv(places.max_length, _ROWS), cdiv(width, _COLUMNS), max(1, cdiv(samples, _group(samples)))


def _group(samples: int) -> int:
    return max(_LEAST_GROUP, next_power_of_2(max(1, cdiv(samples, _GROUPS))))


def _tile(samples: int, width: int) -> tuple[int, int, int]:
    return min(width, _COLUMNS), _ROWS, _group(samples)


def _dropout(dropout: Dropout | None, places: TokenPlaces) -> tuple[object, ...]:
    seed, stream = (places.offsets, 0) if dropout is None else (dropout.seed, dropout.stream)
    return seed, stream, threshold_of(dropout), scale_of(dropout)


token_input_forward = function(TokenInputForward, TokenInputForward.launch)
plain_token_input_forward = function(TokenInputForward, TokenInputForward.plain)
triton_token_input_forward = function(TokenInputForward, TokenInputForward.triton)
token_input_backward = function(TokenInputBackward, TokenInputBackward.launch)
plain_token_input_backward = function(TokenInputBackward, TokenInputBackward.plain)
triton_token_input_backward = function(TokenInputBackward, TokenInputBackward.triton)


@jit
def _tokens_of(start, end, place, context: tl.constexpr):
    """Returns the tokens at these positions of a sequence, int64 [rows], and whether they exist, bool."""
    return tl.where(place < context, start + place, end - 1 - (place - context)), place < end - start


@jit
def _drop(values, seed, stream, sample, place, column, threshold: tl.constexpr, scale: tl.constexpr):
    """Returns values with dropout. place: int32 [8], starting at a multiple of eight."""
    if threshold > 0:
        one, two, three, four = dropout_words(seed, stream, column[None, :], sample, tl.min(place, 0) // 8)
        pair = (place % 8 // 2)[:, None]
        word = tl.where(pair == 0, one, tl.where(pair == 1, two, tl.where(pair == 2, three, four)))
        values = dropped(values, word, (place % 2)[:, None], threshold, scale)
    return values


@jit
def _token_input_forward_kernel(
    events, context, position, time, offsets, event, timestamp, query, out, event_row, time_row,
    candidates, buckets, positions, factor, samples, seeds, stream, threshold: tl.constexpr, kept: tl.constexpr,
    of_context: tl.constexpr, width: tl.constexpr, columns: tl.constexpr, rows: tl.constexpr, group: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * rows
    place = first + tl.arange(0, rows)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    at_place = place[:, None] * width + column[None, :]
    of_place = tl.load(position + at_place, (place < positions)[:, None], other=0.0)
    seed, sample = tl.load(seeds), tl.program_id(2) * group
    last = tl.minimum(sample + group, samples)
    while sample < last:
        start, end = tl.load(offsets + sample), tl.load(offsets + sample + 1)
        if first < end - start:
            token, there = _tokens_of(start, end, place, of_context)
            is_event, is_candidate = there & (place > of_context), there & (place == of_context)
            number = token - of_context - sample * (of_context + 1)
            asked = tl.load(query + sample)
            row = tl.load(event + number, is_event, other=0).to(tl.int32)
            row = tl.where(is_candidate, candidates + sample, row)
            seconds = tl.load(timestamp + number, is_event, other=0)
            before = tl.maximum((asked - tl.where(is_candidate, asked, seconds)).to(tl.float32), 1e-6)
            bucket = tl.minimum(tl.sqrt_rn(tl.div_rn(before, before * 0 + 60.0)).to(tl.int32), buckets - 1)

            has_row = is_event | is_candidate
            at = row.to(tl.int64)[:, None] * width + column[None, :]
            values = tl.load(events + at, has_row[:, None], other=0.0).to(tl.float32)
            if first < of_context:
                at = sample.to(tl.int64) * of_context * width + at_place
                values += tl.load(context + at, (there & (place < of_context))[:, None], other=0.0).to(tl.float32)
            of_time = tl.load(time + bucket[:, None] * width + column[None, :], there[:, None], other=0.0)
            values = values * factor + of_place + of_time
            values = _drop(values, seed, stream, sample, place, column, threshold, kept)
            tl.store(out + token[:, None] * width + column[None, :], values.to(out.dtype.element_ty), there[:, None])
            if tl.program_id(1) == 0:
                tl.store(event_row + token, row, has_row)
                tl.store(time_row + token, bucket, there)
        sample += 1


@jit
def _token_input_backward_kernel(
    grad, through, offsets, partials, samples, seeds, stream, threshold: tl.constexpr, kept: tl.constexpr,
    of_context: tl.constexpr, width: tl.constexpr, columns: tl.constexpr, rows: tl.constexpr, group: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * rows
    place = first + tl.arange(0, rows)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    total = tl.zeros([rows, columns], tl.float32)
    seed, sample = tl.load(seeds), tl.program_id(2) * group
    last = tl.minimum(sample + group, samples)
    while sample < last:
        start, end = tl.load(offsets + sample), tl.load(offsets + sample + 1)
        if first < end - start:
            token, there = _tokens_of(start, end, place, of_context)
            at = token[:, None] * width + column[None, :]
            values = tl.load(grad + at, there[:, None], other=0.0).to(tl.float32)
            values = _drop(values, seed, stream, sample, place, column, threshold, kept)
            tl.store(through + at, values.to(through.dtype.element_ty), there[:, None])
            total += values
        sample += 1
    at = (tl.program_id(2).to(tl.int64) * tl.num_programs(0) * rows + place)[:, None] * width + column[None, :]
    tl.store(partials + at, total)
