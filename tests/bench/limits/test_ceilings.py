"""The sizes of the work that is measured. That it can be measured, test_cli.py shows."""

from dataclasses import replace

import pytest
import torch

from dlrm_bench.bench.limits.ceilings import measure
from dlrm_bench.bench.presets import preset
from dlrm_bench.dlrm.dcnv2.work import table_work
from dlrm_bench.dlrm.runtime.ranks import Ranks


def test_sizes_of_the_mlperf_model() -> None:
    config = preset("mlperf-dcnv2")
    assert config.optimizer.tables.name == "adagrad"
    in_bf16, in_fp32 = (table_work(config, 1, size) for size in (2, 4))
    assert (in_bf16.ids, in_bf16.vectors) == (214, 26 * 128)
    assert in_bf16.lookup == 214 * (4 + 512) + 26 * 128 * 2
    assert in_fp32.update == 214 * (4 + 2048) + 26 * 128 * 4
    sgd = replace(config, optimizer=replace(config.optimizer, embedding="sgd"))
    assert table_work(sgd, 1, 4).update == 214 * (4 + 1024) + 26 * 128 * 4


def test_a_model_without_counted_work_is_refused_with_those_that_have_it() -> None:
    ranks = Ranks(rank=0, local_rank=0, world_size=1, local_world_size=1, device=torch.device("cpu"))
    with pytest.raises(
        ValueError, match="--preset zoo-deepfm: the work of DeepFM is not counted: choose one of smoke, "
    ):
        next(measure(preset("zoo-deepfm"), ranks))
