"""The stages of an iteration in time: the stock TorchRec pipeline, and those that replace it."""

from dlrm.config import RunConfig
from dlrm.ranks import Ranks
from pipeline.interface import Pipeline
from pipeline.static import StaticPipeline
from pipeline.torchrec_five_stage import TorchRecFiveStagePipeline
from pipeline.torchrec_stock import StockPipeline


def build_pipeline(config: RunConfig, ranks: Ranks) -> Pipeline:
    """The pipeline that `config` names. Collective over all ranks."""
    if config.ebc == "static":
        return StaticPipeline(config, ranks)
    if config.pipeline_name == "five-stage":
        return TorchRecFiveStagePipeline(config, ranks)
    return StockPipeline(config, ranks)
