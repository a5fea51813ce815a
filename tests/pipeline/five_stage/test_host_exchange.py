"""Numbers of all ranks reach all ranks, through shared memory and through gloo, however far apart the ranks are."""

import multiprocessing
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.five_stage import host_exchange as module
from dlrm_bench.pipeline.five_stage.host_exchange import Gloo, SharedMemory, host_exchange

MANY = 300


def number(rank: int, exchange: int) -> int:
    """Of both signs, and zero."""
    return (exchange * 7 + rank * 3) % 11 - 5


def exchanged(ranks: Ranks, folders: list[str]) -> tuple[str, bool, list[list[int]]]:
    """Returns the kind of exchange, whether its folder is empty, and all numbers, of ranks that pause at random."""
    module.FOLDER = Path(folders[ranks.rank])
    exchange = host_exchange(dist.group.WORLD)
    pauses, found = random.Random(ranks.rank), []
    for i in range(MANY):
        exchange.start(number(ranks.rank, i))
        if pauses.random() < 0.1:
            time.sleep(0.003 * pauses.random())
        found.append(exchange.finish())
    left = any(module.FOLDER.glob("*"))
    exchange.start(0)
    exchange.close()
    return type(exchange).__name__, not left, found


@pytest.mark.parametrize("kind", [SharedMemory, Gloo])
def test_all_ranks_get_all_numbers(run_ranks, tmp_path, kind):
    """Without shared memory, here without its folder, through gloo."""
    folder = str(tmp_path if kind is SharedMemory else tmp_path / "missing")
    for name, empty, found in run_ranks(2, exchanged, [folder, folder]):
        assert (name, empty) == (kind.__name__, True)
        assert found == [[number(0, i), number(1, i)] for i in range(MANY)]


def elsewhere(ranks: Ranks) -> str:
    """Returns the kind of exchange where rank 1 cannot open the file of rank 0, as on another node."""
    if ranks.rank == 1:

        def refuse(*_: Any) -> None:
            raise FileNotFoundError

        module.SharedMemory.__init__ = refuse  # type: ignore[assignment, method-assign]
    exchange = host_exchange(dist.group.WORLD)
    exchange.start(ranks.rank)
    assert exchange.finish() == [0, 1]
    exchange.close()
    return type(exchange).__name__


def test_ranks_without_common_memory_use_gloo(run_ranks):
    assert run_ranks(2, elsewhere) == ["Gloo", "Gloo"]


def take_part_once(path: Path) -> None:
    other = SharedMemory(path, 1, 2)
    other.start(3)
    other.finish()


def test_a_rank_that_has_ended_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "FOLDER", tmp_path)
    monkeypatch.setattr(module, "_ALIVE_S", 0.05)
    path = module._make(2)
    assert path is not None
    own = SharedMemory(path, 0, 2)
    process = multiprocessing.get_context("fork").Process(target=take_part_once, args=(path,))
    process.start()
    own.start(4)
    assert own.finish() == [4, 3]
    process.join()
    own.start(4)
    with pytest.raises(RuntimeError, match="rank 1 has ended before this batch"):
        own.finish()


def test_a_rank_that_does_not_come_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "FOLDER", tmp_path)
    monkeypatch.setattr(module, "_ALIVE_S", 0.05)
    monkeypatch.setattr(module, "_TIMEOUT_S", 0.2)
    path = module._make(2)
    assert path is not None
    barrier = multiprocessing.get_context("fork").Barrier(2)

    def wait() -> None:
        other = SharedMemory(path, 1, 2)
        barrier.wait()
        barrier.wait()
        other.close()

    process = multiprocessing.get_context("fork").Process(target=wait)
    process.start()
    own = SharedMemory(path, 0, 2)
    barrier.wait()
    own.start(4)
    with pytest.raises(RuntimeError, match=r"ranks \[1\] have not come to this batch within 0 s"):
        own.finish()
    barrier.wait()
    process.join()
