"""Builds the pipeline that a configuration names."""

import torch

from dlrm_bench.dlrm.config import RunConfig
from dlrm_bench.dlrm.ranks import Ranks
from dlrm_bench.pipeline.interface import Pipeline
from dlrm_bench.pipeline.static.graphs import require_gpu
from dlrm_bench.pipeline.static.pipeline import StaticPipeline
from dlrm_bench.pipeline.torchrec.five_stage import TorchRecFiveStagePipeline
from dlrm_bench.pipeline.torchrec.stock import StockPipeline, check_schedule


def check_device(config: RunConfig, device: torch.device) -> None:
    """ValueError for a pipeline that needs a GPU where there is none, as from `build_pipeline`; makes nothing."""
    if config.cuda_graph == "iteration":
        require_gpu(device)
    check_schedule(config, device)


def build_pipeline(config: RunConfig, ranks: Ranks) -> Pipeline:
    """The pipeline that `config` names. Collective over all ranks."""
    if config.ebc == "static":
        return StaticPipeline(config, ranks)
    if config.pipeline_name == "five-stage":
        return TorchRecFiveStagePipeline(config, ranks)
    return StockPipeline(config, ranks)
