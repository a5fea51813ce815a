"""Builds the pipeline whose options a configuration holds."""

from typing import Protocol, cast

from dlrm_bench.dlrm.benchmarks import named
from dlrm_bench.dlrm.config import TrainingConfig
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.interface import Options, Pipeline
from dlrm_bench.pipeline.static.options import StaticOptions
from dlrm_bench.pipeline.torchrec.options import FiveStageSwitches, TorchRecOptions


class OfBenchmark(Protocol):
    """The names of a benchmark, beside its training."""

    @property
    def benchmark(self) -> str:
        """Its name."""
        ...


def build_pipeline(config: OfBenchmark, options: Options, ranks: Ranks) -> Pipeline:
    """Returns the pipeline of these options, ready to train `config`, also a TrainingConfig. Collective over all
    ranks."""
    # Each pipeline is imported where it is asked for: static ones start without TorchRec, whose import takes seconds.
    training = cast(TrainingConfig, config)
    if isinstance(options, StaticOptions) and training.model.tables.pooled:
        from dlrm_bench.pipeline.static.pipeline import StaticPipeline

        return StaticPipeline(training, options, ranks, named(config.benchmark).parts())
    if isinstance(options, StaticOptions):
        from dlrm_bench.pipeline.static_sequences.pipeline import StaticSequencesPipeline

        return StaticSequencesPipeline(training, options, ranks, named(config.benchmark).parts())
    of_benchmark = named(config.benchmark).parts().torchrec_model(training, ranks)
    if isinstance(options, FiveStageSwitches):
        from dlrm_bench.pipeline.torchrec.five_stage import TorchRecFiveStagePipeline

        return TorchRecFiveStagePipeline(training, of_benchmark, options, ranks)
    assert isinstance(options, TorchRecOptions)
    from dlrm_bench.pipeline.torchrec.stock import StockPipeline

    return StockPipeline(training, of_benchmark, options, ranks)
