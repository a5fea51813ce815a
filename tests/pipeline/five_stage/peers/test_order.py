"""Cross-cutting: in the graph of an iteration the ranks' writes into each other's memory do not race, ordered by
streams and meetings as on GPUs; they would without the meetings of any lane, and with one buffer in place of two."""

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, get_args
from unittest.mock import patch

import numpy as np
from torch import Tensor
from torchrec import EmbeddingBagCollection

import dlrm_bench.pipeline.five_stage.gradients
import dlrm_bench.pipeline.five_stage.pipeline
import dlrm_bench.pipeline.five_stage.trimmed.capacity_dist
from dlrm_bench.dlrm.runtime.peer_memory import Barrier
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.five_stage import reasons
from dlrm_bench.pipeline.five_stage.options import FiveStageOptions
from dlrm_bench.pipeline.five_stage.peers.exchanges import Peers
from dlrm_bench.pipeline.five_stage.peers.memory import Lane
from dlrm_bench.pipeline.five_stage.pipeline import FiveStagePipeline
from dlrm_bench.pipeline.five_stage.trimmed.sharder import TrimmedEBCSharder
from tests.pipeline.cpu_graphs import Checked, iteration_graph_on_cpu
from tests.pipeline.five_stage.any_models import build
from tests.pipeline.five_stage.peers.memory_on_cpu import MappedFiles, peer_memory_on_cpu
from tests.pipeline.five_stage.test_iteration_forms import BAGS, CHANGING, SHARDERS, data_of, mixed
from tests.pipeline.five_stage.test_iteration_habits import Several, sgd
from tests.races import Access, Event, Meeting, Recorder, Wait, races

COUNT = 24
LANES: tuple[Lane, ...] = get_args(Lane)
PEERS = FiveStageOptions(cuda_graph="iteration", peer_memory=True)
ORDERS = {lane: Barrier(lane, "writes before reads, reads before the writes after the next launch") for lane in LANES}


class OfDropIn(Recorder):
    """What one rank of the drop-in launches. A branch of a replay is a stream of its own."""

    def __init__(self) -> None:
        super().__init__()
        self._replays, self._in_replay, self._marks = 0, False, 0
        self._tensors: list[Tensor] = []  # so that no other memory gets their addresses

    def _recorded(self) -> Sequence[tuple[type, str, Callable[..., Any]]]:
        return (
            (MappedFiles, "allocate", self._allocate),
            (MappedFiles, "meet", self._meet),
            (Checked, "replay", self._replay),
        )

    def _allocate(self, allocate: Callable[..., list[Tensor]]) -> Callable[..., list[Tensor]]:
        def recorded(memory: MappedFiles, nbytes: int) -> list[Tensor]:
            tensors = allocate(memory, nbytes)
            for rank, tensor in enumerate(tensors):
                self._memory[tensor.untyped_storage().data_ptr()] = (self._allocations, rank)
            self._allocations += 1
            self._tensors += tensors
            return tensors

        return recorded

    def _meet(self, meet: Callable[..., None]) -> Callable[..., None]:
        def recorded(memory: MappedFiles, lane: Lane) -> None:
            self.events.append(Meeting(self._streams[-1], ORDERS[lane]))
            meet(memory, lane)

        return recorded

    def _replay(self, replay: Callable[..., None]) -> Callable[..., None]:
        def recorded(graph: Checked) -> None:
            self._replays, self._in_replay = self._replays + 1, True
            replay(graph)
            self._in_replay = False

        return recorded

    def _access(self, operator: str, tensor: Any, writes: bool) -> None:
        if isinstance(tensor, Tensor) and tensor.numel():
            memory = self._memory.get(tensor.untyped_storage().data_ptr())
            if memory is not None:
                self.events.append(Access(self._streams[-1], operator, memory, bytes_of(tensor), writes))

    # The pipeline's streams

    cuda = False

    def named(self, name: str | None) -> str:
        if name is None:
            return self._streams[-1]
        return f"{name} of graph {self._replays}" if self._in_replay else name

    @contextmanager
    def on(self, name: str, after: str | None = None) -> Iterator[None]:
        self.hold(name, after)
        self._streams.append(self.named(name))
        yield
        self._streams.pop()

    def mark(self, name: str | None = None) -> str:
        """An event is a stream without work that comes after what has been launched so far."""
        self._marks += 1
        self.events.append(Wait(event := f"event {self._marks}", (self.named(name),)))
        return event

    def hold(self, name: str | None, after: str | None) -> None:
        if after is not None:
            self.events.append(Wait(self.named(name), (after,)))

    def wait(self, event: str | None) -> None:
        self.hold(None, event)

    def record(self, *crossing: Any) -> None:
        """Nothing: the pipeline holds what crosses streams."""

    def stream(self, name: str) -> None:
        return None


def bytes_of(tensor: Tensor) -> int:
    """A bit for each byte of its storage that is the tensor's."""
    bits = np.zeros(tensor.untyped_storage().nbytes(), dtype=bool)
    size = tensor.itemsize
    strides = [*(stride * size for stride in tensor.stride()), 1]
    np.lib.stride_tricks.as_strided(bits[tensor.storage_offset() * size :], (*tensor.shape, size), strides)[...] = True
    return int.from_bytes(np.packbits(bits, bitorder="little").tobytes(), "little")


def train(ranks: Ranks, turns: int) -> tuple[list[Event], dict[str, Any]]:
    """What a rank launches. Batches of several forms, some of which have more ids than room; every fifth one is
    evaluated. turns: buffers of an exchange."""
    signal.alarm(600)
    iteration_graph_on_cpu()
    peer_memory_on_cpu()
    sharders = SHARDERS | {EmbeddingBagCollection: TrimmedEBCSharder(BAGS, row_capacity=1.0)}
    model, optimizer = build(ranks, Several, mixed, sgd, sharders)
    data, recorder, at = iter(data_of(ranks, CHANGING[:COUNT])), OfDropIn(), Peers.at
    streams: Any = lambda device, records: recorder  # noqa: E731
    with (
        patch.object(dlrm_bench.pipeline.five_stage.pipeline, "StageStreams", streams),
        patch.object(dlrm_bench.pipeline.five_stage.trimmed.capacity_dist, "OVERFLOWS", 0.9),
        patch.object(dlrm_bench.pipeline.five_stage.gradients, "_BUCKET", 256),  # several buckets
        patch.object(Peers, "at", lambda peers, turn: at(peers, turn % turns)),
        FiveStagePipeline(model, optimizer, ranks.device, PEERS) as pipeline,
    ):
        for step in range(COUNT):
            model.train(step % 5 != 4)
            with recorder:
                pipeline.progress(data)
        return recorder.events, pipeline.describe()


def test_meetings_and_two_buffers_order_all_accesses(run_ranks: Callable[..., Any]) -> None:
    logs, described = zip(*run_ranks(2, train, 2), strict=True)
    assert races(logs) == []
    for of_rank in described:
        assert of_rank["replays"] > 8
        assert of_rank["captures"] > 2
        assert of_rank["eager"].keys() == {reasons.OVERFLOW()}
    met = {event.barrier for event in logs[0] if isinstance(event, Meeting)}
    assert met == set(ORDERS.values())
    assert [barrier.name for barrier in met if not races(logs, without=barrier)] == []


def test_one_buffer_is_not_enough(run_ranks: Callable[..., Any]) -> None:
    logs, _ = zip(*run_ranks(2, train, 1), strict=True)
    assert races(logs) != []
