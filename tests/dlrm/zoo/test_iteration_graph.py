"""Cross-cutting: models' iterations in one graph: two EBCs, sequences of one length, jagged ones in padded batches."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.build import build_pipeline
from tests.dlrm.zoo.small import drawn, padded, small
from tests.pipeline.cpu_graphs import iteration_graph_on_cpu
from tests.pipeline.whole_state import ModelState, whole_state

STEPS = 24
EAGER = 3
REHEARSALS = 2
NAMES = ("zoo-two-towers", "zoo-sequence", "zoo-sequence-padded", "hstu-tiny")
WHOLE: dict[str, Any] = {"pinned_d2h": True, "trim_input_dist": True, "cuda_graph": "iteration"}


@dataclass
class Trained:
    losses: list[float]
    state: ModelState
    described: dict[str, Any]


def train(ranks: Ranks, name: str, pipeline: str, **changes: Any) -> Trained:
    torch.set_float32_matmul_precision("highest")
    config = padded(small(name, pipeline, **changes)) if pipeline == "five-stage" else small(name, pipeline)
    built: Any = build_pipeline(config, config.pipeline, ranks)
    prepared = map(built.prepare, drawn(config, ranks, STEPS))
    losses = [built.train_step(prepared).item() for _ in range(STEPS)]
    trained = Trained(losses, whole_state(built), built.describe())
    built.close()
    return trained


def train_both(ranks: Ranks) -> dict[str, tuple[Trained, Trained]]:
    if ranks.device.type == "cpu":
        iteration_graph_on_cpu()
    return {name: (train(ranks, name, "torchrec"), train(ranks, name, "five-stage", **WHOLE)) for name in NAMES}


@pytest.mark.parametrize("gpu", [False, pytest.param(True, marks=pytest.mark.multi_gpu)])
def test_whole_iterations_train_what_stock_trains(run_ranks: Callable[..., list[Any]], gpu: bool) -> None:
    for of_rank in run_ranks(2, train_both, gpu=gpu):
        for name, (stock, ours) in of_rank.items():
            graph = ours.described["iteration_graph"]
            several = name == "hstu-tiny"
            assert (graph.get("forms", 1) > 1) == several, name
            assert graph["replays"] == STEPS - EAGER - (graph["rehearsals"] if several else REHEARSALS), name
            assert graph["eager"] == {}, name
            assert "cuda_graph" not in ours.described["switched_off"], name
            losses = torch.tensor(ours.losses), torch.tensor(stock.losses)
            torch.testing.assert_close(*losses, rtol=1e-5 if gpu else 0, atol=0)
            for mine, theirs in (
                (ours.state.weights, stock.state.weights),
                (ours.state.optimizer, stock.state.optimizer),
            ):
                for key in theirs if not gpu else ():
                    assert torch.equal(mine[key], theirs[key]), (name, key)
