"""An HSTU ranking model: tables in TorchRec's EmbeddingCollection, tokens, layers, and one logit per candidate.

An event's token is the sum of its embeddings and those of its kind, its position and its user; a candidate's token has
no kind. Values that depend on lengths are computed on the device: no step reads one on the host.
"""

from typing import Any

import torch
import torch.fx
from torch import Tensor, nn
from torchrec import EmbeddingCollection, EmbeddingConfig, JaggedTensor

from dlrm_bench.dlrm.dense.pick_few import pick_few
from dlrm_bench.dlrm.zoo.hstu.batch import CANDIDATE, HISTORY, USER, HstuBatch
from dlrm_bench.dlrm.zoo.hstu.config import HstuConfig, Table
from dlrm_bench.dlrm.zoo.hstu.layer import HstuLayer


class HstuRanker(nn.Module):
    """Scores the candidates of each sample against its history."""

    def __init__(
        self,
        config: HstuConfig,
        tables_device: torch.device | None = None,
        device: torch.device | None = None,
        bf16: bool = False,
    ) -> None:
        """tables_device: "meta" for tables that are filled after TorchRec has sharded them. bf16: of the layers."""
        super().__init__()
        self._config = config
        self.tables = EmbeddingCollection(
            tables=[
                EmbeddingConfig(
                    name=table.name,
                    num_embeddings=table.rows,
                    embedding_dim=config.width,
                    feature_names=[f"{kind} {table.name}" for kind in kinds],
                )
                for tables, kinds in ((config.of_event(), (HISTORY, CANDIDATE)), (config.of_user(), (USER,)))
                for table in tables
            ],
            device=tables_device,
        )
        self.actions = nn.Embedding(config.actions, config.width, device=device)
        self.places = nn.Embedding(config.max_length, config.width, device=device)
        self.layers = nn.ModuleList(HstuLayer(config, device, bf16) for _ in range(config.layers))
        self.head = nn.Sequential(
            nn.LayerNorm(config.width, device=device),
            nn.Linear(config.width, config.head_hidden, device=device),
            nn.SiLU(),
            nn.Linear(config.head_hidden, 1, device=device),
        )

    def forward(self, batch: HstuBatch) -> Tensor:
        """Returns logits, [B * candidates]."""
        per = self._config.candidates
        embedded = self.tables(batch.features)
        events, of_user = self._config.of_event(), self._config.of_user()
        history, candidates = (_sum(embedded, kind, events) for kind in (HISTORY, CANDIDATE))
        lengths = of_samples(embedded[f"{HISTORY} {events[0].name}"].lengths(), batch.labels, per)
        offsets, targets = sequence_offsets(lengths, per), torch.full_like(lengths, per)
        tokens = join(history + of_actions(self.actions.weight, batch.actions), candidates, lengths, per)
        sample, place = sample_and_place(tokens, offsets, self._config.max_length)
        tokens = tokens + self.places.weight[place]  # an index's gradient is bitwise reproducible
        if of_user:
            tokens = tokens + of_users(_sum(embedded, USER, of_user), offsets, sample, place, self._config.max_length)
        for layer in self.layers:
            tokens = layer(tokens, offsets, targets)
        return self.head(tokens[candidate_tokens(offsets, per)]).squeeze(1)


def _sum(embedded: dict[str, JaggedTensor], kind: str, tables: list[Table]) -> Tensor:
    """Returns the sum over the tables of one kind of feature, [tokens of that kind, width]."""
    total: Tensor = embedded[f"{kind} {tables[0].name}"].values()
    for table in tables[1:]:
        total = total + embedded[f"{kind} {table.name}"].values()
    return total


# TorchRec's pipelines trace a model to find the inputs of its tables. Code that depends on the sizes of tensors is in
# functions that the trace does not look into.


@torch.fx.wrap
def sequence_offsets(lengths: Tensor, candidates: int) -> Tensor:
    """Returns the first token of each sample, int64 [B + 1], from the lengths of the histories, [B]."""
    return torch.cat([lengths.new_zeros(1, dtype=torch.int64), (lengths + candidates).cumsum(0)])


@torch.fx.wrap
def candidate_tokens(offsets: Tensor, candidates: int) -> Tensor:
    """Returns the candidates' tokens, int64 [B * candidates]: the last ones of each sample."""
    return (offsets[1:, None] - torch.arange(candidates, 0, -1, device=offsets.device)).flatten()


@torch.fx.wrap
def of_samples(lengths: Tensor, labels: Tensor, candidates: int) -> Tensor:
    """Returns the lengths of the samples' sequences, without those of padding."""
    return lengths[: len(labels) // candidates]


@torch.fx.wrap
def sample_and_place(tokens: Tensor, offsets: Tensor, max_length: int) -> tuple[Tensor, Tensor]:
    """Returns the sample of each token and the token's position in it, int64 [T]; for padding, whose results are not
    read, cyclic positions: an index's gradient adds up the tokens of one position sequentially."""
    token = torch.arange(len(tokens), device=offsets.device)
    sample = torch.searchsorted(offsets[1:], token, right=True).clamp(max=len(offsets) - 2)
    return sample, (token - offsets[sample]) % max_length


@torch.fx.wrap
def of_actions(weight: Tensor, actions: Tensor) -> Tensor:
    """Returns the vector of each event's kind, [E, width], from weight [kinds, width]; see pick_few."""
    return pick_few(weight, actions)


class OfUsers(torch.autograd.Function):
    """users[sample], [T, width], with a gradient summed over padded sequences: an index's gradient would add a user's
    thousands of tokens sequentially (1.5 ms for 4 users of 2660 tokens on an H200)."""

    @staticmethod
    def forward(ctx: Any, users: Tensor, offsets: Tensor, sample: Tensor, place: Tensor, longest: int) -> Tensor:
        ctx.save_for_backward(offsets, sample, place)
        ctx.longest = longest
        return users[sample]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        offsets, sample, place = ctx.saved_tensors
        samples, width = len(offsets) - 1, grads[0].shape[1]
        padded = grads[0].new_zeros(samples * ctx.longest + 1, width)
        inside = torch.arange(len(sample), device=sample.device) < offsets[-1]
        padded[torch.where(inside, sample * ctx.longest + place, samples * ctx.longest)] = grads[0]
        return padded[:-1].view(samples, ctx.longest, width).sum(dim=1), None, None, None, None


@torch.fx.wrap
def of_users(users: Tensor, offsets: Tensor, sample: Tensor, place: Tensor, longest: int) -> Tensor:
    """Calls OfUsers: returns each token's user, [T, width], from users [B, width]."""
    return OfUsers.apply(users, offsets, sample, place, longest)


@torch.fx.wrap
def join(history: Tensor, candidates: Tensor, lengths: Tensor, per: int) -> Tensor:
    """Returns each sample's history followed by its `per` candidates, then the events of padding: [T, width]."""
    event = torch.arange(len(history), device=lengths.device)
    ends = lengths.cumsum(0)
    sample = torch.searchsorted(ends, event, right=True)
    tokens = history.new_zeros(len(history) + len(candidates), history.shape[1])
    tokens = tokens.index_copy(0, event + per * sample, history)  # after the previous samples' candidates
    return tokens.index_copy(0, candidate_tokens(sequence_offsets(lengths, per), per), candidates.to(tokens.dtype))


class HstuTrain(nn.Module):
    """The model in the form of TorchRec's train pipelines: returns the loss, and (loss, logits, labels), detached."""

    def __init__(self, model: HstuRanker) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: HstuBatch) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        logits = self.model(batch)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
        return loss, (loss.detach(), logits.detach(), batch.labels)
