"""Presets of the TorchRec models and HSTU, as they are but small."""

from dataclasses import replace
from itertools import islice
from typing import Any

from dlrm_bench.bench.config import RunConfig
from dlrm_bench.bench.presets import preset
from dlrm_bench.dlrm.benchmarks import named
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.dlrm.zoo.benchmark import ZOO
from dlrm_bench.dlrm.zoo.random_dataset import Drawn
from tests.pipelines import changed

PRESETS = (*(name for benchmark in ZOO for name in benchmark.presets), "hstu-tiny")
"""All presets but hstu-small, whose tables take gigabytes."""
DISTINCT = 4
ALL_ON: dict[str, Any] = {
    "avoid_record_streams": True,
    "pinned_d2h": True,
    "cuda_graph": "dense",
    "launch_threads": 2,
    "trim_input_dist": True,
    "graph_dists": True,
}
_SIZES: dict[str, Any] = {
    "rows": 50,
    "embedding_dim": 8,
    "user_features": 2,
    "item_features": 3,
    "dense_in_features": 5,
    "dense_hidden": (12,),
    "over_hidden": (10,),
    "hidden": 12,
    "cross_rank": 4,
    "longest": 9,
    "layers": 1,
}


def small(name: str, pipeline: str = "torchrec", **changes: Any) -> RunConfig:
    """Returns a preset with sizes for tests, under a pipeline; changes: of the run or of the pipeline's options."""
    config = preset(name)
    fields = type(config.model).__dataclass_fields__
    sizes = {} if name == "hstu-tiny" else {field: size for field, size in _SIZES.items() if field in fields}
    smaller = {
        "model": replace(config.model, **sizes),  # type: ignore[type-var]
        "data": replace(config.data, random_batches=DISTINCT),  # type: ignore[type-var]
        "local_batch_size": 6,
    }
    return changed(config, pipeline, **(smaller | changes))


def padded(config: RunConfig) -> RunConfig:
    """The configuration with the batches that graphs need: histories of varying lengths are padded."""
    varies = config.benchmark in ("hstu", "zoo_sequence")
    return replace(config, data=replace(config.data, padded=True)) if varies else config  # type: ignore[call-arg]


def drawn(config: RunConfig, ranks: Ranks, count: int) -> list[Drawn]:
    """Returns a rank's first batches; each is used again after DISTINCT others."""
    dataset = named(config.benchmark).parts().open_data(config)
    place = (ranks.rank, ranks.world_size, config.local_batch_size)
    return list(islice(dataset.train_batches(*place, pin=ranks.device.type == "cuda"), count))
