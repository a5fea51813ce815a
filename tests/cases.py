"""Where tests on several ranks run, and a model small enough for all of them."""

from typing import Any

import pytest

from dlrm_bench.dlrm.dcnv2.config import ModelConfig

CPU_PLACES = [(1, False), (2, False)]
GPU_PLACES = [pytest.param(1, True, marks=pytest.mark.gpu), pytest.param(2, True, marks=pytest.mark.multi_gpu)]
PLACES = [*CPU_PLACES, *GPU_PLACES]
"""(world_size, gpu) for the fixture run_ranks."""

WAYS: dict[str, dict[str, Any]] = {
    "fbgemm": {},
    "presorted": {"presort_ids": True},
    "peer memory": {"presort_ids": True, "peer_memory": True},
}
"""Options of the static pipeline: the update of its tables, and the way of its ranks' exchanges."""

SMALL_MODEL = ModelConfig(
    # TorchRec's planner and ours replicate the small tables.
    num_embeddings=(5000, 7, 30, 90000, 600, 400),
    multi_hot_sizes=(3, 1, 2, 12, 4, 1),
    embedding_dim=32,
    dense_in_features=5,
    bottom_mlp=(24, 32),
    cross_layers=2,
    cross_rank=8,
    top_mlp=(24, 16, 1),
)
