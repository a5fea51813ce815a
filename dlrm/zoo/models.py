"""The TorchRec models: forward(batch) returns (loss, (loss, logits, labels)), as TorchRec's train pipelines expect."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    JaggedTensor,
    KeyedJaggedTensor,
)
from torchrec.models.deepfm import SimpleDeepFMNN
from torchrec.models.dlrm import DLRM, DLRM_DCN, DLRM_Projection

from dlrm_bench.dlrm.data.field_batch import FieldBatch
from dlrm_bench.dlrm.zoo.config import (
    BagsModel,
    DeepFmModel,
    DlrmDcnModel,
    DlrmModel,
    DlrmProjectionModel,
    SequenceModel,
    TwoTowersModel,
)


@dataclass
class BagsBatch(FieldBatch):
    """B samples. dense: fp32 [B, dense_in_features]; bags: ids of all pooled features; labels: fp32 [B]."""

    dense: Tensor
    bags: KeyedJaggedTensor
    labels: Tensor


@dataclass
class SequenceBatch(BagsBatch):
    """Samples with one history each: the key "history"; in a padded batch, sequences of padding come after them."""

    history: KeyedJaggedTensor


Output = tuple[Tensor, tuple[Tensor, Tensor, Tensor]]


class Trained(nn.Module, ABC):
    """A model that returns logits, with its loss."""

    def forward(self, batch: BagsBatch) -> Output:
        """Returns the mean loss, and (loss, logits [B], labels [B]), detached."""
        logits = self.logits(batch)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
        return loss, (loss.detach(), logits.detach(), batch.labels)

    @abstractmethod
    def logits(self, batch: BagsBatch) -> Tensor:
        """Returns logits [B]."""

    @abstractmethod
    def compiled(self) -> tuple[nn.Module, ...]:
        """Returns the parts to compile with torch.compile."""


class OfTorchRec(Trained):
    """One of TorchRec's own models."""

    def __init__(self, model: nn.Module, ends_in_sigmoid: bool = False) -> None:
        super().__init__()
        self.model, self._ends_in_sigmoid = model, ends_in_sigmoid

    def logits(self, batch: BagsBatch) -> Tensor:
        """Returns logits [B]; inverts the sigmoid of a model that ends in one."""
        out = self.model(batch.dense, batch.bags).squeeze(-1)
        return out.logit(1e-6) if self._ends_in_sigmoid else out

    def compiled(self) -> tuple[nn.Module, ...]:
        """Returns bottom MLP, interaction and top MLP."""
        return tuple(self.model.get_submodule(name) for name in ("dense_arch", "inter_arch", "over_arch"))


class Tower(nn.Module):
    """An MLP over pooled vectors."""

    def __init__(self, config: BagsModel, names: tuple[str, ...], hidden: int) -> None:
        super().__init__()
        dim = config.embedding_dim
        self.tables = _bags(config, names)
        self.mlp = nn.Sequential(nn.Linear(dim * len(names), hidden), nn.ReLU(), nn.Linear(hidden, dim))

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """Returns [B, embedding_dim]."""
        return self.mlp(self.tables(features).values())


class TwoTowers(Trained):
    """See TwoTowersModel."""

    def __init__(self, config: TwoTowersModel) -> None:
        super().__init__()
        self.user = Tower(config, config.user_names, config.hidden)
        self.item = Tower(config, config.item_names, config.hidden)

    def logits(self, batch: BagsBatch) -> Tensor:
        """Returns logits [B]."""
        return (self.user(batch.bags) * self.item(batch.bags)).sum(dim=1)

    def compiled(self) -> tuple[nn.Module, ...]:
        """Returns both MLPs."""
        return self.user.mlp, self.item.mlp


class Sequence(Trained):
    """See SequenceModel."""

    def __init__(self, config: SequenceModel) -> None:
        super().__init__()
        dim = config.embedding_dim
        history = EmbeddingConfig(
            name="t_history", embedding_dim=dim, num_embeddings=config.rows_built, feature_names=["history"]
        )
        self._longest = config.longest
        self.items = EmbeddingCollection(tables=[history], device=torch.device("meta"))
        self.item = Tower(config, config.item_names, config.hidden)
        self.positions = nn.Parameter(torch.randn(config.longest, dim) * 0.02)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, config.heads, 2 * dim, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(config.layers)
        )
        future = torch.full((config.longest, config.longest), float("-inf")).triu(1)
        self.register_buffer("future", future, persistent=False)

    def logits(self, batch: Any) -> Tensor:
        """Returns logits [B] of a SequenceBatch, or of its proxy in TorchRec's trace."""
        x = of_samples(self.items(batch.history)["history"], batch.labels, self._longest) + self.positions
        for layer in self.layers:
            x = layer(x, src_mask=self.future)
        return (x.mean(dim=1) * self.item(batch.bags)).sum(dim=1)

    def compiled(self) -> tuple[nn.Module, ...]:
        """Returns the layers of attention and the tower's MLP."""
        return *self.layers, self.item.mlp


@torch.fx.wrap  # TorchRec's trace does not look into it
def of_samples(histories: JaggedTensor, labels: Tensor, longest: int) -> Tensor:
    """Returns the samples' histories, padded with zeros, [B, longest, embedding_dim], without sequences of padding."""
    return JaggedTensor(histories.values(), lengths=histories.lengths()[: len(labels)]).to_padded_dense(longest)


def build(config: BagsModel, seed: int) -> Trained:
    """Returns the model of a configuration, with tables on the meta device and dense weights drawn from `seed`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _build(config)


def _build(config: BagsModel) -> Trained:
    if isinstance(config, TwoTowersModel):
        return TwoTowers(config)
    if isinstance(config, SequenceModel):
        return Sequence(config)
    bags, dense = _bags(config, config.bag_names), config.dense_in_features
    if isinstance(config, DeepFmModel):
        return OfTorchRec(SimpleDeepFMNN(dense, bags, config.hidden, config.embedding_dim), ends_in_sigmoid=True)
    assert isinstance(config, DlrmModel)
    arguments = {
        "embedding_bag_collection": bags,
        "dense_in_features": dense,
        "dense_arch_layer_sizes": [*config.dense_hidden, config.embedding_dim],
        "over_arch_layer_sizes": [*config.over_hidden, 1],
    }
    if isinstance(config, DlrmDcnModel):
        return OfTorchRec(DLRM_DCN(**arguments, dcn_num_layers=config.cross_layers, dcn_low_rank_dim=config.cross_rank))
    if isinstance(config, DlrmProjectionModel):
        branch = [config.projected * config.embedding_dim]
        return OfTorchRec(
            DLRM_Projection(
                **arguments, interaction_branch1_layer_sizes=branch, interaction_branch2_layer_sizes=list(branch)
            )
        )
    return OfTorchRec(DLRM(**arguments))


def _bags(config: BagsModel, names: tuple[str, ...]) -> EmbeddingBagCollection:
    tables = [
        EmbeddingBagConfig(
            name=f"t_{name}", embedding_dim=config.embedding_dim, num_embeddings=config.rows_built, feature_names=[name]
        )
        for name in names
    ]
    return EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
