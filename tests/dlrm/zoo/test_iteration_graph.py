"""Cross-cutting: models' iterations in one graph: two EBCs, sequences of one length, jagged ones in padded batches."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.build import build_pipeline
from tests.dlrm.zoo.small import drawn, padded, small
from tests.pipeline.cpu_graphs import iteration_graph_on_cpu
from tests.pipeline.five_stage.peers.memory_on_cpu import peer_memory_on_cpu
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


def assert_equal(ours: ModelState, theirs: ModelState, name: str) -> None:
    for mine, other in ((ours.weights, theirs.weights), (ours.optimizer, theirs.optimizer)):
        assert mine.keys() == other.keys(), name
        for key in other:
            assert torch.equal(mine[key], other[key]), (name, key)


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
            if not gpu:
                assert_equal(ours.state, stock.state, name)


def through_peers(ranks: Ranks, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """With the harness's loss guard, which has a collective of its own in the model, as `--rungs exchange` compares."""
    if ranks.device.type == "cpu":
        iteration_graph_on_cpu()
        peer_memory_on_cpu()
    described = {}
    for name in names:
        switches = WHOLE | {"graph_dists": True}
        by_nccl, ours = (train(ranks, name, "five-stage", **switches, peer_memory=peers) for peers in (False, True))
        if ranks.device.type == "cpu" or name != "zoo-sequence":  # whose attention adds in any order on a GPU
            assert ours.losses == by_nccl.losses, name
            assert_equal(ours.state, by_nccl.state, name)
        assert "peer_memory" not in ours.described["switched_off"], name
        described[name] = ours.described["iteration_graph"]
        assert described[name]["replays"] == by_nccl.described["iteration_graph"]["replays"] > 0, name
    return described


@pytest.mark.parametrize("gpu", [False, pytest.param(True, marks=pytest.mark.multi_gpu)])
def test_peer_memory_trains_what_collectives_train(run_ranks: Callable[..., list[Any]], gpu: bool) -> None:
    for of_rank in run_ranks(2, through_peers, ("zoo-dlrm", "zoo-deepfm", "zoo-two-towers", "zoo-sequence"), gpu=gpu):
        for name, described in of_rank.items():
            peers = described["peer_memory"]
            assert peers["by_nccl"] == {}, name
            ways = [of for of in peers["through"] if "vectors of" in of]
            assert len(ways) == (4 if name in ("zoo-two-towers", "zoo-sequence") else 2), name
