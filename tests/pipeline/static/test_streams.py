"""Streams: what waits for what, and that waiting for anything else fails, on the CPU too."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from dlrm_bench.dlrm.runtime.streams import MAIN, Branch, Priority, Stream
from dlrm_bench.pipeline.static.streams import IterationStreams

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
