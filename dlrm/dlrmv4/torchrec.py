"""DLRMv4 on TorchRec's modules, for pipeline/torchrec: an EmbeddingCollection whose tables are split by rows, the dense
network, Adam behind a clipped gradient; batches that travel packed and are spread out on the device."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torchrec.streamable import Pipelineable

from dlrm_bench.dlrm.config import TrainingConfig, require
from dlrm_bench.dlrm.dense.guarded_adam import GuardedAdam
from dlrm_bench.dlrm.dlrmv4.batch import Batch, batch_of_packed
from dlrm_bench.dlrm.dlrmv4.config import DataConfig, Dlrmv4Training, ModelConfig, OptimizerConfig
from dlrm_bench.dlrm.dlrmv4.data.dataset import WindowBatch
from dlrm_bench.dlrm.dlrmv4.data.item_maps import ItemMaps
from dlrm_bench.dlrm.dlrmv4.data.limits import LISTEN_PLUS, POOLS, Rows
from dlrm_bench.dlrm.dlrmv4.data.packed import END, LENGTH, Packed, PackedLayout, by_items
from dlrm_bench.dlrm.dlrmv4.model import ModelParts, build_model, seed_dropout
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.dlrm.torchrec_model import TorchRecModel

_STATES = {"step": ".step", "exp_avg": ".exp_avg", "exp_avg_sq": ".exp_avg_sq"}


def torchrec_model(config: TrainingConfig, ranks: Ranks) -> TorchRecModel:
    """Returns Dlrmv4Train with the initial dense weights of the seed. ValueError, which names the
    flag, for a pipeline's option that this model's batches cannot take."""
    model, data, optimizer = config.model, config.data, config.optimizer
    assert isinstance(model, ModelConfig)
    assert isinstance(data, DataConfig)
    assert isinstance(optimizer, OptimizerConfig)
    require(
        not getattr(getattr(config, "pipeline", None), "inplace_copy", False),
        "--inplace-copy: batches of DLRMv4 travel packed, and their form on the device is made there: leave it out",
    )
    of_v4 = cast(Dlrmv4Training, config)
    artist, album = item_maps(data, model, ranks.device)

    def batch(host: WindowBatch) -> PackedBatch:
        packed = by_items(host.packed, ranks.device.type == "cuda") if model.content == "items" else host.packed
        return PackedBatch(packed=packed, artist=artist, album=album, model=model)

    parts: ModelParts
    if model.network == "own":
        zeros = partial(empty_histories, config.local_batch_size, ranks.device.type == "cuda")
        parts = ModelParts(build_model(of_v4, ranks.device), batch, zeros)
    else:
        from dlrm_bench.dlrm.dlrmv4.reference import reference_parts

        parts = reference_parts(of_v4, ranks.device, artist, album)
    return TorchRecModel(
        module=parts.module,
        prefix="model.",
        batch=parts.batch,
        zeros=parts.zeros,
        dense_optimizer=partial(_clipped_adam, config=optimizer),
        before_step=partial(seed_dropout, of_v4, ranks.rank),
        dense_states=_STATES,
        by_rows=True,
        drops_repeats=True,
        casts=True,
    )


@dataclass(kw_only=True)
class PackedBatch(Pipelineable):
    """A batch as readers build it. `to` returns the model's form: it transfers distinct events once and builds the rest
    on the device, on the stream of the copy."""

    packed: Packed
    artist: Tensor
    """Artist of each item, int32, on the training's device, as is the album."""
    album: Tensor
    model: ModelConfig

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        """Returns the batch in the model's form, on `device`, where the maps must be."""
        assert self.artist.device.type == torch.device(device).type
        return batch_of_packed(self.packed.to(device), self.artist, self.album, self.model)

    def record_stream(self, stream: torch.Stream) -> None:
        """Does nothing: the memory is the host's."""


class ClippedAdam(GuardedAdam):
    """GuardedAdam that first clips the joint norm of all gradients."""

    def __init__(self, parameters: list[nn.Parameter], skip: Tensor, config: OptimizerConfig) -> None:
        """parameters: all dense weights; their gradients are those of all ranks, averaged, when a step begins."""
        super().__init__(parameters, skip, lr=config.learning_rate, betas=config.adam_betas, eps=config.adam_eps)
        self._weights, self._longest = parameters, config.clip_norm

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """See torch.optim.Adam; nothing waits for the device."""
        if self._longest:
            nn.utils.clip_grad_norm_(self._weights, self._longest)
        return super().step(closure)


def _clipped_adam(
    parameters: list[nn.Parameter], skip: Callable[[], Tensor], config: OptimizerConfig
) -> torch.optim.Optimizer:
    return ClippedAdam(parameters, skip(), config)


def item_maps(data: DataConfig, model: ModelConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns the artist and the album of each item, int32, on `device`."""
    maps = ItemMaps.open(data.path, Rows(*model.rows))
    artist, album = (torch.from_numpy(of).to(device) for of in (maps.artist, maps.album))
    return artist, album


def empty_histories(samples: int, pin: bool) -> WindowBatch:
    """Returns samples of user and item 0, whose histories have one event, of item 0 too."""
    packed = Packed.empty(PackedLayout(samples, 1), tokens=samples, candidates=samples, longest=1, pin=pin)
    packed.storage.zero_()
    packed.action.fill_(LISTEN_PLUS)
    packed.samples[1:POOLS] = 1  # no like and no skip before the end
    packed.samples[END] = packed.samples[LENGTH] = 1
    return WindowBatch(packed, samples)
