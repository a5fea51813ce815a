"""Cross-cutting: DLRMv4 with weights that Adam rounds to bf16 trains to the bit what it trains with weights cast where
they are used; and no iteration casts a weight."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dlrm_bench.bench.config import RunConfig
from dlrm_bench.dlrm.dlrmv4.data.generate import generate, smoke_config
from dlrm_bench.dlrm.dlrmv4.network import DenseNetwork
from dlrm_bench.dlrm.dlrmv4.parts import open_data
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.build import build_pipeline
from tests.cases import GPU_PLACES
from tests.pipeline.cpu_graphs import capture_on_cpu, in_plain_function
from tests.pipeline.static_sequences.dlrmv4_runs import captured_smoke, resumed, steps
from tests.pipeline.whole_state import ModelState, whole_state

HALF, SAMPLES = 6, 8
CASES: dict[str, dict[str, Any]] = {
    "fused": {"kernels": "fused"},
    "fused, all tokens, recomputed, items": {
        "kernels": "fused",
        "last_layer": "all",
        "recompute_layers": True,
        "content": "items",
        "attention_scale": "maximum",
    },
    "plain": {},
    "plain, all tokens": {"last_layer": "all", "attention_scale": "maximum"},
    "e4m3": {"kernels": "fused", "fp8": True},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("days")
    generate(replace(smoke_config(folder), users=300, days=5))
    return folder


@dataclass(slots=True)
class Trained:
    losses: list[float]
    logits: Tensor
    """Of an evaluation at the end."""
    states: list[ModelState]
    """After half of the iterations, and after all."""
    resumed: list[float]
    """Losses of a run that resumed after half of the iterations."""


class Casts(TorchDispatchMode):
    """Counts casts of tensors in certain memory."""

    def __init__(self, memory: Tensor) -> None:
        super().__init__()
        self._memory, self.count = memory.untyped_storage().data_ptr(), 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operator is torch.ops.aten._to_copy.default and not in_plain_function():  # GPUs run kernels in their place
            self.count += args[0].untyped_storage().data_ptr() == self._memory
        return operator(*args, **(kwargs or {}))


def train(ranks: Ranks, config: RunConfig) -> Trained:
    pipeline: Any = build_pipeline(config, config.pipeline, ranks)
    pipeline.warm_up(evaluates=True)
    dataset = open_data(config)
    batches = dataset.train_batches(ranks.rank, ranks.world_size, SAMPLES)
    chosen = [batches[17 * i % len(batches)] for i in range(2 * HALF)]
    prepared = map(pipeline.prepare, chosen)
    losses, states = steps(pipeline, config, prepared, 0, HALF), [whole_state(pipeline)]
    later = resumed(pipeline, config, ranks, HALF)
    again = steps(later, config, map(later.prepare, chosen[HALF:]), HALF, 2 * HALF)
    losses += steps(pipeline, config, prepared, HALF, 2 * HALF)
    states.append(whole_state(pipeline))
    evaluation = dataset.eval_batches(ranks.rank, ranks.world_size, SAMPLES)
    logits = [of for of, _ in pipeline.evaluate(map(pipeline.prepare, [evaluation[i] for i in range(2)]))]
    for each in (pipeline, later):
        each.close()
    return Trained(losses, torch.cat(logits).cpu(), states, again)


def train_both(ranks: Ranks, folder: Path, case: str) -> tuple[Trained, Trained, list[int]]:
    """Returns what trains with weights that Adam rounds, and with casts, and the numbers of parameters in bf16."""
    if ranks.device.type == "cpu":
        capture_on_cpu()
    config, found, numbers = captured_smoke(folder, SAMPLES, ramp_steps=4, **CASES[case]), [], []
    rounded_weights = DenseNetwork.rounded_weights

    def noted(network: DenseNetwork, factors: bool) -> list[str]:
        names = rounded_weights(network, factors)
        numbers.append(len(names))
        assert names == list(dict.fromkeys(names))
        return names

    for names_of in (noted, lambda *_, **__: []):
        with patch.object(DenseNetwork, "rounded_weights", names_of):
            found.append(train(ranks, config))
    return found[0], found[1], numbers


PLACES = [
    *((1, False, case) for case in CASES),
    (2, False, "fused"),
    *(pytest.param(*place.values, "fused", marks=place.marks) for place in GPU_PLACES),
]


@pytest.mark.parametrize(("world_size", "gpu", "case"), PLACES)
def test_trains_to_the_bit_what_casts_train(
    run_ranks: Callable[..., list[Any]], folder: Path, world_size: int, gpu: bool, case: str
) -> None:
    for ours, casting, numbers in run_ranks(world_size, train_both, folder, case, gpu=gpu):
        of_layers = {"fp8": 0, "longest": 1, "maximum": 2}
        kind = "fp8" if CASES[case].get("fp8") else CASES[case].get("attention_scale", "longest")
        assert set(numbers) == {2 + 3 * 4 + 2 + 2 * of_layers[kind]}, (
            "context, three MLPs, the candidates' product, layers"
        )
        assert ours.losses == casting.losses
        assert ours.losses[HALF:] == ours.resumed
        assert torch.equal(ours.logits, casting.logits)
        for one, other in zip(ours.states, casting.states, strict=True):
            for mine, theirs in ((one.weights, other.weights), (one.optimizer, other.optimizer)):
                assert mine.keys() == theirs.keys()
                assert all(of.dtype == torch.float32 and torch.equal(of, theirs[key]) for key, of in mine.items())


def casts_of(ranks: Ranks, folder: Path) -> list[int]:
    """Returns the numbers of casts of weights in an iteration, fp32 and bf16 ones, after a few iterations."""
    capture_on_cpu()
    config = captured_smoke(folder, SAMPLES, ramp_steps=4, kernels="fused")
    pipeline: Any = build_pipeline(config, config.pipeline, ranks)
    batches = open_data(config).train_batches(ranks.rank, ranks.world_size, SAMPLES)
    prepared = map(pipeline.prepare, (batches[i] for i in range(4)))
    for _ in range(2):
        pipeline.train_step(prepared)
    bucket = pipeline.dense.bucket
    with Casts(bucket.weights) as exact, Casts(bucket.parameters["layers.0.output_weight"].detach()) as rounded:
        pipeline.train_step(prepared)
    return [exact.count, rounded.count]


def test_no_iteration_casts_a_weight(run_ranks: Callable[..., list[Any]], folder: Path) -> None:
    """Norms round their weights themselves, and a factor multiplies a projection's as it rounds them."""
    assert run_ranks(1, casts_of, folder) == [[0, 0]]
