"""Cross-cutting: an evaluation is a forward pass alone, captured, without dropout, and keeps nothing for a backward
pass."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dlrm_bench.bench.config import PIPELINES
from dlrm_bench.bench.presets import preset
from dlrm_bench.dlrm.dlrmv4.config import Kernels
from dlrm_bench.dlrm.dlrmv4.data.generate import generate, smoke_config
from dlrm_bench.dlrm.dlrmv4.parts import open_data
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.build import build_pipeline
from dlrm_bench.pipeline.static_sequences.lane import EAGER
from tests.pipeline.cpu_graphs import capture_on_cpu

BATCHES = EAGER + 3


def counted(work: Callable[[], Any]) -> tuple[int, Any]:
    """Returns how many tensors autograd saved meanwhile, and the result of `work`."""
    saved = []

    def save(tensor: Tensor) -> Tensor:
        saved.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        result = work()
    return len(saved), result


def evaluate(ranks: Ranks, folder: Path, kernels: Kernels) -> dict[str, Any]:
    capture_on_cpu()
    config = preset("smoke-dlrmv4")
    assert min(config.model.input_dropout, config.model.layer_dropout) > 0
    config = replace(
        config,
        model=replace(config.model, kernels=kernels),
        data=replace(config.data, path=folder),
        local_batch_size=4,
        pipeline=PIPELINES["static"](cuda_graph="iteration"),
    )
    pipeline: Any = build_pipeline(config, config.pipeline, ranks)
    dataset = open_data(config)
    training = map(pipeline.prepare, dataset.train_batches(ranks.rank, ranks.world_size, 4))
    evaluation = dataset.eval_batches(ranks.rank, ranks.world_size, 4)[:BATCHES]

    def logits() -> Tensor:
        return torch.stack([of for of, _ in pipeline.evaluate(map(pipeline.prepare, evaluation))])

    before, _ = counted(lambda: pipeline.train_step(training))
    generator = torch.get_rng_state()
    saved, first = counted(logits)
    drawn = not torch.equal(torch.get_rng_state(), generator)
    again = logits()
    after, _ = counted(lambda: pipeline.train_step(training))
    space = pipeline._eval.space
    return {
        "saved": saved,
        "drawn": drawn,
        "equal": torch.equal(first, again),
        "different samples": len(first.flatten().unique()) > BATCHES,
        "training saves": before > 50 and after > 50,
        "captures": pipeline.describe()["cuda_graphs"]["evaluation"]["captures"],
        "gradients": space.gradients,
        "ids in order for an update": [slot.rows.exchanged.owned for slot in space.slots],
    }


@pytest.mark.parametrize("kernels", ["plain", "fused"])
def test_an_evaluation_keeps_and_draws_nothing(run_ranks: Any, tmp_path: Path, kernels: Kernels) -> None:
    generate(replace(smoke_config(tmp_path), users=200, days=3))
    for found in run_ranks(2, evaluate, tmp_path, kernels):
        captures = found.pop("captures")
        assert captures >= 1
        assert found == {
            "saved": 0,
            "drawn": False,
            "equal": True,
            "different samples": True,
            "training saves": True,
            "gradients": None,
            "ids in order for an update": [None, None],
        }
