"""Data and model of HSTU; see benchmark.Parts."""

from collections.abc import Iterator
from functools import partial

import torch
from torchrec import KeyedJaggedTensor

from dlrm_bench.dlrm.config import TrainingConfig
from dlrm_bench.dlrm.data.dataset import Dataset, FileContent
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.dlrm.torchrec_model import DeclaredSizes, TorchRecModel
from dlrm_bench.dlrm.zoo.config import ZooOptimizer
from dlrm_bench.dlrm.zoo.hstu.batch import HstuBatch, batch_ids, capacities, random_batches
from dlrm_bench.dlrm.zoo.hstu.config import HstuConfig, HstuData
from dlrm_bench.dlrm.zoo.hstu.model import HstuRanker, HstuTrain
from dlrm_bench.dlrm.zoo.parts import ADAM_STATES, adam, fresh
from dlrm_bench.dlrm.zoo.random_dataset import Drawn, RandomDataset


def open_data(config: TrainingConfig) -> Dataset:
    """Returns batches drawn at random."""
    model, data = _model(config), _data(config)

    def draw(rank: int, world_size: int, local_batch_size: int) -> Iterator[HstuBatch]:
        return random_batches(model, local_batch_size, config.seed, rank, data.padded, world_size)

    return RandomDataset(draw, data.random_batches)


def data_content(config: TrainingConfig) -> dict[str, FileContent]:
    """Returns nothing: there are no files."""
    return {}


def batch_bytes(config: TrainingConfig) -> int:
    """Returns the bytes of a rank's batch in host memory, at the largest number of events."""
    ids = max(sum(of.values()) for of in batch_ids(_model(config), config.local_batch_size))
    return 8 * (ids + capacities(_model(config), config.local_batch_size)[-1])


def empty_batch(config: TrainingConfig, pin: bool) -> Drawn:
    """Returns a drawn batch with its ids, actions and labels set to zero. pin: page-locked."""
    model, size = _model(config), config.local_batch_size
    batch = next(random_batches(model, size, config.seed, padded=_data(config).padded))
    ids = KeyedJaggedTensor(
        batch.features.keys(), torch.zeros_like(batch.features.values()), lengths=batch.features.lengths()
    )
    zeros = HstuBatch(ids, torch.zeros_like(batch.actions), torch.zeros_like(batch.labels), batch.lengths)
    return Drawn(zeros.pin_memory() if pin else zeros, size)


def torchrec_model(config: TrainingConfig, ranks: Ranks) -> TorchRecModel:
    """Returns the model for the pipelines over TorchRec's modules."""
    model, optimizer = _model(config), config.optimizer
    assert isinstance(optimizer, ZooOptimizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        train = HstuTrain(HstuRanker(model, tables_device=torch.device("meta"), bf16=config.precision == "bf16"))
    padded = batch_ids(model, config.local_batch_size) if _data(config).padded else []
    return TorchRecModel(
        module=train,
        batch=fresh,
        zeros=partial(empty_batch, config, ranks.device.type == "cuda"),
        dense_optimizer=adam(optimizer),
        dense_states=ADAM_STATES,
        sizes=DeclaredSizes(batches=tuple(padded)),
        compiled=train.compiled(),
        casts=True,
    )


def _model(config: TrainingConfig) -> HstuConfig:
    assert isinstance(config.model, HstuConfig)
    return config.model


def _data(config: TrainingConfig) -> HstuData:
    assert isinstance(config.data, HstuData)
    return config.data
