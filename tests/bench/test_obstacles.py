"""Obstacles of a machine that no run needs to start for."""

from dataclasses import replace

import pytest
import torch

from dlrm_bench.bench import obstacles
from dlrm_bench.bench.presets import preset
from dlrm_bench.dlrm.runtime.ranks import Ranks
from tests.pipelines import changed


def test_batches_must_fit_in_the_container(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(rank=0, local_rank=0, world_size=1, local_world_size=1, device=torch.device("cpu"))
    obstacles._check_batches_fit(preset("smoke"), ranks)
    monkeypatch.setattr(obstacles, "node_memory_bytes", lambda: 1000)
    with pytest.raises(ValueError, match=r"batches of --local-batch-size .* but this node has 0\.0 GB"):
        obstacles._check_batches_fit(preset("smoke"), ranks)


def test_a_ladder_refuses_whole_tables_that_one_gpu_cannot_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    config = preset("hstu-small")
    monkeypatch.setattr(obstacles, "node_memory_bytes", lambda: int(96e9))
    monkeypatch.setattr(obstacles, "largest_gpu_bytes", lambda: int(24e9))
    with pytest.raises(ValueError, match=r"rank 2 holds .* which need 26\.6 GB .* has 22\.8 GB"):
        obstacles.check_tables_fit_node(config, 4, on_gpus=True)
    obstacles.check_tables_fit_node(config, 4, on_gpus=False)  # the ranks share the node's memory


def test_more_vectors_than_torchrec_counts_are_refused_unless_trimmed() -> None:
    config = replace(preset("hstu-small"), local_batch_size=256)
    obstacles._check_elements(config, 2)
    message = r"--local-batch-size 256 on 4 ranks: .* lower it, or choose .* --trim-input-dist and --data\.padded"
    five_stage = changed(config, "five-stage", trim_input_dist=True)
    padded = replace(config.data, padded=True)  # type: ignore[call-arg]
    for refused in (config, five_stage, replace(config, data=padded)):
        with pytest.raises(ValueError, match=message):
            obstacles._check_elements(refused, 4)
    obstacles._check_elements(replace(five_stage, data=padded), 4)
    obstacles._check_elements(replace(preset("zoo-dlrm"), local_batch_size=1 << 20), 8)
