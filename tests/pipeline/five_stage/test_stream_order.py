"""Cross-cutting: on streams of a GPU nothing of an iteration would be read, written or freed before others are done."""

import signal
from collections.abc import Callable
from dataclasses import fields
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor

import dlrm_bench.pipeline.five_stage.gradients
import dlrm_bench.pipeline.five_stage.pipeline
import dlrm_bench.pipeline.five_stage.trimmed.capacity_dist
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.five_stage import reasons
from dlrm_bench.pipeline.five_stage.pipeline import FiveStagePipeline
from dlrm_bench.pipeline.five_stage.trimmed.sharder import TrimmedEBCSharder
from tests.pipeline.cpu_graphs import Checked, iteration_graph_on_cpu
from tests.pipeline.five_stage.any_models import AnyBatch, build
from tests.pipeline.five_stage.logical_streams import LogicalStreams, Order
from tests.pipeline.five_stage.test_iteration_forms import BAGS, CHANGING, SHARDERS, WHOLE, data_of, mixed
from tests.pipeline.five_stage.test_iteration_habits import Several, sgd

FEW = 8


def copied(batch: AnyBatch, **_: Any) -> AnyBatch:
    """A copy in memory of its own, as on a device."""

    def copy(of: Any) -> Any:
        if not isinstance(of, KeyedJaggedTensor):
            return of.clone()
        weights = of.weights_or_none()
        return KeyedJaggedTensor(
            list(of.keys()),
            of.values().clone(),
            weights=None if weights is None else weights.clone(),
            lengths=of.lengths().clone(),
            stride=of.stride(),
        )

    return AnyBatch(**{field.name: copy(getattr(batch, field.name)) for field in fields(batch)})


def train(ranks: Ranks, order: Order, count: int) -> dict[str, Any]:
    """Batches of several forms, some of which have more ids than room; every fifth one is evaluated."""
    sharders = SHARDERS | {EmbeddingBagCollection: TrimmedEBCSharder(BAGS, row_capacity=1.0)}
    model, optimizer = build(ranks, Several, mixed, sgd, sharders)
    data = iter(data_of(ranks, CHANGING[:count]))
    streams: Any = lambda device, records: LogicalStreams(order)  # noqa: E731
    with (
        patch.object(dlrm_bench.pipeline.five_stage.pipeline, "StageStreams", streams),
        patch.object(dlrm_bench.pipeline.five_stage.trimmed.capacity_dist, "OVERFLOWS", 0.9),
        patch.object(dlrm_bench.pipeline.five_stage.gradients, "_BUCKET", 256),  # several buckets
        patch.object(AnyBatch, "to", copied),
        FiveStagePipeline(model, optimizer, ranks.device, WHOLE) as pipeline,
    ):
        for step in range(count):
            model.train(step % 5 != 4)
            with order:
                pipeline.progress(data)
        return pipeline.describe()


def unordered(ranks: Ranks) -> tuple[dict[str, int], dict[str, int], dict[str, Any]]:
    """What is found, first where side streams wait for nothing of the caller's."""
    signal.alarm(600)
    iteration_graph_on_cpu()
    found, described, replay = [], {}, Checked.replay
    for waits, count in ((False, FEW), (True, len(CHANGING))):
        order = Order()
        order.waits = waits

        def in_graph(graph: Checked, order: Order = order) -> None:
            with order.replay():
                replay(graph)

        with patch.object(Checked, "replay", in_graph):
            described = train(ranks, order, count)
        found.append(dict(order.found))
    return found[0], found[1], described


@pytest.mark.slow
def test_all_accesses_are_ordered(run_ranks: Callable[..., Any]) -> None:
    for without_waits, found, described in run_ranks(2, unordered):
        assert any(said.startswith("copy: ") for said in without_waits)
        assert found == {}
        assert described["replays"] > 15
        assert described["captures"] > 4
        assert described["eager"].keys() == {reasons.OVERFLOW()}


def test_unordered_accesses_are_found() -> None:
    order = Order()
    with order:
        made = torch.zeros(4)
        with order.on("side"):
            made.add_(1)  # after nothing
        order.wait(order.times("side"))
        made.add_(1)
        with order.on("side"):
            made.sum()  # after nothing
        del made
        torch.zeros(3)  # may be the same memory
    written, read, freed = order.found
    assert written.startswith("side: aten.add_.Tensor in elsewhere:0 writes what main uses by aten.zeros.default")
    assert read.startswith("side: aten.sum.default in elsewhere:0 reads what main uses by aten.add_.Tensor")
    assert "may take memory made by aten.zeros.default" in freed
