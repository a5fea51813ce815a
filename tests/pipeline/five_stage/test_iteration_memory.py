"""Graphs of whole iterations leave enough memory for what trains without them, on all ranks, and say what they hold."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch

from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.five_stage import graph_memory, iteration_graph
from dlrm_bench.pipeline.five_stage.graph_memory import GraphMemory
from dlrm_bench.pipeline.five_stage.iteration_slots import batch_bytes
from dlrm_bench.pipeline.five_stage.options import FiveStageOptions
from tests.pipeline.five_stage import test_iteration_forms as of_forms
from tests.pipeline.five_stage.test_graph_memory import A_ROW, BATCH, TABLES, Allocator
from tests.pipeline.five_stage.test_iteration_forms import data_of, train
from tests.pipeline.five_stage.test_iteration_graph import BITS, EAGER, assert_equal, prepare, stock, whole
from tests.pipeline.five_stage.torchrec_models import batches

MUCH, OR_DENSE = 1 << 40, FiveStageOptions(cuda_graph="iteration-or-dense")
GROWING = [0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 2, 2, 2, 2, 1, 1, 0, 0, 2, 0, 2, 0, 1, 2, 1, 2]


@contextmanager
def memory_of(most: int) -> Iterator[Allocator]:
    """A device with so many bytes, whose graphs take A_ROW for each byte of their batches."""
    device, record, give_back = Allocator(most), iteration_graph.record, GraphMemory.dropped

    def recorded(work: Any, **how: Any) -> Any:
        graph, (_, _, pair) = record(work, **how), work.args
        device.capture(work.func.__self__.memory.size(pair))
        return graph

    def dropped(self: GraphMemory) -> None:
        device.drop()
        give_back(self)

    with (
        patch.object(graph_memory, "device_memory", device),
        patch.object(iteration_graph, "record", recorded),
        patch.object(GraphMemory, "dropped", dropped),
    ):
        yield device


def too_little(ranks: Ranks) -> tuple[str, str]:
    """On the last rank."""
    prepare(ranks)
    data, last = batches(ranks, 12, fixed=True), ranks.rank == ranks.world_size - 1
    most = TABLES + BATCH + 10 if last else MUCH
    with memory_of(most), pytest.raises(ValueError, match="cuda_graph='iteration'") as caught:
        whole(ranks, data)
    with memory_of(most) as device:
        run = whole(ranks, data, options=OR_DENSE)
    assert device.pool == 0
    assert_equal(run.trained, stock(ranks, data), BITS)
    return str(caught.value), run.off["cuda_graph"]


@pytest.mark.parametrize("world_size", [1, 2])
def test_too_little_memory_of_a_rank_is_an_error_or_leaves_the_dense_part(run_ranks: Any, world_size: int) -> None:
    for said in run_ranks(world_size, too_little):
        assert all(f"rank {world_size - 1}: " in of and "CUDA out of memory" in of for of in said)


def little(ranks: Ranks) -> tuple[str, int]:
    """Enough for the capture, and not for a batch beside it; returns what is said, and the graph's bytes."""
    prepare(ranks)
    data = batches(ranks, 12, fixed=True)
    with memory_of(MUCH):
        held: int = whole(ranks, data).described["bytes"]["graphs"]
    with memory_of(TABLES + BATCH + held):
        assert whole(ranks, data).described["replays"] == 12 - EAGER
    with memory_of(TABLES + BATCH + held - 1), pytest.raises(ValueError, match="cuda_graph='iteration'") as caught:
        whole(ranks, data)
    return str(caught.value), held


def test_a_batch_must_fit_beside_the_graphs(run_ranks: Any) -> None:
    ((said, held),) = run_ranks(1, little)
    assert held > 0
    assert held % A_ROW == 0
    assert "of memory are too little for" in said


def larger_forms(ranks: Ranks) -> tuple[int, int]:
    """On the last rank the graphs of the largest forms fit, which smaller ones then share, and no others beside them.
    Returns how often graphs were dropped, with much memory and with little."""
    of_forms.prepare(ranks)
    data, drops = data_of(ranks, GROWING), []
    stocks = train(ranks, [data], False).trained
    most = MUCH
    for _ in range(2):
        with memory_of(most if ranks.rank == ranks.world_size - 1 else MUCH) as device:
            ours = train(ranks, [data], True)
        torch.testing.assert_close(ours.trained.outputs, stocks.outputs, rtol=0, atol=0)
        torch.testing.assert_close(ours.trained.state, stocks.state, rtol=0, atol=0)
        assert ours.described["eager"] == {}
        drops.append(device.drops)
        most = TABLES + 2 * BATCH + A_ROW * device.largest_ever
    return drops[0], drops[1]


@pytest.mark.parametrize("world_size", [1, 2])
def test_larger_graphs_come_first_where_memory_is_little(run_ranks: Any, world_size: int) -> None:
    for much, little in run_ranks(world_size, larger_forms):
        assert much == 1  # at the end
        assert little > 1


def larger_batch(ranks: Ranks) -> tuple[tuple[int, int], tuple[int, int], str]:
    """A batch of another form, twice as large, and memory for it beside the graphs, or on rank 0 not quite. Returns the
    captures and drops of both, and why graphs are off then."""
    prepare(ranks)
    data = batches(ranks, 10, fixed=True)
    data += batches(ranks, 1, size=16, fixed=True, seed=5) + batches(ranks, 10, 2, fixed=True)
    with memory_of(MUCH):
        held: int = whole(ranks, data).described["bytes"]["graphs"]
    most = TABLES + BATCH * batch_bytes(data[10]) // batch_bytes(data[0]) + held
    trained = stock(ranks, data)
    with memory_of(most) as enough:
        assert_equal(whole(ranks, data).trained, trained, BITS)
    with memory_of(most - (ranks.rank == 0)) as little:
        run = whole(ranks, data, options=OR_DENSE)
    assert_equal(run.trained, trained, BITS)
    return (enough.captures, enough.drops), (little.captures, little.drops), run.off["cuda_graph"]


@pytest.mark.parametrize("world_size", [1, 2])
def test_graphs_make_room_for_a_larger_batch_on_all_ranks(run_ranks: Any, world_size: int) -> None:
    for enough, little, why in run_ranks(world_size, larger_batch):
        assert enough == (2, 1)  # dropped at the end
        assert little == (4, 2)  # captured once more after the batch, and given up as the next such batch would not fit
        assert "rank 0: " in why
        assert "of memory are too little for" in why
