"""What TorchRec's DLRM cannot be built with is named by its flag."""

from dataclasses import replace

import pytest
import torch

from dlrm_bench.bench.presets import preset
from dlrm_bench.dlrm.dcnv2.torchrec import torchrec_model
from dlrm_bench.dlrm.runtime.ranks import Ranks

RANK = Ranks(rank=0, local_rank=0, world_size=1, local_world_size=1, device=torch.device("cpu"))


def test_a_top_mlp_of_one_layer_is_refused() -> None:
    smoke = preset("smoke")
    config = replace(smoke, model=replace(smoke.model, top_mlp=(1,)))
    with pytest.raises(ValueError, match=r"--model.top-mlp 1: TorchRec's DLRM needs at least two layers: add one"):
        torchrec_model(config, RANK)
