"""DLRM-DCNv2 in plain PyTorch on one process: what every pipeline must equal."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from dlrm_bench.bench.config import RunConfig
from dlrm_bench.dlrm.data.batch import Batch, feature_blocks
from dlrm_bench.dlrm.dcnv2.network import DenseNetwork
from dlrm_bench.dlrm.tables.initial_weights import fill_initial_weights


class PlainDLRM:
    """Whole tables, dense gradients, torch.optim.Adagrad on everything, one global batch a step."""

    def __init__(self, config: RunConfig, device: torch.device | str = "cpu") -> None:
        model = config.model
        self.sizes = model.multi_hot_sizes
        self.dense = DenseNetwork(model)
        self.dense.init_weights(config.seed)
        self.dense.to(device)
        self.tables = nn.ParameterList()
        for table, rows in enumerate(model.rows):
            weights = torch.empty(rows, model.embedding_dim, device=device)
            fill_initial_weights(weights, seed=config.seed, table=table, num_embeddings=rows)
            self.tables.append(nn.Parameter(weights))
        self.optimizer = torch.optim.Adagrad(
            [*self.dense.parameters(), *self.tables], lr=config.optimizer.learning_rate, eps=config.optimizer.eps
        )

    def logits(self, dense: Tensor, blocks: list[Tensor]) -> Tensor:
        pooled = [
            functional.embedding_bag(block.long(), table, mode="sum")
            for block, table in zip(blocks, self.tables, strict=True)
        ]
        return self.dense(dense, torch.cat(pooled, dim=1))

    def gather(self, local_batches: list[Batch]) -> tuple[Tensor, list[Tensor], Tensor]:
        """The global batch of all ranks' local batches: dense, ids of each feature, labels."""
        blocks = [feature_blocks(batch.ids, self.sizes) for batch in local_batches]
        return (
            torch.cat([batch.dense for batch in local_batches]),
            [torch.cat(parts) for parts in zip(*blocks, strict=True)],
            torch.cat([batch.labels for batch in local_batches]),
        )

    def train_step(self, local_batches: list[Batch]) -> float:
        """One step on the global batch; returns its mean loss."""
        dense, blocks, labels = self.gather(local_batches)
        loss = functional.binary_cross_entropy_with_logits(self.logits(dense, blocks), labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()
