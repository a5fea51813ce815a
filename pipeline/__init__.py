"""The stages of an iteration in time: the stock TorchRec pipeline, and those that replace it."""

from dlrm.config import RunConfig
from dlrm.ranks import Ranks
from pipeline.interface import Pipeline
from pipeline.torchrec_stock import StockPipeline


def build_pipeline(config: RunConfig, ranks: Ranks) -> Pipeline:
    """The pipeline that `config.pipeline` names. Collective over all ranks."""
    return StockPipeline(config, ranks)
