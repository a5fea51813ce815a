"""Makes tokens: an event's from its content and action, and eight of a sample's context.

A token's content is a function of its item alone, as artist and album are looked up by item, and there are few actions:
`content` and `action` take any rows, so that a caller may compute each distinct one once.
"""

import math

import torch
from torch import Tensor, nn

from dlrm_bench.dlrm.dense.pick_few import pick_few
from dlrm_bench.dlrm.dlrmv4.config import ACTION_BITS, CONTEXT_TOKENS, ModelConfig
from dlrm_bench.dlrm.dlrmv4.layers import Mlp, normal_

_ACTION_STD = 0.1  # action_embedding_init_std of the reference


class Preprocessor(nn.Module):
    """Maps embeddings and actions to tokens, in fp32 or bf16."""

    _has_bits: Tensor
    """The bits of each action, bool [8, 3]; of actions with one bit, [3, 3]."""
    _single_bits: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        columns, hidden, width = config.embedding_dim, config.preprocessor_hidden, config.width
        fused = config.kernels == "fused"
        self.item_mlp = Mlp(columns, hidden, width, fused=fused)
        self.artist_album_mlp = Mlp(2 * columns, hidden, width, fused=fused)
        self.action_mlp = Mlp(len(ACTION_BITS) * config.action_dim, hidden, width, fused=fused)
        self.action_embedding = nn.Parameter(torch.empty(len(ACTION_BITS), config.action_dim))
        self.candidate_action = nn.Parameter(torch.empty(1, len(ACTION_BITS) * config.action_dim))
        self.context_weight = nn.Parameter(torch.empty(CONTEXT_TOKENS, columns, width))
        self.context_bias = nn.Parameter(torch.empty(CONTEXT_TOKENS, width))
        numbers = torch.arange(1 << len(ACTION_BITS))[:, None]
        self.register_buffer("_has_bits", (numbers & torch.tensor(ACTION_BITS)) > 0, persistent=False)
        self.register_buffer("_single_bits", torch.eye(len(ACTION_BITS), dtype=torch.bool), persistent=False)

    def init_weights(self, generator: torch.Generator | None) -> None:
        """Fill the weights as the reference does, whose transducer draws those of its MLPs by Xavier's normal law."""
        for mlp in (self.item_mlp, self.artist_album_mlp, self.action_mlp):
            normal_(mlp.first, generator)
            normal_(mlp.second, generator)
        for embedding in (self.action_embedding, self.candidate_action):
            nn.init.normal_(embedding, 0, _ACTION_STD, generator=generator)
        _, columns, width = self.context_weight.shape
        nn.init.normal_(self.context_weight, 0, math.sqrt(2 / (columns + width)), generator=generator)
        nn.init.zeros_(self.context_bias)

    def content(self, item: Tensor, artist: Tensor, album: Tensor) -> Tensor:
        """Returns what rows' item, artist and album add to their tokens, [R, width], of embeddings [R, columns] in the
        format that it computes in."""
        return self.item_mlp(item) + self.artist_album_mlp(torch.cat([artist, album], dim=1))

    def action(self, bits: Tensor, candidates: int, dtype: torch.dtype) -> Tensor:
        """Returns the action term of each token, [T + candidates, width]: for T events by their bits, uint8 [T], then
        for the candidates, which share one vector because their action is the label."""
        return self._of_actions(self._has_bits[(bits & (len(self._has_bits) - 1)).long()], candidates, dtype)

    def distinct_action(self, bits: Tensor, candidates: int, dtype: torch.dtype) -> Tensor:
        """Returns the result of `action`, computed once for each distinct action."""
        every, actions = self._of_actions(self._has_bits, 1, dtype), len(self._has_bits)
        own = bits.new_full((candidates,), actions)
        return pick_few(every, torch.cat([bits & (actions - 1), own]).long())

    def single_actions(self, dtype: torch.dtype) -> Tensor:
        """Returns the actions' part of tokens of events with one bit each, in the order of ACTION_BITS, then of
        candidates, [len(ACTION_BITS) + 1, width]."""
        return self._of_actions(self._single_bits, 1, dtype)

    def _of_actions(self, has_bits: Tensor, candidates: int, dtype: torch.dtype) -> Tensor:
        history = (has_bits[:, :, None] * self.action_embedding).flatten(1)
        joined = torch.cat([history, self.candidate_action.expand(candidates, -1)])
        return self.action_mlp(joined.to(dtype))

    def context(self, rows: Tensor) -> Tensor:
        """Returns the tokens of context, [B, CONTEXT_TOKENS, width], each with its own weights, from the embeddings of
        each table, [CONTEXT_TOKENS, B, columns], in the format that it computes in."""
        product = torch.baddbmm(self.context_bias[:, None].to(rows.dtype), rows, self.context_weight.to(rows.dtype))
        return product.transpose(0, 1)
