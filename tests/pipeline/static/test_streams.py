"""Streams: what waits for what, and that waiting for anything else fails, on the CPU too. How far the host runs
ahead."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.dlrm.runtime.streams import MAIN, Branch, Priority, Stream
from dlrm_bench.pipeline.static import pipeline as static
from dlrm_bench.pipeline.static.fetch import BatchFetcher
from dlrm_bench.pipeline.static.streams import MAX_IN_FLIGHT, IterationStreams
from tests.pipeline.small_runs import batches_of, small
from tests.pipelines import static_pipeline

CPU = torch.device("cpu")
A = Stream(name="a", carries="work", priority=Priority.FILL)
B, C = (Stream(name=name, carries="work") for name in "bc")
LOCAL, LATER = (Stream(name=name, carries="work") for name in ("local", "later"))


class FakeCuda:
    """Replaces torch.cuda: streams that record their waits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.waits: list[tuple[str, str]] = []
        self._current = [FakeStream(self, Priority.CHAIN)]
        self._current[0].name = "launching"
        monkeypatch.setattr(torch.cuda, "Stream", lambda priority: FakeStream(self, priority))
        monkeypatch.setattr(torch.cuda, "Event", lambda **_: None)
        monkeypatch.setattr(torch.cuda, "stream", self._stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self._current[-1])

    @contextmanager
    def _stream(self, stream: "FakeStream") -> Iterator[None]:
        self._current.append(stream)
        yield
        self._current.pop()

    @property
    def current(self) -> "FakeStream":
        return self._current[-1]


class FakeStream:
    def __init__(self, cuda: FakeCuda, priority: int) -> None:
        self._cuda, self.priority, self.name = cuda, priority, ""

    def wait_stream(self, other: "FakeStream") -> None:
        self._cuda.waits.append((self.name, other.name))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


def test_branches_wait_for_what_they_are_given_and_the_iteration_for_all(cuda: FakeCuda) -> None:
    streams = IterationStreams(torch.device("cuda"), overlap=True)
    for _ in range(2):
        cuda.waits.clear()
        with streams.iteration():
            with streams.beside(A) as a:
                cuda.current.name = "a"
                with streams.beside(B, a) as b:  # which comes after `a` anyway
                    cuda.current.name = "b"
            with streams.beside(MAIN) as main:
                assert cuda.current.name == "launching"
            with streams.beside(C, main, b):
                cuda.current.name = "c"
                streams.join(a, main)
                assert cuda.current.priority == Priority.CHAIN
            with streams.on(a):
                assert (cuda.current.name, cuda.current.priority) == ("a", Priority.FILL)
            with streams.beside(A) as again:
                assert again is a
    assert cuda.waits == [  # of the second iteration: a stream has no name before its first use
        ("a", "launching"),
        ("b", "a"),
        ("c", "launching"),
        ("c", "b"),
        ("c", "a"),
        ("c", "launching"),
        ("a", "launching"),
        ("launching", "a"),
        ("launching", "b"),
        ("launching", "c"),
    ]


def test_without_overlap_nothing_waits(cuda: FakeCuda) -> None:
    streams = IterationStreams(torch.device("cuda"), overlap=False)
    with streams.iteration():
        with streams.beside(A) as a:
            assert cuda.current.name == "launching"
        with streams.beside(B, a), streams.on(a):
            streams.join(a)
    assert cuda.waits == []


@pytest.mark.parametrize("wrong", ["loacl", Branch("local", None)])
def test_waiting_for_what_is_no_branch_of_the_iteration_fails_on_the_cpu(wrong: Branch) -> None:
    streams = IterationStreams(CPU, overlap=True)
    with streams.iteration():
        with streams.beside(LOCAL):
            pass
        for wait in (lambda: streams.join(wrong), lambda: streams.on(wrong), streams.beside(LATER, wrong).__enter__):
            with pytest.raises(AssertionError, match="is not a branch of this iteration"):
                wait()


def test_branches_end_with_their_iteration() -> None:
    streams = IterationStreams(CPU, overlap=True)
    with streams.iteration(), streams.beside(LOCAL) as old:
        pass
    with streams.iteration(), pytest.raises(AssertionError, match="is not a branch of this iteration"):
        streams.join(old)
    with pytest.raises(AssertionError, match="only within an iteration"), streams.beside(LOCAL):
        pass


def test_a_failed_iteration_leaves_no_branches(cuda: FakeCuda) -> None:
    streams = IterationStreams(torch.device("cuda"), overlap=True)
    with pytest.raises(KeyError), streams.iteration(), streams.beside(LOCAL) as old:
        raise KeyError
    cuda.waits.clear()
    with streams.iteration(), pytest.raises(AssertionError):
        streams.join(old)
    assert cuda.waits == []


def test_what_runs_as_captured_comes_after_what_was_launched_and_before_what_will_be(cuda: FakeCuda) -> None:
    streams = IterationStreams(torch.device("cuda"), overlap=True)
    assert isinstance(streams.main, FakeStream)
    streams.main.name = "main"
    with streams.as_captured():
        assert cuda.current is streams.main
        assert cuda.waits == [("main", "launching")]
    assert cuda.current.name == "launching"
    assert cuda.waits == [("main", "launching"), ("launching", "main")]
    with IterationStreams(CPU, overlap=True).as_captured():
        assert cuda.current.name == "launching"


def overlaps(ranks: Ranks) -> list[bool]:
    """Returns what streams are told without and with --overlap."""
    told = []

    class Told(IterationStreams):
        def __init__(self, device: torch.device, overlap: bool) -> None:
            told.append(overlap)
            super().__init__(device, overlap)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(static, "IterationStreams", Told)
        for overlap in (False, True):
            static_pipeline(small(overlap=overlap), ranks)
    return told


def test_work_overlaps_where_a_user_asks_for_it(run_ranks: Callable[..., list[Any]]) -> None:
    assert run_ranks(1, overlaps) == [[False, True]]


class LateEvent:
    """Stands for a CUDA event, of a device that works only while the host waits for it, and for the fetches that are
    launched on that device."""

    def __init__(self) -> None:
        self.named = self._launched = self._recorded = self._fetched = 0

    def fetch(self) -> None:
        self._launched += 1

    def record(self) -> None:
        self._recorded = self._launched

    def synchronize(self) -> None:
        self._fetched = self._recorded

    @property
    def in_flight(self) -> int:
        """Number of batches that are named and not fetched."""
        return self.named - self._fetched


def names_ahead(ranks: Ranks) -> tuple[int, list[int]]:
    """Returns the number of addresses that are kept, and the batches in flight whenever one is named, in trainings and
    evaluations of several lengths."""
    with pytest.MonkeyPatch.context() as patch:
        pipeline, device, found = static_pipeline(small(), ranks), LateEvent(), []
        patch.setattr(pipeline._streams, "_cuda", True)
        patch.setattr(pipeline._streams, "_ended", device, raising=False)
        name, fetch = BatchFetcher.name, BatchFetcher.fetch

        def named(fetcher: BatchFetcher, batch: Any) -> None:
            device.named += 1
            found.append(device.in_flight)
            name(fetcher, batch)

        def fetched(fetcher: BatchFetcher, into: Any) -> None:
            device.fetch()
            fetch(fetcher, into)

        patch.setattr(BatchFetcher, "name", named)
        patch.setattr(BatchFetcher, "fetch", fetched)
        training = batches_of(pipeline._config, ranks)
        for steps, evaluated in ((3, 2), (1, 0), (5, 13), (4, 1)):
            for _ in range(steps):
                pipeline.train_step(training)
            list(pipeline.evaluate(batches_of(pipeline._config, ranks, evaluated)))
    return len(pipeline._fetcher._addresses), found


def test_the_host_is_ahead_by_no_more_batches_than_it_keeps_addresses_of(run_ranks: Callable[..., list[Any]]) -> None:
    ((kept, found),) = run_ranks(1, names_ahead)
    assert len(found) > 4 * MAX_IN_FLIGHT
    assert max(found) <= kept == MAX_IN_FLIGHT
    assert min(found[MAX_IN_FLIGHT:]) > 1, "it never waits for the iteration that it has just launched"
