"""Cross-cutting: trainings of one seed give equal bits on GPUs, at MLPerf's widths, whose kernels small models miss."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dlrm_bench.bench.config import RunConfig
from dlrm_bench.dlrm.dcnv2.config import DataConfig, OptimizerConfig
from dlrm_bench.dlrm.dcnv2.presets import MLPERF_MODEL
from dlrm_bench.dlrm.runtime.ranks import Ranks
from tests.cases import GPU_PLACES
from tests.pipeline.static.test_pipeline import batches_of
from tests.pipelines import dense_of, run_config, static_pipeline

STEPS = 8
ONE_PART, TWO_PARTS = 512, 6912
"""Samples a GPU."""


def config_of(batch_size: int, warms_up: bool) -> tuple[RunConfig, bool]:
    config = run_config(
        "static",
        preset="test",
        model=replace(MLPERF_MODEL, table_scale=0.002),
        data=DataConfig(source="random", random_batches=STEPS + 3),
        optimizer=OptimizerConfig(learning_rate=0.004),
        iterations=STEPS,
        warmup_iterations=0,
        precision="bf16",
        local_batch_size=batch_size,
        cuda_graph="iteration",
        overlap=True,
        presort_ids=True,
        peer_memory=True,
    )
    return config, warms_up


@dataclass(slots=True)
class Trained:
    losses: list[float]
    tensors: dict[str, Tensor]
    """Weights and states that this rank has, on the CPU."""


def train(ranks: Ranks, config: RunConfig, warms_up: bool) -> Trained:
    pipeline = static_pipeline(config, ranks)
    if warms_up:
        pipeline.warm_up(evaluates=False)
    batches = iter(batches_of(config, ranks.rank, ranks.world_size, pin=ranks.device.type == "cuda"))
    losses = [pipeline.train_step(batches) for _ in range(STEPS)]
    tensors = {}
    for number, part in enumerate(pipeline.ebc.table_shards()):
        tensors |= {f"table part {number}": part.weights.cpu(), f"state of table part {number}": part.state.cpu()}
    for kind in ("master", "state"):
        tensors |= {f"{kind} of {name}": value.cpu() for name, value in dense_of(pipeline).state_dict(kind).items()}
    result = Trained([loss.item() for loss in losses], tensors)
    pipeline.close()
    return result


def differences(ranks: Ranks, config: RunConfig, warms_up: bool) -> list[str]:
    """Returns the tensors that differ between trainings, each with the number of elements."""
    first, *others = (train(ranks, config, warms_up) for _ in range(4))
    found = []
    for again in others:
        if again.losses != first.losses:
            found.append(f"losses {first.losses} and {again.losses}")
        unequal = ((name, (tensor != again.tensors[name]).sum().item()) for name, tensor in first.tensors.items())
        found += [f"{name}: {count} elements" for name, count in unequal if count]
    torch.cuda.synchronize()
    return found


@pytest.mark.parametrize("batch_size", [ONE_PART, TWO_PARTS])
@pytest.mark.parametrize("warms_up", [False, True])
@pytest.mark.parametrize(("world_size", "gpu"), GPU_PLACES)
def test_equal_seeds_give_equal_bits(
    run_ranks: Callable[..., list[Any]], world_size: int, gpu: bool, warms_up: bool, batch_size: int
) -> None:
    for found in run_ranks(world_size, differences, *config_of(batch_size, warms_up), gpu=gpu):
        assert found == []
