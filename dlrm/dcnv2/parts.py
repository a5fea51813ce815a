"""Data and models of DLRM-DCNv2; see benchmark.Parts."""

from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from dlrm_bench.dlrm.benchmark import StaticDenseOptions
from dlrm_bench.dlrm.config import TrainingConfig
from dlrm_bench.dlrm.data.batch import Batch, feature_blocks
from dlrm_bench.dlrm.data.dataset import Dataset, FileContent
from dlrm_bench.dlrm.dcnv2 import work
from dlrm_bench.dlrm.dcnv2.config import DataConfig, DcnTraining, ModelConfig
from dlrm_bench.dlrm.dcnv2.data import content
from dlrm_bench.dlrm.dcnv2.data.dataset import open_dataset
from dlrm_bench.dlrm.dcnv2.static_stage import DcnStage
from dlrm_bench.dlrm.runtime.peer_memory import PeerMemory
from dlrm_bench.dlrm.runtime.ranks import Ranks

if TYPE_CHECKING:
    from dlrm_bench.dlrm.torchrec_model import TorchRecModel


def open_data(config: TrainingConfig) -> Dataset:
    """Opens and checks the data; ValueError names the bad file or flag."""
    assert isinstance(config.data, DataConfig)
    assert isinstance(config.model, ModelConfig)
    return open_dataset(config.data, config.model, config.seed)


def data_content(config: TrainingConfig) -> dict[str, FileContent]:
    """Returns the fingerprints of the files that a run reads, by name; empty for random batches."""
    assert isinstance(config.data, DataConfig)
    return content.data_content(config.data)


def batch_bytes(config: TrainingConfig) -> int:
    """Returns the bytes of a rank's batch: ids, dense features and labels."""
    return work.batch_bytes(config)


def empty_batch(config: TrainingConfig, pin: bool) -> Batch:
    """Returns a batch of uninitialised host memory. pin: page-locked."""
    assert isinstance(config.model, ModelConfig)
    return Batch.empty(config.local_batch_size, config.model, pin)


def table_ids(config: TrainingConfig, batch: Batch) -> list[NDArray[np.int32]]:
    """Returns the ids that a batch looks up in each table, [B * multi-hot size]."""
    assert isinstance(config.model, ModelConfig)
    return [block.numpy().reshape(-1) for block in feature_blocks(batch.ids, config.model.multi_hot_sizes)]


def static_dense(
    config: TrainingConfig, options: StaticDenseOptions, ranks: Ranks, memory: PeerMemory | None
) -> DcnStage:
    """Returns stage 3 of the static pipeline. Collective."""
    return DcnStage(cast(DcnTraining, config), options, ranks, memory)


def torchrec_model(config: TrainingConfig, ranks: Ranks) -> "TorchRecModel":
    """Returns the model for the pipelines over TorchRec's modules."""
    from dlrm_bench.dlrm.dcnv2.torchrec import torchrec_model  # here, because the static pipeline needs no torchrec

    return torchrec_model(config, ranks)
