"""Builds the pipeline whose options a configuration holds."""

from typing import Protocol, cast

from dlrm_bench.dlrm.benchmarks import named
from dlrm_bench.dlrm.config import TrainingConfig
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.interface import Options, Pipeline
from dlrm_bench.pipeline.static.options import StaticOptions
from dlrm_bench.pipeline.static.pipeline import StaticPipeline
from dlrm_bench.pipeline.static_sequences.pipeline import StaticSequencesPipeline
from dlrm_bench.pipeline.torchrec.five_stage import TorchRecFiveStagePipeline
from dlrm_bench.pipeline.torchrec.options import FiveStageSwitches, TorchRecOptions
from dlrm_bench.pipeline.torchrec.stock import StockPipeline


class OfBenchmark(Protocol):
    """The names of a benchmark, beside its training."""

    @property
    def benchmark(self) -> str:
        """Its name."""
        ...


def build_pipeline(config: OfBenchmark, options: Options, ranks: Ranks) -> Pipeline:
    """Returns the pipeline of these options, ready to train `config`, also a TrainingConfig. Collective over all
    ranks."""
    training = cast(TrainingConfig, config)
    if isinstance(options, StaticOptions):
        static = StaticPipeline if training.model.tables.pooled else StaticSequencesPipeline
        return static(training, options, ranks, named(config.benchmark).parts())
    of_benchmark = named(config.benchmark).parts().torchrec_model(training, ranks)
    if isinstance(options, FiveStageSwitches):
        return TorchRecFiveStagePipeline(training, of_benchmark, options, ranks)
    assert isinstance(options, TorchRecOptions)
    return StockPipeline(training, of_benchmark, options, ranks)
