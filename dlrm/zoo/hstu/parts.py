"""Data and model of HSTU; see benchmark.Parts."""

from collections.abc import Iterator
from functools import partial

import torch
from torchrec import KeyedJaggedTensor

from dlrm_bench.dlrm.config import TrainingConfig, require
from dlrm_bench.dlrm.data.dataset import Dataset, FileContent
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.dlrm.torchrec_model import DeclaredSizes, TorchRecModel
from dlrm_bench.dlrm.zoo.config import ZooOptimizer
from dlrm_bench.dlrm.zoo.hstu.batch import HstuBatch, batch_ids, capacities, most_events, random_batches
from dlrm_bench.dlrm.zoo.hstu.config import HstuConfig, HstuData
from dlrm_bench.dlrm.zoo.hstu.model import HstuRanker, HstuTrain
from dlrm_bench.dlrm.zoo.parts import ADAM_STATES, adam, fresh
from dlrm_bench.dlrm.zoo.random_dataset import Drawn, RandomDataset

INT32_ELEMENTS = 1 << 31
"""Number of elements from which TorchRec's output dist of unpooled vectors overflows: it multiplies the int32 lengths
by the width (alltoall_sequence in comm_ops.py), and FBGEMM's permutation sums these in int32 and then writes out of
bounds."""


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


def elements_sent(config: TrainingConfig, world_size: int) -> int:
    """Returns the largest number of elements of unpooled vectors that a rank sends in an iteration, its own included:
    it sends all ranks those that their samples name in its tables. 0 for a single rank."""
    model, data, size = _model(config), _data(config), config.local_batch_size
    if world_size == 1:
        return 0
    events = most_events(model, size, config.seed, world_size, data.padded, data.random_batches)
    samples, sent = size * world_size, [0] * world_size
    ids = [events + samples * model.candidates] * len(model.event_rows) + [samples] * len(model.user_rows)
    for owner, of_table in zip(model.tables.owners(world_size), ids, strict=True):
        sent[owner] += of_table
    return max(sent) * model.width


def check_elements(config: TrainingConfig, world_size: int, trimmed: bool) -> None:
    """Raises ValueError if TorchRec's output dist overflows: unless the input dist is trimmed, which needs padding."""
    sent = elements_sent(config, world_size)
    require(
        sent < INT32_ELEMENTS or (trimmed and _data(config).padded),
        f"--local-batch-size {config.local_batch_size} on {world_size} ranks: one of them sends up to {sent:,} "
        "elements of vectors, and TorchRec counts fewer than 2^31; lower it, or choose --pipeline five-stage with "
        "--trim-input-dist and --data.padded",
    )


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
