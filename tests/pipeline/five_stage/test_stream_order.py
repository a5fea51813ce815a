"""Cross-cutting: on streams of a GPU nothing of an iteration would be read, written or freed before others are done."""

import signal
from collections.abc import Callable
from dataclasses import fields
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor

import dlrm_bench.pipeline.five_stage.gradients
import dlrm_bench.pipeline.five_stage.pipeline
import dlrm_bench.pipeline.five_stage.trimmed.capacity_dist
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.five_stage import reasons
from dlrm_bench.pipeline.five_stage.options import FiveStageOptions
from dlrm_bench.pipeline.five_stage.pipeline import FiveStagePipeline
from dlrm_bench.pipeline.five_stage.trimmed.sharder import TrimmedEBCSharder
from tests.pipeline.cpu_graphs import Checked, iteration_graph_on_cpu
from tests.pipeline.five_stage.any_models import LONGEST, PLANS, AnyBatch, Plan, build
from tests.pipeline.five_stage.logical_streams import LogicalStreams, Order
from tests.pipeline.five_stage.test_iteration_forms import BAGS, CHANGING, SHARDERS, WHOLE, data_of, mixed
from tests.pipeline.five_stage.test_iteration_habits import Several, sgd

FEW, MORE = 8, 16


class AtBothEnds(Several):
    """Begins without any lookup, and its backward ends with a read of a weight whose gradient has been made before."""

    def logits(self, batch: AnyBatch) -> Tensor:
        dense = batch.dense.tanh()
        pooled = [self.weighted(batch.weighted).values() * self.out.weight.detach()[0, 0]]  # first, so last in backward
        pooled += [self.tower["deep"](batch.bags), self.processed(batch.bags).values()]
        pooled += [self.items(batch.sequences)["history"].to_padded_dense(LONGEST).sum(dim=1)]
        return self.out(torch.cat([dense, *pooled], dim=1)).squeeze(-1)


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


def train(ranks: Ranks, order: Order, count: int, plan: Plan) -> dict[str, Any]:
    """Batches of several forms, some of which have more ids than room; every fifth one is evaluated."""
    sharders = SHARDERS | {EmbeddingBagCollection: TrimmedEBCSharder(BAGS, row_capacity=1.0)}
    with order:  # which knows the memory that is made within
        model, optimizer = build(ranks, AtBothEnds, plan, sgd, sharders)
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


def eagerly(ranks: Ranks) -> list[str]:
    """What is found without graphs, in two pipelines, of which the first is closed between its batches."""
    signal.alarm(600)
    order = Order()
    streams: Any = lambda device, records: LogicalStreams(order)  # noqa: E731
    with (
        patch.object(dlrm_bench.pipeline.five_stage.pipeline, "StageStreams", streams),
        patch.object(AnyBatch, "to", copied),
    ):
        with order:
            model, optimizer = build(ranks, AtBothEnds, PLANS["TW"], sgd)
        for _ in range(2):
            data = iter(data_of(ranks, CHANGING[:FEW]))
            with FiveStagePipeline(model, optimizer, ranks.device, FiveStageOptions()) as pipeline, order:
                for _ in range(FEW - 3):
                    pipeline.progress(data)
                pipeline.close()
    return list(order.found)


def unordered(ranks: Ranks) -> list[tuple[dict[str, int], dict[str, Any]]]:
    """What is found, first where side streams wait for nothing of the caller's, and last without replicated tables,
    whose gradients come after all others."""
    signal.alarm(600)
    iteration_graph_on_cpu()
    found, replay = [], Checked.replay
    for waits, count, plan in ((False, FEW, mixed), (True, len(CHANGING), mixed), (True, MORE, PLANS["TW"])):
        order = Order()
        order.waits = waits

        def in_graph(graph: Checked, order: Order = order) -> None:
            with order.replay():
                replay(graph)

        with patch.object(Checked, "replay", in_graph):
            described = train(ranks, order, count, plan)
        found.append((dict(order.found), described))
    return found


@pytest.mark.slow
def test_all_accesses_are_ordered(run_ranks: Callable[..., Any]) -> None:
    for (without_waits, _), *of_plans in run_ranks(2, unordered):
        assert any(said.startswith("copy: ") for said in without_waits)
        assert [found for found, _ in of_plans] == [{}, {}]
        (_, of_all), (_, by_tables) = of_plans
        assert of_all["replays"] > 15
        assert of_all["captures"] > 4
        assert of_all["eager"].keys() == {reasons.OVERFLOW()}
        assert by_tables["replays"] > 2
        assert by_tables["eager"] == {}


def test_all_accesses_without_graphs_are_ordered(run_ranks: Callable[..., Any]) -> None:
    assert run_ranks(2, eagerly) == [[], []]


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
