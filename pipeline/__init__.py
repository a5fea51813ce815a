"""The stages of an iteration in time: the stock TorchRec pipeline, and those that replace it."""

import torch

from dlrm.config import RunConfig
from dlrm.ranks import Ranks
from pipeline.graphs import require_gpu
from pipeline.interface import Pipeline
from pipeline.static import StaticPipeline
from pipeline.torchrec_five_stage import TorchRecFiveStagePipeline
from pipeline.torchrec_stock import StockPipeline, check_schedule


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
