"""DLRMv4's dense network: tokens of embeddings, positions and times, STU layers, the candidate's logit.

Its parts are separate methods and modules, each a function of tensors, which faster ones may replace.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional
from torchrec import JaggedTensor

from dlrm_bench.dlrm.config import Precision
from dlrm_bench.dlrm.dense.tallies import Tallies
from dlrm_bench.dlrm.dlrmv4.batch import DenseBatch
from dlrm_bench.dlrm.dlrmv4.config import CONTEXT_TOKENS, EVENT_TABLES, ModelConfig, tables
from dlrm_bench.dlrm.dlrmv4.embedded import Embedded
from dlrm_bench.dlrm.dlrmv4.fp8_stu import LayerTallies
from dlrm_bench.dlrm.dlrmv4.fused_input import fused_input
from dlrm_bench.dlrm.dlrmv4.item_rows import item_rows, rows_of_events
from dlrm_bench.dlrm.dlrmv4.layers import MLP_EPS, Mlp, layer_norm, linear, normal_, uniform_
from dlrm_bench.dlrm.dlrmv4.preprocessor import Preprocessor
from dlrm_bench.dlrm.dlrmv4.sequences import (
    Sequences,
    join,
    offsets_of,
    pick,
    position_buckets,
    sequences_of,
    time_buckets,
    token_times,
)
from dlrm_bench.dlrm.dlrmv4.stu import StuLayer, factors_of_columns
from dlrm_bench.kernels.dense._dropout import Dropout, draw_seed
from dlrm_bench.kernels.dense.token_input import TokenPlaces

_HOUR = 3600.0  # seconds
_PERIODS = ((_HOUR, 24.0), (24 * _HOUR, 7.0))  # seconds of an hour and of a day; how many make a day and a week
_HOURS_OF_WEEK = 24 * 7
_CIRCLE = 2 * 3.14  # the reference's (modules/postprocessors.py)


class Postprocessor(nn.Module):
    """Maps the candidates' tokens and the times of their queries to the users' vectors."""

    _of_hours: Tensor
    """`time_features` of each hour of a week, on which alone they depend; fp32 [168, 4]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.combine = nn.Linear(config.width + 2 * len(_PERIODS), config.width)
        self.norm = nn.LayerNorm(config.width, eps=MLP_EPS)
        self._fused = config.kernels == "fused"
        hours = _HOUR * torch.arange(_HOURS_OF_WEEK)
        self.register_buffer("_of_hours", time_features(hours), persistent=False)

    def forward(self, tokens: Tensor, query: Tensor) -> Tensor:
        """Returns [B, width] of tokens [B, width], in their format, and times in seconds, int32 [B]."""
        joined = torch.cat([tokens, self.time_features(query).to(tokens.dtype)], dim=1)
        return layer_norm(self.norm, linear(self.combine, joined), self._fused)

    def time_features(self, times: Tensor) -> Tensor:
        """Returns `time_features` of seconds, int32 [B]; a look-up has fewer operations."""
        hours = torch.div(times, _HOUR, rounding_mode="floor").remainder(len(self._of_hours)).long()
        return self._of_hours[hours]


def time_features(times: Tensor) -> Tensor:
    """Returns cosine and sine of the hour of the day, then of the day of the week, fp32 [B, 4], of seconds [B]."""
    features = []
    for seconds, units in _PERIODS:
        elapsed = torch.div(times.float(), seconds, rounding_mode="floor")
        angle = torch.remainder(elapsed, units) / units * _CIRCLE
        features += [angle.cos(), angle.sin()]
    return torch.stack(features, dim=1)


class DenseNetwork(nn.Module):
    """All of DLRMv4 but its tables."""

    def __init__(self, config: ModelConfig, precision: Precision = "fp32") -> None:
        """precision: of tokens and of the products that make and transform them."""
        super().__init__()
        self._config = config
        self.dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        """The tokens' format."""
        self._fused = config.kernels == "fused"
        self.preprocessor = Preprocessor(config)
        self.position_weight = nn.Parameter(torch.empty(config.position_buckets, config.width))
        self.time_weight = nn.Parameter(torch.empty(config.time_buckets + 1, config.width))
        self.layers = nn.ModuleList(StuLayer(config) for _ in range(config.layers))
        self.postprocessor = Postprocessor(config)
        self.item_mlp = Mlp(
            len(EVENT_TABLES) * config.embedding_dim, config.head_hidden, config.width, fused=self._fused
        )
        self.head = Mlp(config.width, config.head_hidden, 1, normed=False, fused=self._fused)

    def init_weights(self, seed: int) -> None:
        """Fill all weights from `seed` alone, by the laws of the reference's modules."""
        generator = torch.Generator(self.position_weight.device).manual_seed(seed)
        self.preprocessor.init_weights(generator)
        for weight, buckets in (
            (self.position_weight, self._config.position_buckets),
            (self.time_weight, self._config.time_buckets),
        ):
            bound = math.sqrt(1 / buckets)
            nn.init.uniform_(weight, -bound, bound, generator=generator)
        for layer in self.layers:
            assert isinstance(layer, StuLayer)
            layer.init_weights(generator)
        normal_(self.postprocessor.combine, generator)
        for mlp in (self.item_mlp, self.head):
            uniform_(mlp.first, generator)
            uniform_(mlp.second, generator)
        for module in self.modules():
            if isinstance(module, nn.LayerNorm):
                module.reset_parameters()

    def round_products(self, tallies: Tallies) -> None:
        """Gives the layers' forward products factors in e4m3 from now on. tallies: with LayerTallies.names."""
        for number, layer in enumerate(self.layers):
            assert isinstance(layer, StuLayer)
            layer.round_products(LayerTallies.of(tallies, number))

    def rounded_weights(self, factors: bool) -> list[str]:
        """Returns the names of the weights that are used rounded to the tokens' format, and in no other way: nearly all
        weights of the products that make and transform tokens. factors: whether batches have an attention_factor."""
        names = ["preprocessor.context_weight", "preprocessor.context_bias"]
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear) and not name.startswith(("item_mlp.", "head.")):
                names += [f"{name}.weight", f"{name}.bias"]
            elif isinstance(module, StuLayer):
                names += [f"{name}.{weight}" for weight in module.rounded_weights(factors)]
        return names

    def forward(self, embedded: dict[str, JaggedTensor], batch: DenseBatch) -> Tensor:
        """Returns the logit of each sample, fp32 [B], of the embeddings of each feature of `tables`."""
        rows = {feature: embedded[feature].values() for table in tables(self._config) for feature in table.features}
        return self.scores(Embedded.of_features(rows, self._config, self.dtype), batch)

    def scores(self, embedded: Embedded, batch: DenseBatch) -> Tensor:
        """Returns the logit of each sample, fp32 [B]. embedded: of events, of distinct events or of distinct items."""
        offsets, config = offsets_of(batch.lengths), self._config
        seed = draw_seed(offsets.device) if self._fused and self.training else None
        tokens = self.tokens(embedded, batch, offsets, _dropout(config.input_dropout, seed, 0))
        length = batch.longest if config.attention_scale == "longest" else config.max_length
        candidates, factors = config.last_layer == "candidates", None
        if batch.attention_factor is not None:
            factors = factors_of_columns(batch.attention_factor, config.inner)
        for number, layer in enumerate(self.layers, 1):
            alone = candidates and number == config.layers
            dropout = _dropout(config.layer_dropout, seed, number)
            tokens = layer(tokens, offsets, length, alone, dropout, factors)
        ends = tokens if candidates else tokens[offsets[1:] - 1]
        users = self.postprocessor(ends, batch.query_timestamp)
        return self.logits(users.float(), self.items(embedded.candidates))

    def tokens(self, embedded: Embedded, batch: DenseBatch, offsets: Tensor, dropout: Dropout | None = None) -> Tensor:
        """Returns the first layer's input, [N, width]: content, action, position and time of each token, dropped out.

        dropout: the masks of fused kernels; plain kernels draw from torch's generator.
        """
        config = self._config
        content = self.preprocessor.content(*embedded.tokens)
        context = self.preprocessor.context(embedded.context)
        scale = math.sqrt(config.width)
        if self._fused:
            events, event = self._events(content, batch)
            places = self._places(batch, offsets, event)
            weights = self.position_weight, self.time_weight
            return fused_input(events, context.contiguous(), *weights, places, scale, dropout)
        sequences = sequences_of(offsets, len(batch.timestamp))
        if batch.item is not None:
            content = pick(content, batch.item, len(batch.labels))
        events = content + self.preprocessor.action(batch.action, len(batch.labels), self.dtype)
        if batch.event is not None:
            events = pick(events, batch.event, len(batch.labels))
        tokens = join(context, events, sequences) * scale
        tokens = tokens + self.places(batch, sequences).to(self.dtype)
        return functional.dropout(tokens, config.input_dropout, self.training)

    def _events(self, content: Tensor, batch: DenseBatch) -> tuple[Tensor, Tensor | None]:
        """Returns the rows of events and then candidates, and the row index of each event of the histories (None if the
        rows are in that order)."""
        if batch.item is None:
            action = self.preprocessor.distinct_action(batch.action, len(batch.labels), self.dtype)
            return content + action, batch.event
        actions = self.preprocessor.single_actions(self.dtype)
        return item_rows(content, actions, len(batch.labels)), rows_of_events(batch)

    def _places(self, batch: DenseBatch, offsets: Tensor, event: Tensor | None) -> TokenPlaces:
        """Returns what `fused_input` takes."""
        if event is None:
            event = torch.arange(len(batch.timestamp), dtype=torch.int32, device=offsets.device)
        longest = self._config.max_length
        return TokenPlaces(offsets, event, batch.timestamp, batch.query_timestamp, CONTEXT_TOKENS, longest)

    def places(self, batch: DenseBatch, sequences: Sequences) -> Tensor:
        """Returns the sum of the embeddings of each token's time and position, fp32 [N, width]."""
        times = token_times(batch.timestamp, batch.query_timestamp, sequences)
        time = time_buckets(times, batch.query_timestamp, sequences, self._config)
        position = position_buckets(sequences, self._config)
        return functional.embedding(time, self.time_weight) + functional.embedding(position, self.position_weight)

    def items(self, candidates: Sequence[Tensor]) -> Tensor:
        """Returns the candidates' vectors, fp32 [B, width], of the embeddings of their item, artist and album."""
        return self.item_mlp(torch.cat(list(candidates), dim=1))

    def logits(self, users: Tensor, items: Tensor) -> Tensor:
        """Returns logits, fp32 [B], of users' and items' vectors, fp32 [B, width]."""
        return self.head(users * items).squeeze(1)


def _dropout(rate: float, seed: Tensor | None, stream: int) -> Dropout | None:
    return None if seed is None or rate == 0 else Dropout(rate, seed, stream)


def loss_of(logits: Tensor, labels: Tensor, config: ModelConfig) -> Tensor:
    """Returns the weighted mean binary cross-entropy of a rank's samples; 0 without samples (the reference's
    _compute_loss)."""
    total = functional.binary_cross_entropy_with_logits(logits, labels, reduction="sum")
    return config.loss_weight * total / max(1, len(labels))
