"""An HSTU ranking model: tables by TorchRec's EmbeddingCollection, tokens, layers, a logit a candidate.

An event's token is the sum of its embeddings, of its kind's and of its place's, and of its user's; a candidate's has no
kind. Whatever depends on lengths is computed on the device: no step reads one on the host.
"""

import torch
from torch import Tensor, nn
from torchrec import EmbeddingCollection, EmbeddingConfig, JaggedTensor

from dlrm_bench.hstu.batch import CANDIDATE, HISTORY, USER, HstuBatch
from dlrm_bench.hstu.config import HstuConfig
from dlrm_bench.hstu.layer import HstuLayer


class HstuRanker(nn.Module):
    """Scores the candidates of each sample against its history."""

    def __init__(
        self, config: HstuConfig, tables_device: torch.device | None = None, device: torch.device | None = None
    ) -> None:
        """tables_device: "meta" for tables that TorchRec shards, and fills, afterwards."""
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
        self.layers = nn.ModuleList(HstuLayer(config, device) for _ in range(config.layers))
        self.head = nn.Sequential(
            nn.LayerNorm(config.width, device=device),
            nn.Linear(config.width, config.head_hidden, device=device),
            nn.SiLU(),
            nn.Linear(config.head_hidden, 1, device=device),
        )

    def forward(self, batch: HstuBatch) -> Tensor:
        """Returns logits, [B * candidates]."""
        embedded = self.tables(batch.features)
        history, candidates = self._sum(embedded, HISTORY), self._sum(embedded, CANDIDATE)
        lengths = embedded[f"{HISTORY} {self._config.of_event()[0].name}"].lengths()
        tokens, offsets = self._sequences(history + self.actions(batch.actions), candidates, lengths)
        tokens = tokens + self._of_places(offsets, len(tokens), self._sum(embedded, USER))
        targets = torch.full_like(lengths, self._config.candidates)
        for layer in self.layers:
            tokens = layer(tokens, offsets, targets)
        last = offsets[1:, None] - torch.arange(self._config.candidates, 0, -1, device=tokens.device)
        return self.head(tokens[last.flatten()]).squeeze(1)

    def _sum(self, embedded: dict[str, JaggedTensor], kind: str) -> Tensor:
        """Returns the sum over the tables of one kind of feature: [tokens of that kind, width], or 0 without tables."""
        of_kind = [value.values() for key, value in embedded.items() if key.startswith(f"{kind} ")]
        return torch.stack(of_kind).sum(0) if of_kind else torch.zeros((), device=self.places.weight.device)

    def _sequences(self, history: Tensor, candidates: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Returns each sample's history followed by its candidates, [T, width], and where samples start, [B + 1]."""
        per = self._config.candidates
        samples = torch.arange(len(lengths) + 1, device=lengths.device)
        of_history = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        offsets = of_history + per * samples
        # An event moves back by the candidates before it; how many events there are, the host knows from their shape.
        sample = torch.repeat_interleave(samples[:-1], lengths, output_size=len(history))
        place = torch.arange(len(history), device=lengths.device) + per * sample
        of_candidates = (offsets[1:, None] - torch.arange(per, 0, -1, device=lengths.device)).flatten()
        tokens = history.new_zeros(len(history) + len(candidates), history.shape[1])
        tokens = tokens.index_copy(0, place, history)
        return tokens.index_copy(0, of_candidates, candidates.to(tokens.dtype)), offsets

    def _of_places(self, offsets: Tensor, tokens: int, of_user: Tensor) -> Tensor:
        """Returns what each token gets from its place in the sequence and from its user: [T, width]."""
        samples = torch.arange(len(offsets) - 1, device=offsets.device)
        sample = torch.repeat_interleave(samples, offsets.diff(), output_size=tokens)
        place = torch.arange(tokens, device=offsets.device) - offsets[sample]
        embedded = self.places(place)
        return embedded + of_user[sample] if of_user.dim() else embedded


class HstuTrain(nn.Module):
    """Returns what TorchRec's train pipelines take: the loss, and (loss, logits, labels), detached."""

    def __init__(self, model: HstuRanker) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: HstuBatch) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        logits = self.model(batch)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
        return loss, (loss.detach(), logits.detach(), batch.labels)
