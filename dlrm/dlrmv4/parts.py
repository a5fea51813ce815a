"""Data and models of DLRMv4; see benchmark.Parts."""

from typing import TYPE_CHECKING, cast

from dlrm_bench.dlrm.benchmark import StaticDenseOptions
from dlrm_bench.dlrm.config import TrainingConfig
from dlrm_bench.dlrm.data.checksums import sample_checksum
from dlrm_bench.dlrm.data.dataset import FileContent
from dlrm_bench.dlrm.dlrmv4.config import DataConfig, Dlrmv4Training, ModelConfig
from dlrm_bench.dlrm.dlrmv4.data.builder import compile_ahead
from dlrm_bench.dlrm.dlrmv4.data.cache import COLUMNS, META, find_cache, read_limits
from dlrm_bench.dlrm.dlrmv4.data.dataset import EventDataset, WindowBatch
from dlrm_bench.dlrm.dlrmv4.data.item_maps import map_path
from dlrm_bench.dlrm.dlrmv4.data.packed import Packed, PackedLayout
from dlrm_bench.dlrm.dlrmv4.data.windows import paths as window_paths
from dlrm_bench.dlrm.runtime.ranks import Ranks

if TYPE_CHECKING:
    from dlrm_bench.dlrm.dlrmv4.static_stage import Dlrmv4Stage
    from dlrm_bench.dlrm.torchrec_model import TorchRecModel


def open_data(config: TrainingConfig) -> EventDataset:
    """Opens the cache of events and its index of windows, and compiles what builds batches, which would otherwise be
    within the clock of a run; ValueError names the file or flag that is wrong."""
    dataset = EventDataset(_data(config), _model(config))
    compile_ahead()
    return dataset


def data_content(config: TrainingConfig) -> dict[str, FileContent]:
    """Returns the fingerprints of the files that a run reads: of a few blocks of each."""
    root = _data(config).path
    cache = find_cache(root)
    limits = read_limits(cache)
    paths = [cache / f"{name}.npy" for name in COLUMNS] + [map_path(root, name) for name in ("artist", "album")]
    content: dict[str, FileContent] = {path.name: {"sample": sample_checksum(path), "blake2b": None} for path in paths}
    added = [cache / META, *(cache / f"{name}_{limits.anchors_name}.npy" for name in ("positions", "anchor_ts"))]
    for path in (*added, *window_paths(cache, limits)):
        content[path.name] = {"sample": sample_checksum(path), "blake2b": None, "added": True}
    return content


def batch_bytes(config: TrainingConfig) -> int:
    """Returns the bytes of a rank's batch in which no two samples share an event: a few megabytes in practice, as
    neighbouring samples share nearly all."""
    model, size = _model(config), config.local_batch_size
    events = size * model.max_history
    return PackedLayout(size, events, events if model.content == "items" else None).end


def empty_batch(config: TrainingConfig, pin: bool) -> WindowBatch:
    """Returns a batch of uninitialised host memory, of as many distinct events as batches have (Packed). pin:
    page-locked."""
    size, longest = config.local_batch_size, _model(config).max_history
    layout = PackedLayout(size, _EVENTS_A_SAMPLE * size + longest)
    return WindowBatch(Packed.empty(layout, tokens=0, candidates=0, longest=longest, pin=pin), size)


def static_sequences(config: TrainingConfig, options: StaticDenseOptions, ranks: Ranks) -> "Dlrmv4Stage":
    """Returns stage 3 of the static pipeline. Collective."""
    from dlrm_bench.dlrm.dlrmv4.static_stage import Dlrmv4Stage  # samples are read without torchrec

    return Dlrmv4Stage(cast(Dlrmv4Training, config), options, ranks)


def torchrec_model(config: TrainingConfig, ranks: Ranks) -> "TorchRecModel":
    """Returns the model for the pipelines over TorchRec's modules."""
    from dlrm_bench.dlrm.dlrmv4.torchrec import torchrec_model  # samples are read without torchrec

    return torchrec_model(config, ranks)


_EVENTS_A_SAMPLE = 700
"""Number of distinct events a sample: 6.6 MB for 1,024 samples, as evaluations have on eight ranks (data/packed.py);
training has at most 430. PyTorch pins the next power of two, 8.4 MB, which holds the largest, too."""


def _data(config: TrainingConfig) -> DataConfig:
    assert isinstance(config.data, DataConfig)
    return config.data


def _model(config: TrainingConfig) -> ModelConfig:
    assert isinstance(config.model, ModelConfig)
    return config.model
