"""Cross-cutting: DLRMv4 with --fp8 learns what it learns in bf16, resumes to the bit, counts, and stops at what is not
finite."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dlrm_bench.bench.config import RunConfig
from dlrm_bench.dlrm.dlrmv4.data.generate import generate, smoke_config
from dlrm_bench.dlrm.dlrmv4.parts import open_data
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.kernels._cuda import available
from dlrm_bench.kernels.dense import fp8
from dlrm_bench.pipeline.build import build_pipeline
from tests.cases import GPU_PLACES
from tests.pipeline.cpu_graphs import capture_on_cpu
from tests.pipeline.static_sequences.dlrmv4_runs import captured_smoke, resumed, steps

STEPS, HALF, SAMPLES = 50, 25, 16
PLACES = [
    (1, False),
    *(
        pytest.param(*place.values, marks=[*place.marks, pytest.mark.skipif(not available(), reason="needs Hopper")])
        for place in GPU_PLACES
    ),
]


@dataclass(slots=True)
class Trained:
    losses: list[float]
    logits: Tensor
    """Of an evaluation at the end."""
    resumed: list[float] | None
    """Losses of a run that resumed after half of the iterations."""
    described: dict[str, Any]
    lost: tuple[list[int], bool]
    """After a number that is not finite: the counts of the first normed tokens, and whether no weight changed."""


def train(ranks: Ranks, config: RunConfig) -> Trained:
    if ranks.device.type == "cpu":
        capture_on_cpu()
    pipeline: Any = build_pipeline(config, config.pipeline, ranks)
    pipeline.warm_up(evaluates=True)
    dataset = open_data(config)
    batches = dataset.train_batches(ranks.rank, ranks.world_size, SAMPLES)
    prepared = map(pipeline.prepare, (batches[7 * step % len(batches)] for step in range(2 * STEPS)))
    losses = steps(pipeline, config, prepared, 0, HALF)
    again = None
    if config.pipeline.fp8:
        later = resumed(pipeline, config, ranks, HALF)
        rest = map(later.prepare, (batches[7 * step % len(batches)] for step in range(HALF, 2 * STEPS)))
        again = steps(later, config, rest, HALF, STEPS)
        later.close()
    losses += steps(pipeline, config, prepared, HALF, STEPS)
    evaluation = dataset.eval_batches(ranks.rank, ranks.world_size, SAMPLES)[:8]
    logits = torch.cat([of for of, _ in pipeline.evaluate(map(pipeline.prepare, evaluation))]).cpu()
    described, lost = pipeline.describe(), ([], True)
    if config.pipeline.fp8:
        with torch.no_grad():
            pipeline.dense.network.layers[0].norm_bias[3] = torch.inf
        before = [weight.clone() for weight in pipeline.dense.weights().values()]
        steps(pipeline, config, prepared, STEPS, STEPS + 2)
        weights = [weight[weight.isfinite()] for weight in pipeline.dense.weights().values()]
        same = all(map(torch.equal, weights, (weight[weight.isfinite()] for weight in before)))
        lost = pipeline.tallies().of("layers.0.normed").tolist(), same
    pipeline.close()
    return Trained(losses, logits, again, described, lost)


def train_both(ranks: Ranks, folder: Path, recompute: bool) -> tuple[Trained, Trained]:
    model = {"kernels": "fused", "recompute_layers": recompute}
    configs = (captured_smoke(folder, SAMPLES, ramp_steps=10, fp8=fp8, **model) for fp8 in (False, True))
    in_bf16, in_fp8 = (train(ranks, config) for config in configs)
    return in_bf16, in_fp8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("days")
    generate(replace(smoke_config(folder), users=600, days=6))
    return folder


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(("world_size", "gpu"), PLACES)
def test_learns_as_in_bf16(
    run_ranks: Callable[..., list[Any]], folder: Path, world_size: int, gpu: bool, recompute: bool
) -> None:
    for bf16, ours in run_ranks(world_size, train_both, folder, recompute, gpu=gpu):
        theirs, found = torch.tensor(bf16.losses), torch.tensor(ours.losses)
        assert not torch.equal(theirs, found), "e4m3 must have been used"
        torch.testing.assert_close(found, theirs, rtol=0, atol=8e-3)
        both = torch.stack([bf16.logits, ours.logits])
        assert float(both[0].std()) > 0.05, "it must have learned something"
        assert float(torch.corrcoef(both)[0, 1]) > 0.99, torch.corrcoef(both)
        assert ours.losses[HALF:] == ours.resumed
        assert "too_large_for_eight_bits" not in bf16.described
        assert ours.described["too_large_for_eight_bits"] == {}
        counts, same = ours.lost
        assert counts[1] > 0
        assert same


@pytest.mark.gpu
@pytest.mark.skipif(available(), reason="needs a GPU other than Hopper's")
def test_another_gpu_is_refused() -> None:
    with pytest.raises(ValueError, match=r"--fp8 needs a Hopper GPU .*: leave --fp8 out"):
        fp8.require_products(torch.device("cuda"))
