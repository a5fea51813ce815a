import gc
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from queue import SimpleQueue
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dlrm_bench.dlrm.data import loader
from dlrm_bench.dlrm.data.batch import Batch
from dlrm_bench.dlrm.data.loader import Prefetcher
from dlrm_bench.dlrm.dcnv2.config import ModelConfig


def numbered(model: ModelConfig, count: int | None, read: list[int] | None = None) -> Iterator[Batch]:
    """Batches that carry their number in num_valid; `read` logs which have been asked for."""
    number = 0
    while count is None or number < count:
        if read is not None:
            read.append(number)
        batch = Batch.empty(1, model)
        batch.num_valid = number
        yield batch
        number += 1


def number_of(batch: Batch) -> int:
    return batch.num_valid


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "batch-reader"]


@pytest.fixture
def reader_waits(monkeypatch: pytest.MonkeyPatch) -> threading.Semaphore:
    """Released each time that the reader finds no ticket, and so waits for the consumer."""
    waits = threading.Semaphore(0)

    class Watched(SimpleQueue):
        def get(self) -> Any:
            if threading.current_thread().name == "batch-reader" and self.empty():
                waits.release()
            return super().get()

    monkeypatch.setattr(loader, "SimpleQueue", Watched)
    return waits


@pytest.mark.parametrize("depth", [1, 3, 100])
def test_order_and_end(model: ModelConfig, depth: int) -> None:
    with Prefetcher(numbered(model, 50), number_of, depth) as results:
        assert list(results) == list(range(50))
        assert list(results) == []
    assert not readers()


def test_transform_runs_on_the_reader(model: ModelConfig) -> None:
    with Prefetcher(numbered(model, 3), lambda _: threading.current_thread(), 2) as results:
        assert {thread.name for thread in results} == {"batch-reader"}


def test_reads_no_further_ahead_than_depth(model: ModelConfig, reader_waits: threading.Semaphore) -> None:
    read: list[int] = []
    with Prefetcher(numbered(model, None, read), number_of, 4) as results:
        for taken in range(3):
            assert reader_waits.acquire(timeout=60)
            assert len(read) == 4 + taken
            assert next(results) == taken


def test_an_exception_arrives_in_its_turn(model: ModelConfig) -> None:
    def failing_transform(batch: Batch) -> int:
        if batch.num_valid == 2:
            raise KeyError("broken")
        return batch.num_valid

    with Prefetcher(numbered(model, 5), failing_transform, 10) as results:
        assert [next(results), next(results)] == [0, 1]
        for _ in range(2):
            with pytest.raises(KeyError, match="broken") as caught:
                next(results)
            assert any(frame.name == "failing_transform" for frame in traceback.extract_tb(caught.value.__traceback__))


def test_the_sources_exception_arrives_too(model: ModelConfig) -> None:
    def source() -> Iterator[Batch]:
        yield from numbered(model, 1)
        raise ValueError("day_3_labels.npy")

    with Prefetcher(source(), number_of, 2) as results:
        assert next(results) == 0
        with pytest.raises(ValueError, match="day_3"):
            next(results)


class Numbered(Sequence[Batch]):
    """A sequence of batches that carry their number; `failing` cannot be read. Slices are sequences too."""

    def __init__(self, model: ModelConfig, numbers: range, failing: int | None = None) -> None:
        self.model, self.numbers, self.failing = model, numbers, failing

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return Numbered(self.model, self.numbers[index], self.failing)
        if self.numbers[index] == self.failing:
            raise ValueError(f"batch {self.failing}")
        batch = Batch.empty(1, self.model)
        batch.num_valid = self.numbers[index]
        return batch


@given(count=st.integers(0, 30), depth=st.integers(1, 12), threads=st.integers(1, 6))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=30)
def test_several_threads_keep_the_order_of_a_sequence(model: ModelConfig, count: int, depth: int, threads: int) -> None:
    with Prefetcher(Numbered(model, range(count)), number_of, depth, threads) as results:
        assert len(readers()) <= min(threads, depth)
        assert list(results) == list(range(count))
        assert list(results) == []
    assert not readers()


def test_several_threads_read_a_sequence(model: ModelConfig) -> None:
    at_once = threading.Barrier(3)  # which one thread alone would wait at for ever

    def meet(batch: Batch) -> int:
        at_once.wait(timeout=60)
        return batch.num_valid

    with Prefetcher(Numbered(model, range(9)), meet, 3, threads=3) as results:
        assert list(results) == list(range(9))


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_error_of_one_thread_arrives_in_its_turn(model: ModelConfig, threads: int) -> None:
    with Prefetcher(Numbered(model, range(12), failing=7), number_of, 6, threads) as results:
        assert [next(results) for _ in range(7)] == list(range(7))
        for _ in range(2):
            with pytest.raises(ValueError, match="batch 7"):
                next(results)
    assert not readers()


@pytest.mark.parametrize("threads", [1, 2])
def test_an_index_error_of_a_batch_is_no_end(model: ModelConfig, threads: int) -> None:
    """A damaged index of samples would shorten an evaluation."""

    class Damaged(Numbered):
        def __getitem__(self, index: Any) -> Any:
            if isinstance(index, slice):
                return Damaged(self.model, self.numbers[index])
            if self.numbers[index] == 3:
                raise IndexError("index 99 is out of bounds")
            return super().__getitem__(index)

    with Prefetcher(Damaged(model, range(9)), number_of, 4, threads) as results:
        assert [next(results) for _ in range(3)] == [0, 1, 2]
        with pytest.raises(IndexError, match="99"):
            next(results)


def test_an_iterator_is_read_by_one_thread(model: ModelConfig) -> None:
    with Prefetcher(numbered(model, 40), number_of, 8, threads=4) as results:
        assert len(readers()) == 1
        assert list(results) == list(range(40))


@pytest.mark.parametrize("taken", [0, 5])
def test_close_is_prompt_however_full_the_queue(
    model: ModelConfig, taken: int, reader_waits: threading.Semaphore
) -> None:
    read: list[int] = []
    results = Prefetcher(numbered(model, None, read), number_of, 3)
    for _ in range(taken):
        assert reader_waits.acquire(timeout=60)
        next(results)
    assert reader_waits.acquire(timeout=60)
    results.close()
    results.close()
    assert len(read) == 3 + taken  # none more
    assert not readers()
    assert list(results) == []


def test_one_left_open_is_closed_when_collected(model: ModelConfig) -> None:
    results = Prefetcher(numbered(model, None), number_of, 3)
    assert readers()
    del results
    gc.collect()
    assert not readers()


def test_one_left_open_does_not_hinder_exit() -> None:
    program = """
import itertools
from dlrm_bench.dlrm.data.loader import Prefetcher
results = Prefetcher(itertools.repeat(None), lambda batch: sum(range(1000)), 8)
next(results)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=180, check=False)
    assert (done.returncode, done.stderr) == (0, "")
