"""Obstacles of a machine that no run needs to start for."""

import pytest
import torch

from dlrm_bench.bench import obstacles
from dlrm_bench.bench.presets import preset
from dlrm_bench.dlrm.runtime.ranks import Ranks


def test_batches_must_fit_in_the_container(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(rank=0, local_rank=0, world_size=1, local_world_size=1, device=torch.device("cpu"))
    obstacles._check_batches_fit(preset("smoke"), ranks)
    monkeypatch.setattr(obstacles, "node_memory_bytes", lambda: 1000)
    with pytest.raises(ValueError, match=r"batches of --local-batch-size .* but this node has 0\.0 GB"):
        obstacles._check_batches_fit(preset("smoke"), ranks)
