"""Evaluation goes through its batches in order, whenever it starts or stops, and gathers dense weights once."""

from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor

from dlrm_bench.dlrm.dense.buckets import CollectiveBucket
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.static.pipeline import StaticPipeline
from tests.cases import PLACES
from tests.pipeline.cpu_graphs import capture_on_cpu
from tests.pipeline.small_runs import BATCHES, batches_of, equal_states, small
from tests.pipeline.whole_state import whole_state
from tests.pipelines import static_pipeline

HELD_OUT = 7


def logits(evaluated: StaticPipeline, ranks: Ranks, count: int = HELD_OUT) -> Tensor:
    """Returns the logits of the first batches; checks their labels."""
    config = evaluated._config
    pairs = list(evaluated.evaluate(batches_of(config, ranks, count)))
    expected = batches_of(config, ranks, count)
    assert all(torch.equal(labels.cpu(), batch.labels) for (_, labels), batch in zip(pairs, expected, strict=True))
    return torch.stack([values for values, _ in pairs]) if pairs else torch.empty(0)


def evaluate(ranks: Ranks) -> None:
    torch.set_float32_matmul_precision("highest")
    if ranks.device.type != "cuda":
        capture_on_cpu()
    presorted = {"presort_ids": True}
    for changes in ({}, presorted, presorted | {"peer_memory": True}):
        never = static_pipeline(small(**changes), ranks)
        eager = static_pipeline(small(**changes), ranks)
        graph = static_pipeline(small(**changes, cuda_graph="iteration", overlap=True), ranks)
        # One batch after the other, none of them ahead.
        alone = [next(never.evaluate(iter([batch])))[0] for batch in batches_of(never._config, ranks, HELD_OUT)]
        never = static_pipeline(small(**changes), ranks)
        training = {id(p): batches_of(p._config, ranks) for p in (never, eager, graph)}
        for pipeline in (eager, graph):
            # Before the first step; then an evaluation that ends early, and one of nothing.
            assert torch.equal(logits(pipeline, ranks), torch.stack(alone))
            assert len(list(islice(pipeline.evaluate(batches_of(pipeline._config, ranks, HELD_OUT)), 2))) == 2
            assert logits(pipeline, ranks, 0).numel() == 0
            assert torch.equal(logits(pipeline, ranks), torch.stack(alone))
        for step in range(BATCHES):
            losses = [p.train_step(training[id(p)]) for p in (never, eager, graph)]
            assert losses[0] == losses[1] == losses[2]
            if step % 5 == 3:
                assert torch.equal(logits(graph, ranks, 3), logits(eager, ranks, 3))
        assert not torch.equal(logits(eager, ranks), torch.stack(alone))
        states = [whole_state(p) for p in (never, eager, graph)]
        assert equal_states(states[0], states[1])
        assert equal_states(states[0], states[2])
        captures = {name: graphs["captures"] for name, graphs in graph.describe()["cuda_graphs"].items()}
        assert captures == {"iteration": 1, "evaluation": 1}
        graph.close()


@pytest.mark.parametrize(("world_size", "gpu"), PLACES)
def test_evaluation_at_any_time(run_ranks: Callable[..., list[Any]], world_size: int, gpu: bool) -> None:
    run_ranks(world_size, evaluate, gpu=gpu)


def count_gathers(ranks: Ranks) -> int:
    evaluated, count = static_pipeline(small(), ranks), 0
    gather = CollectiveBucket.all_gather

    def counting(self: CollectiveBucket) -> None:
        nonlocal count
        count += 1
        gather(self)

    CollectiveBucket.all_gather = counting  # type: ignore[method-assign]
    logits(evaluated, ranks)
    return count


def test_dense_weights_are_gathered_once(run_ranks: Callable[..., list[Any]]) -> None:
    """Once for the cross network and the top MLP."""
    assert run_ranks(1, count_gathers) == [2]
