"""An HSTU ranking model: tables in TorchRec's EmbeddingCollection, tokens, layers, and one logit per candidate.

Values that depend on lengths are computed on the device: no step reads one on the host.
"""

import torch
from torch import Tensor, nn
from torchrec import EmbeddingCollection, EmbeddingConfig, JaggedTensor

from dlrm_bench.dlrm.zoo.hstu.batch import CANDIDATE, HISTORY, USER, HstuBatch
from dlrm_bench.dlrm.zoo.hstu.config import HstuConfig, Table
from dlrm_bench.dlrm.zoo.hstu.layer import HstuLayer, HstuLayers
from dlrm_bench.dlrm.zoo.hstu.tokens import HstuHead, HstuLayout, HstuTokens


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
        self.layers = HstuLayers(HstuLayer(config, device, bf16) for _ in range(config.layers))
        self.head = HstuHead(config, device)
        self.layout, self.tokens = HstuLayout(config), HstuTokens()

    def forward(self, batch: HstuBatch) -> Tensor:
        """Returns logits, [B * candidates]."""
        layout = self.layout(batch.lengths, batch.actions)  # may run beside the lookup, whose result comes later
        embedded = self.tables(batch.features)
        events = self._config.of_event()
        history, candidates = (_values(embedded, kind, events) for kind in (HISTORY, CANDIDATE))
        users = _values(embedded, USER, self._config.of_user())
        tokens = self.tokens(history, candidates, users, batch.actions, layout, self.actions.weight, self.places.weight)
        return self.head(self.layers(tokens, layout))


def _values(embedded: dict[str, JaggedTensor], kind: str, tables: list[Table]) -> list[Tensor]:
    """Returns the vectors of one kind of feature of each table, [tokens of that kind, width]."""
    return [embedded[f"{kind} {table.name}"].values() for table in tables]


class HstuLoss(nn.Module):
    """Mean binary cross-entropy. A module of its own, because Module.compile leaves those of torch.nn uncompiled."""

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Returns the loss, fp32 [], from logits and labels of equal shapes."""
        return nn.functional.binary_cross_entropy_with_logits(logits, labels)


class HstuTrain(nn.Module):
    """The model in the form of TorchRec's train pipelines: returns the loss, and (loss, logits, labels), detached."""

    def __init__(self, model: HstuRanker) -> None:
        super().__init__()
        self.model, self.loss = model, HstuLoss()

    def compiled(self) -> tuple[nn.Module, ...]:
        """Returns the parts for torch.compile."""
        return self.model.layout, self.model.tokens, self.model.layers, self.model.head, self.loss

    def forward(self, batch: HstuBatch) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        logits = self.model(batch)
        loss = self.loss(logits, batch.labels)
        return loss, (loss.detach(), logits.detach(), batch.labels)
