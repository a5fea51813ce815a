"""The device gets the batches that the host named, in order, as late as it likes."""

import gc
import weakref

import pytest
import torch

from dlrm_bench.dlrm.data.batch import Batch
from dlrm_bench.pipeline.static.fetch import BatchFetcher
from tests.cases import SMALL_MODEL

DEVICES = [torch.device("cpu"), pytest.param(torch.device("cuda"), marks=pytest.mark.gpu)]
IN_FLIGHT = 4


def batch(number: int, pin: bool = False) -> Batch:
    made = Batch.empty(8, SMALL_MODEL, pin)
    made.storage.fill_(number)
    return made


def on(device: torch.device) -> Batch:
    return Batch.over(batch(0).storage.to(device), batch(0).layout)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("pin", [False, True])
def test_order(device: torch.device, pin: bool) -> None:
    """Batches are named one by one, and as far ahead as possible; memory that is not pinned does no harm."""
    fetcher, into = BatchFetcher(device, IN_FLIGHT), on(device)
    for start, ahead in ((1, 1), (2, IN_FLIGHT), (6, 2), (8, IN_FLIGHT)):
        for number in range(start, start + ahead):
            fetcher.name(batch(number, pin and device.type == "cuda"))
        for number in range(start, start + ahead):
            fetcher.fetch(into)
            assert (into.storage == number).all()


@pytest.mark.parametrize("device", DEVICES)
def test_the_end_of_the_data_leaves_the_last_batch(device: torch.device) -> None:
    fetcher, into = BatchFetcher(device, IN_FLIGHT), on(device)
    for each in (batch(3), None, batch(4)):
        fetcher.name(each)
    for expected in (3, 3, 4):
        fetcher.fetch(into)
        assert (into.storage == expected).all()


def test_batches_are_kept_until_they_cannot_be_in_flight_any_more() -> None:
    fetcher = BatchFetcher(torch.device("cpu"), IN_FLIGHT)
    storages = []
    for number in range(IN_FLIGHT + 2):
        named = batch(number)
        storages.append(weakref.ref(named.storage))
        fetcher.name(named)
        del named
    gc.collect()
    assert [storage() is not None for storage in storages] == [False] * 2 + [True] * IN_FLIGHT


@pytest.mark.gpu
def test_a_graph_fetches_what_is_named_after_its_capture() -> None:
    fetcher, into = BatchFetcher(torch.device("cuda"), IN_FLIGHT), on(torch.device("cuda"))
    fetcher.name(batch(1, pin=True))
    fetcher.fetch(into)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fetcher.fetch(into)
    torch.cuda._sleep(20_000_000)  # the host is ahead
    seen = []
    for number in range(2, 2 + IN_FLIGHT):
        fetcher.name(batch(number, pin=True))
        graph.replay()
        seen.append(into.storage.clone())
    assert [storage.unique().tolist() for storage in seen] == [[number] for number in range(2, 2 + IN_FLIGHT)]
