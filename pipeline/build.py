"""Builds the pipeline whose options a configuration holds."""

from dlrm_bench.dlrm.config import TrainingConfig
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.interface import Options, Pipeline
from dlrm_bench.pipeline.static.options import StaticOptions
from dlrm_bench.pipeline.static.pipeline import StaticPipeline
from dlrm_bench.pipeline.torchrec.five_stage import TorchRecFiveStagePipeline
from dlrm_bench.pipeline.torchrec.options import FiveStageSwitches, TorchRecOptions
from dlrm_bench.pipeline.torchrec.stock import StockPipeline


def build_pipeline(config: TrainingConfig, options: Options, ranks: Ranks) -> Pipeline:
    """Returns the pipeline of these options, ready to train what `config` says. Collective over all ranks."""
    if isinstance(options, StaticOptions):
        return StaticPipeline(config, options, ranks)
    if isinstance(options, FiveStageSwitches):
        return TorchRecFiveStagePipeline(config, options, ranks)
    assert isinstance(options, TorchRecOptions)
    return StockPipeline(config, options, ranks)
