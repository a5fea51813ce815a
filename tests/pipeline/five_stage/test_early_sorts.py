"""In a captured graph, what FBGEMM does with ids alone does not wait for the gradients, and everything else does."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.five_stage import graph_nodes, iteration_graph
from dlrm_bench.pipeline.five_stage.early_sorts import EarlySorts
from dlrm_bench.pipeline.five_stage.iteration_graph import IterationGraph
from dlrm_bench.pipeline.five_stage.iteration_pairs import Pair, Pairs
from dlrm_bench.pipeline.five_stage.streams import LOOKUPS
from tests.cases import GPU_PLACES
from tests.pipeline.five_stage.test_iteration_graph import CASES, assert_equal, prepare, whole
from tests.pipeline.five_stage.torchrec_models import batches

LINEARIZE = "_Z22linearize_index_kernelIlib"
FILL = "_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_11FillFunctorIfEE"
SORT = "_ZN3cub6detail10radix_sort30DeviceRadixSortOnesweepKernel"
SEGMENTS = "_ZN13embedding_ops50split_embedding_backward_codegen_find_long_segments"
UPDATE = "_Z60split_embedding_backward_codegen_adagrad_unweighted_kernel_cta_per_row_1"
MEAN = "_Z16grad_mean_kernel"
COPY = "_ZN2at6native18elementwise_kernelILi128ELi2EZNS0_22gpu_kernel_impl_nocastIZZZNS0_23direct_copy_kernel_cudaE"


class Graph:
    """Stands for the driver: a graph that is being captured, on streams that are numbered."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Begins another capture."""
        self.works: list[str] = []
        self.awaited: list[set[int]] = []
        self.streams: dict[int, set[int]] = {}

    def launch(self, stream: int, *works: str) -> None:
        for work in works:
            self.awaited.append(self.streams.get(stream, set()))
            self.works.append(work)
            self.streams[stream] = {len(self.works) - 1}

    def wait(self, stream: int, other: int) -> None:
        self.streams[stream] = self.streams.get(stream, set()) | self.streams[other]

    def ends(self, stream: int) -> list[int]:
        return sorted(self.streams.get(stream, set()))

    def before(self, node: int) -> list[int]:
        return sorted(self.awaited[node])

    def work_of(self, node: int) -> str:
        return self.works[node]

    def depend(self, graph: int, node: int, on: Sequence[int]) -> None:
        assert not self.awaited[node] & set(on)
        self.awaited[node] |= set(on)

    def depend_no_longer(self, graph: int, node: int, on: Sequence[int]) -> None:
        assert self.awaited[node] >= set(on)
        self.awaited[node] -= set(on)

    def comes_before(self, first: str, second: str) -> bool:
        """Whether the second work waits for the first, directly or not."""
        seen, ahead = set[int](), [self.works.index(second)]
        while ahead:
            seen |= (more := self.awaited[ahead.pop()] - seen)
            ahead += more
        return self.works.index(first) in seen


MAIN, DENSE, OF_LOOKUPS = 1, 2, (3, 4)


class Streams:
    """Stands for StageStreams, with the graph's streams. Waits are the tests' own, as autograd's are."""

    cuda = True

    def __init__(self, graph: Graph) -> None:
        self._graph = graph

    def on(self, name: str, after: int | None) -> AbstractContextManager[None]:
        if after is not None:
            self._graph.wait(OF_LOOKUPS[LOOKUPS.index(name)], after)
        return nullcontext()

    def mark(self, name: str | None = None) -> int:
        return MAIN if name is None else OF_LOOKUPS[LOOKUPS.index(name)]

    def wait(self, event: int) -> None:
        self._graph.wait(MAIN, event)

    def stream(self, name: str) -> Any:
        return SimpleNamespace(cuda_stream=OF_LOOKUPS[LOOKUPS.index(name)])

    def current(self) -> Any:
        return SimpleNamespace(cuda_stream=MAIN)


class Kernel(nn.Module):
    def __init__(self, graph: Graph, stream: int) -> None:
        super().__init__()
        self._graph, self._stream = graph, stream

    def forward(self, name: str) -> None:
        self._graph.launch(self._stream, f"bounds of {name}", f"lookup of {name}")


@pytest.fixture
def graph(monkeypatch: pytest.MonkeyPatch) -> Graph:
    graph = Graph()
    for name in ("ends", "before", "work_of", "depend", "depend_no_longer"):
        monkeypatch.setattr(graph_nodes, name, getattr(graph, name))
    return graph


def capture(graph: Graph, updates: Sequence[Sequence[str]]) -> EarlySorts:
    """A lookup and a table update for each of `updates`, the works of its nodes."""
    kernels = [Kernel(graph, stream) for stream in OF_LOOKUPS[: len(updates)]]
    streams: Any = Streams(graph)
    sorts = EarlySorts(kernels, streams)
    capture_with(sorts, graph, kernels, updates)
    return sorts


def capture_with(sorts: EarlySorts, graph: Graph, kernels: Sequence[Kernel], updates: Sequence[Sequence[str]]) -> None:
    graph.launch(MAIN, "clear")
    with sorts.on_streams():
        for i, kernel in enumerate(kernels):
            kernel(f"table {i}")
    graph.launch(MAIN, "exchange")
    sorts.looked_up()
    graph.wait(DENSE, MAIN)
    graph.launch(DENSE, "dense forward", "dense backward")
    graph.wait(MAIN, DENSE)
    graph.launch(MAIN, "exchange of gradients")
    for stream, update in zip(OF_LOOKUPS, updates, strict=False):
        graph.wait(stream, MAIN)
        graph.launch(stream, *update)
    end(sorts)
    graph.launch(MAIN, "end")


def of_one_table(graph: Graph) -> EarlySorts:
    """A capture up to the lookup."""
    streams: Any = Streams(graph)
    kernel = Kernel(graph, OF_LOOKUPS[0])
    sorts = EarlySorts([kernel], streams)
    graph.launch(MAIN, "clear")
    with sorts.on_streams():
        kernel("a table")
    return sorts


def end(sorts: EarlySorts) -> None:
    sorts.updated()
    raw: Any = SimpleNamespace(raw_cuda_graph=lambda: 0)
    sorts.change(raw)


def test_the_sort_begins_after_the_exchange_and_the_update_after_the_gradients(graph: Graph) -> None:
    sorts = capture(graph, [[LINEARIZE, "memset", SORT, SEGMENTS, UPDATE, "after it"]])
    assert sorts.count == 1
    assert graph.comes_before("clear", "bounds of table 0")
    assert graph.comes_before("lookup of table 0", "exchange")
    assert graph.comes_before("exchange", LINEARIZE)
    assert graph.comes_before("lookup of table 0", LINEARIZE)
    for first in (LINEARIZE, SORT, SEGMENTS):
        assert not graph.comes_before("dense forward", first)
        assert graph.comes_before(first, UPDATE)
    assert graph.comes_before("exchange of gradients", UPDATE)
    assert graph.comes_before("after it", "end")


def test_a_copy_of_the_gradients_does_not_hold_the_sort_up(graph: Graph) -> None:
    sorts = capture(graph, [[COPY, LINEARIZE, SORT, UPDATE]])
    assert sorts.count == 1
    assert graph.comes_before("exchange of gradients", COPY)
    assert graph.comes_before(COPY, UPDATE)
    assert graph.comes_before(SORT, UPDATE)
    assert graph.comes_before("exchange", LINEARIZE)
    assert graph.comes_before("lookup of table 0", LINEARIZE)
    assert not graph.comes_before(COPY, SORT)
    assert not graph.comes_before("dense forward", SORT)


def test_one_rank_exchanges_nothing(graph: Graph) -> None:
    """The backward of the outputs then launches nothing, so that the update waits for the dense part directly."""
    sorts = of_one_table(graph)
    graph.launch(MAIN, "lookup of replicated tables")
    sorts.looked_up()
    graph.wait(DENSE, MAIN)
    graph.launch(DENSE, "dense")
    graph.wait(MAIN, DENSE)
    graph.wait(OF_LOOKUPS[0], MAIN)
    graph.launch(OF_LOOKUPS[0], LINEARIZE, SORT, UPDATE)
    end(sorts)
    assert sorts.count == 1
    assert graph.comes_before("dense", UPDATE)
    assert graph.comes_before("lookup of replicated tables", LINEARIZE)
    assert not graph.comes_before("dense", SORT)


def test_each_kernel_has_a_sort(graph: Graph) -> None:
    sorts = capture(graph, [[LINEARIZE, SORT, UPDATE], [f"{LINEARIZE}2", f"{SORT}2", f"{UPDATE}2"]])
    assert sorts.count == 2
    for name in ("", "2"):
        assert not graph.comes_before("exchange of gradients", SORT + name)
        assert graph.comes_before("exchange of gradients", UPDATE + name)
        assert graph.comes_before(UPDATE + name, "end")


def test_each_graph_has_nodes_of_its_own(graph: Graph) -> None:
    """Those of an earlier graph would be other nodes here, or none."""
    streams: Any = Streams(graph)
    kernel = Kernel(graph, OF_LOOKUPS[0])
    sorts = EarlySorts([kernel], streams)
    for ahead in ([], ["of the next batch", "also of it"]):
        graph.begin()
        graph.launch(MAIN, *ahead)
        capture_with(sorts, graph, [kernel], [[LINEARIZE, SORT, UPDATE]])
        assert sorts.count == 1
        assert graph.comes_before("exchange", LINEARIZE)
        assert not graph.comes_before("dense forward", SORT)
        assert graph.comes_before("exchange of gradients", UPDATE)
        assert graph.comes_before(UPDATE, "end")
    with sorts.on_streams():  # in the rehearsal of another form, which may never be captured
        kernel("a table")
    sorts.looked_up()
    sorts.updated()
    assert sorts.count == 1


@pytest.mark.parametrize(("keep", "count"), [(True, 1), (False, 0)])
def test_graphs_whose_nodes_are_not_kept_have_their_sorts_as_captured(
    monkeypatch: pytest.MonkeyPatch, keep: bool, count: int
) -> None:
    def record(work: Any, change: Callable[[Any], None] | None, **_: Any) -> None:
        if change is not None:
            change(None)

    def change(graph: Any) -> None:
        sorts.count = 1

    monkeypatch.setattr(iteration_graph, "record", record)
    sorts = SimpleNamespace(count=1, change=change)  # as of the capture before
    memory = SimpleNamespace(size=lambda pair: 0, capturing=lambda size: nullcontext())
    streams = SimpleNamespace(stream=lambda name: None)
    itself: Any = SimpleNamespace(
        _device=torch.device("cpu"),
        _pool=None,
        _streams=streams,
        _pairs=Pairs(),
        _sorts=sorts,
        memory=memory,
        _launch=lambda *_: None,
    )
    IterationGraph._record(itself, Pair(0, 0), keep)
    assert sorts.count == count


@pytest.mark.parametrize(
    "update",
    [
        [MEAN, LINEARIZE, SORT, UPDATE],
        [FILL, MEAN, LINEARIZE, SORT, UPDATE],
        [UPDATE],
        [LINEARIZE, SORT],
        [COPY, UPDATE],
        [COPY],
        [],
    ],
    ids=[
        "reads gradients first",
        "reads gradients before the sort",
        "does not sort",
        "does not read gradients",
        "only copies and reads",
        "only copies",
        "has no update",
    ],
)
def test_others_stay_after_the_gradients(graph: Graph, update: list[str]) -> None:
    sorts = capture(graph, [update])
    assert sorts.count == 0
    assert all(graph.comes_before("exchange of gradients", work) for work in update)


def test_work_of_the_same_stream_between_keeps_its_place(graph: Graph) -> None:
    """As of a second update: its memory may be that of the first one."""
    sorts = of_one_table(graph)
    sorts.looked_up()
    graph.launch(MAIN, "exchange of gradients")
    graph.wait(OF_LOOKUPS[0], MAIN)
    graph.launch(OF_LOOKUPS[0], "another update")
    graph.launch(MAIN, "other gradients")
    graph.wait(OF_LOOKUPS[0], MAIN)
    graph.launch(OF_LOOKUPS[0], LINEARIZE, SORT, UPDATE)
    end(sorts)
    assert sorts.count == 0
    assert graph.comes_before("other gradients", LINEARIZE)


def with_and_without(ranks: Ranks) -> list[Any]:
    """Trains each model with sorts moved, and with sorts where they were captured."""
    prepare(ranks)
    data = batches(ranks, 60, fixed=True)
    described = []
    for case in CASES:
        moved = whole(ranks, data, **case)
        with patch.object(EarlySorts, "change", lambda *_: None):
            as_captured = whole(ranks, data, **case)
        assert as_captured.described["sorts_before_gradients"] == 0
        assert_equal(moved.trained, as_captured.trained, rtol=0)
        described.append(moved.described)
    return described


@pytest.mark.parametrize(("world_size", "gpu"), GPU_PLACES)
def test_trains_the_same_bits(run_ranks: Callable[..., Any], world_size: int, gpu: bool) -> None:
    for of_rank in run_ranks(world_size, with_and_without, gpu=gpu):
        for described in of_rank:
            assert described["replays"] > 50
            assert described["sorts_before_gradients"] > 0
