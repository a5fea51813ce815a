"""Run configurations and pipelines for tests, whose options are named beside the fields of the run."""

from dataclasses import fields, replace
from typing import Any, cast

from dlrm_bench.bench.config import PIPELINES, PipelineOptions, RunConfig
from dlrm_bench.dlrm.dcnv2.config import OptimizerConfig
from dlrm_bench.dlrm.dcnv2.explicit_dense import ExplicitDense
from dlrm_bench.dlrm.dcnv2.static_stage import DcnStage
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.build import build_pipeline
from dlrm_bench.pipeline.static.pipeline import StaticPipeline
from dlrm_bench.pipeline.torchrec.stock import StockPipeline

_OF_RUN = {field.name for field in fields(RunConfig)}


def run_config(pipeline: str = "torchrec", **changes: Any) -> RunConfig:
    """The configuration with these fields, of the run or of the pipeline's options."""
    options, of_run = _split({"benchmark": "dlrm_dcnv2", "optimizer": OptimizerConfig()} | changes)
    return RunConfig(pipeline=PIPELINES[pipeline](**options), **of_run)


def changed(config: RunConfig, pipeline: str | None = None, **changes: Any) -> RunConfig:
    """`config` with other fields, of the run or its pipeline; another pipeline starts from its defaults."""
    options, of_run = _split(changes)
    chosen: PipelineOptions = config.pipeline if pipeline is None else PIPELINES[pipeline]()
    return replace(config, pipeline=replace(chosen, **options), **of_run)


def static_pipeline(config: RunConfig, ranks: Ranks) -> StaticPipeline:
    """The static pipeline of a configuration that has its options."""
    return cast(StaticPipeline, build_pipeline(config, config.pipeline, ranks))


def dense_of(pipeline: StaticPipeline) -> ExplicitDense:
    """The dense network of DLRM-DCNv2's stage 3."""
    return cast(DcnStage, pipeline.dense).dense


def stock_pipeline(config: RunConfig, ranks: Ranks) -> StockPipeline:
    """TorchRec's pipeline of a configuration that has its options."""
    return cast(StockPipeline, build_pipeline(config, config.pipeline, ranks))


def _split(changes: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    of_run = {name: value for name, value in changes.items() if name in _OF_RUN}
    return {name: value for name, value in changes.items() if name not in _OF_RUN}, of_run
