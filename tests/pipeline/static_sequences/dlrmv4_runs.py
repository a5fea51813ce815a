"""Short runs of DLRMv4's static pipeline in bf16."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from dlrm_bench.bench.config import PIPELINES, RunConfig
from dlrm_bench.bench.presets import preset
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.build import build_pipeline
from tests.pipeline.whole_state import load_whole_state, whole_state


def captured_smoke(folder: Path, samples: int, ramp_steps: int, fp8: bool = False, **model: Any) -> RunConfig:
    """The smoke preset in bf16, captured, with a rate at which a few iterations change it much. samples: a rank's."""
    config = preset("smoke-dlrmv4")
    return replace(
        config,
        model=replace(config.model, **model),
        data=replace(config.data, path=folder),
        optimizer=replace(config.optimizer, learning_rate=1e-2, ramp_steps=ramp_steps),
        local_batch_size=samples,
        precision="bf16",
        pipeline=PIPELINES["static"](fp8=fp8, cuda_graph="iteration", overlap=True),
    )


def steps(pipeline: Any, config: RunConfig, prepared: Iterator[Any], first: int, last: int) -> list[float]:
    """Trains from one iteration to another; returns the losses."""
    losses = []
    for iteration in range(first, last):
        pipeline.set_learning_rate(config.optimizer.rate(iteration + 1))
        losses.append(pipeline.train_step(prepared).item())
    return losses


def resumed(pipeline: Any, config: RunConfig, ranks: Ranks, iterations: int) -> Any:
    """Returns another pipeline in the state of one that has trained so many iterations."""
    later: Any = build_pipeline(config, config.pipeline, ranks)
    load_whole_state(later, whole_state(pipeline))
    later.go_on_after(iterations, pipeline.capacities())
    later.warm_up(evaluates=False)
    return later
