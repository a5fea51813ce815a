"""Ranks as torchrun tells them."""

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dlrm_bench.dlrm.runtime.ranks import Ranks
from tests.launched import fork, wait

TORCHRUN = {
    "RANK": "9",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "16",
    "LOCAL_WORLD_SIZE": "8",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)


def gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def test_global_and_local_rank(monkeypatch):
    gpus(monkeypatch, 8)
    ranks = Ranks.from_environment()
    assert (ranks.rank, ranks.world_size) == (9, 16)
    assert (ranks.local_rank, ranks.local_world_size) == (1, 8)
    assert ranks.device == torch.device("cuda", 1)


def test_without_gpus(monkeypatch):
    gpus(monkeypatch, 0)
    assert Ranks.from_environment().device == torch.device("cpu")


@pytest.mark.parametrize("missing", TORCHRUN)
def test_a_missing_variable_is_named(monkeypatch, missing):
    monkeypatch.delenv(missing)
    with pytest.raises(ValueError, match=f"^{missing} not set: start this program with torchrun"):
        Ranks.from_environment()


def test_more_ranks_than_gpus(monkeypatch):
    gpus(monkeypatch, 4)
    with pytest.raises(ValueError, match=r"8 ranks on a node with 4 GPU.*--nproc_per_node 4"):
        Ranks.from_environment()


def joined_by_both(connected: Path) -> int:
    """Rank 1 is a second late; ends with 2 if a rank leaves before both are connected."""
    ranks = Ranks.from_environment()
    if ranks.rank == 1:
        start = dist.init_process_group

        def start_late(backend: str) -> None:
            start(backend)
            time.sleep(1)
            connected.touch()

        dist.init_process_group = start_late
    ranks.init_process_group()
    return 0 if connected.exists() else 2


def test_no_rank_leaves_before_all_are_connected(tmp_path):
    ended = wait(fork(2, tmp_path, joined_by_both, tmp_path / "connected"), tmp_path)
    assert ended.statuses == [0, 0], ended
