"""Builds the pipeline that the configuration's options select."""

from typing import Any, Protocol, cast

from dlrm_bench.dlrm.benchmarks import named
from dlrm_bench.dlrm.config import TrainingConfig
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.interface import Options, Pipeline
from dlrm_bench.pipeline.static.options import StaticOptions
from dlrm_bench.pipeline.torchrec.options import FiveStageSwitches, TorchRecModelOptions


class OfBenchmark(Protocol):
    """A configuration that names its benchmark, in addition to its training."""

    @property
    def benchmark(self) -> str:
        """Name of the benchmark."""
        ...


def pipeline_class(config: OfBenchmark, options: Options) -> Any:
    """Returns the pipeline class for these options. Imports only that class: static pipelines start without TorchRec,
    whose import takes seconds. ModuleNotFoundError if a package is missing."""
    if isinstance(options, StaticOptions) and cast(TrainingConfig, config).model.tables.pooled:
        from dlrm_bench.pipeline.static.pipeline import StaticPipeline

        return StaticPipeline
    if isinstance(options, StaticOptions):
        from dlrm_bench.pipeline.static_sequences.pipeline import StaticSequencesPipeline

        return StaticSequencesPipeline
    if isinstance(options, FiveStageSwitches):
        from dlrm_bench.pipeline.torchrec.five_stage import TorchRecFiveStagePipeline

        return TorchRecFiveStagePipeline
    from dlrm_bench.pipeline.torchrec.stock import StockPipeline

    return StockPipeline


def build_pipeline(config: OfBenchmark, options: Options, ranks: Ranks) -> Pipeline:
    """Returns the pipeline for these options, ready to train `config`, which is also a TrainingConfig. Collective over
    all ranks."""
    training, of_class = cast(TrainingConfig, config), pipeline_class(config, options)
    parts = named(config.benchmark).parts()
    if isinstance(options, StaticOptions):
        return cast(Pipeline, of_class(training, options, ranks, parts))
    assert isinstance(options, TorchRecModelOptions)
    return cast(Pipeline, of_class(training, parts.torchrec_model(training, ranks), options, ranks))
