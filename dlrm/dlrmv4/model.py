"""DLRMv4 in TorchRec's modules: an EmbeddingCollection and the dense network, to be sharded and trained as they are.

model = build_model(config, device)                       # tables on device "meta": for DistributedModelParallel
loss, (_, logits, labels) = model(batch_of(samples, config.model).to(device))
"""

from collections.abc import Callable
from hashlib import blake2b
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torchrec import EmbeddingCollection, EmbeddingConfig
from torchrec.distributed.types import ShardedTensor
from torchrec.streamable import Pipelineable

from dlrm_bench.dlrm.dlrmv4.batch import Batch
from dlrm_bench.dlrm.dlrmv4.config import Dlrmv4Training, ModelConfig, tables
from dlrm_bench.dlrm.dlrmv4.data.dataset import WindowBatch
from dlrm_bench.dlrm.dlrmv4.network import DenseNetwork, loss_of
from dlrm_bench.dlrm.tables.initial_weights import fill_initial_weights


class Dlrmv4(nn.Module):
    """Scores each sample's candidate. The tables' input is a field of the batch, so that TorchRec runs the input dist
    ahead; the dense network has no table, so that TorchRec's trace treats the network as a leaf module."""

    def __init__(self, embeddings: EmbeddingCollection, dense: DenseNetwork) -> None:
        super().__init__()
        self.embeddings = embeddings
        self.dense = dense

    def forward(self, batch: Batch) -> Tensor:
        """Returns logits, fp32 [B]."""
        return self.dense(self.embeddings(batch.features), batch)


class ModelParts(NamedTuple):
    """The differences in a TorchRecModel between networks: our own and the reference's."""

    module: nn.Module
    batch: Callable[[WindowBatch], Pipelineable]
    zeros: Callable[[], WindowBatch]


class _Loss(nn.Module):
    """`loss_of`; a module, which TorchRec's trace of a model takes whole."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self._config = config

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        return loss_of(logits, labels, self._config)


class Dlrmv4Train(nn.Module):
    """Returns what TorchRec's train pipelines take: the loss, and (loss, logits, labels), detached."""

    def __init__(self, model: Dlrmv4, config: ModelConfig) -> None:
        super().__init__()
        self.model = model
        self.loss = _Loss(config)

    def forward(self, batch: Batch) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        logits = self.model(batch)
        loss = self.loss(logits, batch.labels)
        return loss, (loss.detach(), logits.detach(), batch.labels)


def embedding_configs(config: ModelConfig) -> list[EmbeddingConfig]:
    """Returns the tables as TorchRec takes them, with its law of initial weights: uniform in +-sqrt(1 / rows)."""
    return [
        EmbeddingConfig(
            name=table.name,
            num_embeddings=table.rows,
            embedding_dim=table.columns,
            feature_names=list(table.features),
        )
        for table in tables(config)
    ]


def build_model(config: Dlrmv4Training, device: torch.device, tables_device: torch.device | None = None) -> Dlrmv4Train:
    """Returns the model with the initial dense weights of config.seed on `device`.

    tables_device: the device of the tables, by default "meta"; fill them with `fill_tables`, after sharding where they
    are sharded. Equal seeds give equal weights on every kind of device: they are drawn on the host.
    """
    dense = DenseNetwork(config.model, config.precision)
    dense.init_weights(config.seed)
    embeddings = EmbeddingCollection(
        tables=embedding_configs(config.model), device=tables_device or torch.device("meta")
    )
    return Dlrmv4Train(Dlrmv4(embeddings, dense.to(device)), config.model)


def fill_tables(model: nn.Module, config: ModelConfig, seed: int) -> None:
    """Fill the tables of a model, sharded or not, with initial weights that depend on the seed alone, not on the
    sharding; their law is TorchRec's own."""
    numbers = {f"embeddings.{table.name}.weight": (number, table.rows) for number, table in enumerate(tables(config))}
    filled = set()
    for key, value in model.state_dict().items():
        number, rows = numbers.get(key.rpartition("model.embeddings.")[2], (None, 0))
        if number is None:
            continue
        filled.add(number)
        if isinstance(value, ShardedTensor):
            parts = [(shard.tensor, shard.metadata.shard_offsets) for shard in value.local_shards()]
        else:
            parts = [(value, (0, 0))]
        for part, (row, column) in parts:
            fill_initial_weights(
                part, seed=seed, table=number, num_embeddings=rows, row_offset=row, column_offset=column
            )
    assert len(filled) == len(numbers), "each table has a key in the state, on every rank"


def seed_dropout(config: Dlrmv4Training, rank: int, iteration: int = 0) -> None:
    """Seeds torch's generators of the host and of this rank's device, from which dropout draws.

    Masks are a function of seed, rank and iteration (counted from 1), so that a resumed run has the same masks as the
    run that saved the checkpoint. Takes microseconds and waits for nothing.
    """
    words = f"{config.seed} {rank if config.model.dropout_seed == 'rank' else 0} {iteration}"
    seed = int.from_bytes(blake2b(words.encode(), digest_size=8).digest(), "little") >> 1
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(seed)
