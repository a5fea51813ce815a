"""Tokens of HSTU from the vectors of its events, candidates and users; logits from the candidates' tokens.

Every result, gradients included, is a gather or a sum over padded sequences. torch.compile turns these into few
kernels, and none with atomic additions, which would give other bits in every run: the gradient of a plain index would.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dlrm_bench.dlrm.dense.pick_few import pick_few
from dlrm_bench.dlrm.zoo.hstu.config import HstuConfig


class Layout(NamedTuple):
    """The order of T tokens of B samples: each sample's events followed by its candidates, then the events of padding.

    E events and C candidates in all. int64, on the device.
    """

    offsets: Tensor
    """[B + 1], the first token of each sample; the last one is the first token of padding."""
    targets: Tensor
    """[B], the number of candidates of each sample."""
    sample: Tensor
    """[T], the token's sample; for padding, whose results are not read, the last one."""
    place: Tensor
    """[T], the token's position in its sample; for padding, cyclic positions."""
    event: Tensor
    """[T], the token's event; any one for a candidate."""
    candidate: Tensor
    """[T], the token's candidate; -1, the last one as an index, for an event."""
    event_tokens: Tensor
    """[E], the event's token."""
    candidate_tokens: Tensor
    """[C], the candidate's token."""


class HstuLayout(nn.Module):
    """Computes the layout of a batch's tokens. A module of its own, so that torch.compile stores the layout instead of
    computing it again for each column of the tokens."""

    def __init__(self, config: HstuConfig) -> None:
        super().__init__()
        self._candidates, self._max_length = config.candidates, config.max_length

    def forward(self, lengths: Tensor, actions: Tensor) -> Layout:
        """lengths: of the samples' histories, [B]. actions: [E], for the number of events, padding included."""
        per, samples, events = self._candidates, len(lengths), len(actions)
        history_ends = lengths.cumsum(0)
        ends = history_ends + torch.arange(per, per * samples + 1, per, device=lengths.device)
        offsets = nn.functional.pad(ends, (1, 0))

        token = torch.arange(events + per * samples, device=lengths.device)
        before = torch.searchsorted(ends, token, right=True)  # samples that end before the token
        sample = before.clamp(max=samples - 1)
        event = token - per * before
        history_end = history_ends[sample]
        is_candidate = (event >= history_end) & (token < ends[-1])

        number = torch.arange(events, device=lengths.device)
        return Layout(
            offsets=offsets,
            targets=torch.full_like(ends, per),
            sample=sample,
            place=(token - offsets[sample]) % self._max_length,
            event=event.clamp(max=events - 1),
            candidate=torch.where(is_candidate, token - history_end, -1),
            event_tokens=number + per * torch.searchsorted(history_ends, number, right=True),
            candidate_tokens=(ends[:, None] - torch.arange(per, 0, -1, device=lengths.device)).flatten(),
        )


class _Join(torch.autograd.Function):
    """Tokens, [T, width]: events [E, width] and candidates [C, width] in the layout's order, plus the vectors of their
    places [max_length, width] and users [B, width]. Gradients of padding reach its events, but no place or user."""

    @staticmethod
    def forward(
        ctx: Any, events: Tensor, candidates: Tensor, places: Tensor, users: Tensor | None, *layout: Tensor
    ) -> Tensor:
        of = Layout(*layout)
        ctx.save_for_backward(of.offsets, of.event_tokens, of.candidate_tokens)
        ctx.max_length, ctx.has_users = len(places), users is not None
        is_candidate = (of.candidate >= 0)[:, None]
        tokens = torch.where(is_candidate, candidates[of.candidate], events[of.event]) + places[of.place]
        return tokens if users is None else tokens + users[of.sample]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (offsets, event_tokens, candidate_tokens) = grads, ctx.saved_tensors
        token = offsets[:-1, None] + torch.arange(ctx.max_length, device=grad.device)
        outside = (token >= offsets[1:, None])[:, :, None]
        padded = grad[token.clamp(max=len(grad) - 1)].masked_fill_(outside, 0)  # [B, max_length, width]
        of_users = padded.sum(1) if ctx.has_users else None
        return grad[event_tokens], grad[candidate_tokens], padded.sum(0), of_users, *[None] * len(Layout._fields)


class HstuTokens(nn.Module):
    """Sums an event's token from its embeddings and those of its kind, its place and its user; a candidate's token has
    no kind. Has no weights: in a state, they are the ranker's."""

    def forward(
        self,
        history: Sequence[Tensor],
        candidates: Sequence[Tensor],
        users: Sequence[Tensor],
        actions: Tensor,
        layout: Layout,
        of_action: Tensor,
        of_place: Tensor,
    ) -> Tensor:
        """Returns tokens, [T, width].

        history, candidates, users: vectors from each table, [E, width], [C, width] and [B, width]. actions: kinds of
        the events, int64 [E]. of_action, of_place: weights, [kinds, width] and [max_length, width].
        """
        dtype = of_place.dtype
        events = _sum(history, dtype) + pick_few(of_action, actions)
        of_users = _sum(users, dtype) if users else None
        return _Join.apply(events, _sum(candidates, dtype), of_place, of_users, *layout)


def _sum(of_tables: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    total = of_tables[0]
    for of_table in of_tables[1:]:
        total = total + of_table  # hands one gradient to all tables, without copies
    return total.to(dtype)


class _Candidates(torch.autograd.Function):
    """Rows of x [T, W]; candidate and candidate_tokens as in Layout."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, candidate: Tensor, candidate_tokens: Tensor) -> Tensor:
        ctx.save_for_backward(candidate)
        return x[candidate_tokens]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (candidate,) = ctx.saved_tensors
        return torch.where((candidate >= 0)[:, None], grads[0][candidate], 0), None, None


def of_candidates(x: Tensor, layout: Layout) -> Tensor:
    """Returns the rows of the candidates' tokens, [C, W], of x [T, W]."""
    rows: Tensor = _Candidates.apply(x, layout.candidate, layout.candidate_tokens)
    return rows


class HstuHead(nn.ModuleList):
    """Maps each candidate's token to its logit. Not an nn.Sequential, because Module.compile leaves a forward that
    torch.nn defines uncompiled."""

    def __init__(self, config: HstuConfig, device: torch.device | None = None) -> None:
        super().__init__(
            [
                nn.LayerNorm(config.width, device=device),
                nn.Linear(config.width, config.head_hidden, device=device),
                nn.SiLU(),
                nn.Linear(config.head_hidden, 1, device=device),
            ]
        )

    def forward(self, x: Tensor) -> Tensor:
        """Returns logits, [C], from the candidates' tokens, [C, width]."""
        for module in self:
            x = module(x)
        return x.squeeze(1)
