"""The dense network of DLRM-DCNv2: bottom MLP, low-rank cross network, top MLP.

Naumov et al. 2019 (arXiv:1906.00091) for the model, Wang et al. 2020 (arXiv:2008.13535) for the cross network.
"""

import itertools
import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from dlrm_bench.dlrm.dcnv2.config import ModelConfig


def _linear_layers(widths: tuple[int, ...]) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(i, o) for i, o in itertools.pairwise(widths))


class CrossLayer(nn.Module):
    """x' = x0 * (W (V x) + b) + x, with W [width, rank] and V [rank, width] (DCN-v2, section 3.2, low rank)."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.v = nn.Parameter(torch.empty(rank, width))
        self.w = nn.Parameter(torch.empty(width, rank))
        self.bias = nn.Parameter(torch.empty(width))

    def forward(self, x0: Tensor, x: Tensor) -> Tensor:
        """x0, x: [batch, width]; returns [batch, width]."""
        return x0 * functional.linear(functional.linear(x, self.v), self.w, self.bias) + x


class DenseNetwork(nn.Module):
    """DLRM-DCNv2 without the embeddings.

    The initial distributions are the MLPerf reference's: torch.nn.Linear's default for the MLPs, Xavier normal for
    the cross layers' W and V, zero for their bias.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = (config.num_features + 1) * config.embedding_dim
        self.bottom_mlp = _linear_layers((config.dense_in_features, *config.bottom_mlp))
        self.cross = nn.ModuleList(CrossLayer(width, config.cross_rank) for _ in range(config.cross_layers))
        self.top_mlp = _linear_layers((width, *config.top_mlp))

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Draws all weights from a CPU generator: the same on every rank and device for the same seed."""
        generator = torch.Generator().manual_seed(seed)
        for linear in (*self.bottom_mlp, *self.top_mlp):
            bound = 1 / math.sqrt(linear.in_features)  # equals kaiming_uniform_(a=sqrt(5))
            for parameter in (linear.weight, linear.bias):
                parameter.copy_(torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator))
        for layer in self.cross:
            assert isinstance(layer, CrossLayer)
            std = math.sqrt(2 / sum(layer.w.shape))
            for parameter in (layer.w, layer.v):
                parameter.copy_(torch.empty(parameter.shape).normal_(0, std, generator=generator))
            layer.bias.zero_()

    def forward(self, dense: Tensor, pooled: Tensor) -> Tensor:
        """Returns the logits, [batch].

        dense: [batch, dense_in_features]. pooled: [batch, num_features * embedding_dim], features in table order.
        """
        for linear in self.bottom_mlp:
            dense = functional.relu(linear(dense))
        x0 = x = torch.cat((dense, pooled), dim=1)
        for layer in self.cross:
            x = layer(x0, x)
        *hidden, last = self.top_mlp
        for linear in hidden:
            x = functional.relu(linear(x))
        return last(x).squeeze(1)
