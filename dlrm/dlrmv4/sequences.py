"""The places of the tokens of a batch's jagged sequences, and their positions and times.

A sequence is CONTEXT_TOKENS tokens of context, its history, oldest event first, and the candidate. With T events in B
samples there are N = T + OWN_TOKENS * B tokens. Nothing here waits for the device: sizes come from shapes.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dlrm_bench.dlrm.dlrmv4.config import CONTEXT_TOKENS, OWN_TOKENS, ModelConfig

_SECONDS_PER_STEP = 60.0  # a time bucket is the root of minutes (ops/position.py of the reference)


@dataclass(kw_only=True, slots=True)
class Sequences:
    """Places of tokens; all int64.

    To fix shapes, there may be more tokens than the sequences have: tokens from offsets[B] on are padding. Padding is
    finite and not read, and its gradients are zero.
    """

    offsets: Tensor
    """Sequence b is tokens offsets[b] to offsets[b + 1] - 1, [B + 1]."""
    sample: Tensor
    """Sample of each token, [N]."""
    place: Tensor
    """Place of each token in its sequence, [N]."""
    source: Tensor
    """Row of each token in the joined contexts [B, CONTEXT_TOKENS], events [T] and candidates [B], [N]."""
    target: Tensor
    """Token of each of those rows, [N]: the inverse of source."""

    @property
    def candidates(self) -> Tensor:
        """The token of each sample's candidate, [B]."""
        return self.offsets[1:] - 1


def offsets_of(lengths: Tensor) -> Tensor:
    """Returns the beginnings of the sequences of histories of `lengths`, int32 [B], and the end of the last one, int64
    [B + 1]."""
    offsets = lengths.new_zeros(len(lengths) + 1, dtype=torch.int64)
    torch.cumsum(lengths + OWN_TOKENS, 0, out=offsets[1:])
    return offsets


def sequences_of(offsets: Tensor, events: int) -> Sequences:
    """Returns the places of tokens of `offsets_of`. events: T, or more where they are padded to a capacity: rows past
    the last history are then tokens past the last sequence, whose sample and place mean nothing."""
    size, device = len(offsets) - 1, offsets.device
    number = torch.arange(events, device=device)
    of_event = torch.searchsorted(
        offsets[1:] - OWN_TOKENS * torch.arange(1, size + 1, device=device), number, right=True
    )
    context = offsets[:-1, None] + torch.arange(CONTEXT_TOKENS, device=device)
    event = number + OWN_TOKENS * of_event + CONTEXT_TOKENS * (of_event < size)
    target = torch.cat([context.flatten(), event, offsets[1:] - 1])
    token = torch.arange(len(target), device=device)
    source = torch.empty_like(target).index_copy_(0, target, token)
    sample = torch.searchsorted(offsets[1:].contiguous(), token, right=True).clamp(max=max(0, size - 1))
    return Sequences(offsets=offsets, sample=sample, place=token - offsets[sample], source=source, target=target)


class _Reorder(torch.autograd.Function):
    """Returns rows[order] for a permutation; the gradient is a gather by the inverse, instead of an index's sum."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows[order]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return grads[0][inverse], None, None


def join(context: Tensor, events: Tensor, sequences: Sequences) -> Tensor:
    """Returns tokens [N, D] of context tokens [B, CONTEXT_TOKENS, D] and of events and then candidates [T + B, D]."""
    rows = torch.cat([context.flatten(0, 1), events])
    return _Reorder.apply(rows, sequences.source, sequences.target)


class _Pick(torch.autograd.Function):
    """rows[index], where an index comes thousands of times: its gradient is summed in fp32 whatever the rows are."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.rows = len(rows)
        return rows[index]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        total = torch.zeros(ctx.rows, grads[0].shape[1], device=index.device)
        return total.index_add_(0, index, grads[0].float()).to(grads[0].dtype), None


def pick(rows: Tensor, event: Tensor, candidates: int) -> Tensor:
    """Returns the rows of all events and then the candidates, [T + B, D], from those of distinct events and then the
    candidates, [E + B, D].

    event: distinct event of each event, int32 [T]; candidates: B. On GPUs the gradient is summed by atomics, whose
    order differs from run to run.
    """
    own = torch.arange(len(rows) - candidates, len(rows), device=event.device)
    return _Pick.apply(rows, torch.cat([event.long(), own]))


def position_buckets(sequences: Sequences, config: ModelConfig) -> Tensor:
    """Returns the row of the position embedding of each token, int64 [N].

    Tokens of context have the first rows, by place. All others count from the end: the candidate's row comes next, that
    of the newest event after it, and so on (_get_col_indices in the reference's ops/pytorch/pt_position.py).
    """
    from_end = sequences.candidates[sequences.sample] - torch.arange(
        len(sequences.sample), device=sequences.sample.device
    )
    counted = (from_end + CONTEXT_TOKENS).clamp(0, config.position_buckets - 1)
    return torch.where(sequences.place < CONTEXT_TOKENS, sequences.place, counted)


def token_times(timestamp: Tensor, query: Tensor, sequences: Sequences) -> Tensor:
    """Returns the time of each token in seconds, int32 [N]: 0 for context, the query's for the candidate.

    timestamp: int32 [T]; query: int32 [B].
    """
    of_context = query.new_zeros(CONTEXT_TOKENS * len(query))
    return torch.cat([of_context, timestamp, query])[sequences.source]


def time_buckets(times: Tensor, query: Tensor, sequences: Sequences, config: ModelConfig) -> Tensor:
    """Returns the row of the time embedding of each token, int64 [N]: the root of the minutes from the token to the
    query, rounded down.

    Computed in fp32 as in the reference's Triton kernel (ops/triton/triton_position.py). The reference's PyTorch
    operator clamps to the embedding's number of columns instead of rows, which is correct only up to 512^2 minutes;
    this function clamps to rows. Context has time 0, so its tokens get the bucket of the query's own time.
    """
    seconds = (query[sequences.sample] - times).float().clamp(min=1e-6)
    # Divided by a tensor: by a number, torch would multiply on GPUs, and whole squares of minutes would fall a bucket
    # short.
    minutes = seconds / torch.full((), _SECONDS_PER_STEP, device=seconds.device)
    return minutes.sqrt().long().clamp(max=config.time_buckets)
