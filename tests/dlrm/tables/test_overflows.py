"""The agreement on overflows: a rank's wait, and its end."""

import subprocess
import sys
from typing import NoReturn

import pytest
import torch

from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.dlrm.tables.overflows import Overflows


def greatest(ranks: Ranks, excesses: list[int | None]) -> int:
    overflows = Overflows(ranks)
    out, excess = overflows.empty(), excesses[ranks.rank]
    overflows.reset(out)
    overflows.exchange(None if excess is None else torch.tensor([excess], dtype=torch.int32), out)
    return overflows.largest(out)


def test_all_ranks_know_the_greatest_excess_of_any(run_ranks) -> None:
    assert run_ranks(2, greatest, [-3, 5]) == [5, 5]
    assert run_ranks(2, greatest, [None, -7]) == [-1, -1]


def test_a_device_that_fails_is_not_waited_for(monkeypatch):
    """It never writes the number that the host polls."""

    class Failed:
        def query(self) -> NoReturn:
            raise RuntimeError("CUDA error: device-side assert triggered")

    device = torch.device("cpu")
    overflows = Overflows(Ranks(rank=0, local_rank=0, world_size=1, local_world_size=1, device=device))
    out = overflows.empty()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", Failed)
    with pytest.raises(RuntimeError, match="device-side assert"):
        overflows.largest(out)


FAILS = """
import torch
from dlrm_bench.dlrm.tables import overflows
never = torch.full((1,), overflows.NOT_YET, dtype=torch.int32, pin_memory=True)
torch._assert_async(torch.zeros((), device="cuda"))
overflows.arrived(never)
"""


@pytest.mark.gpu
def test_an_assertion_on_the_device_ends_the_wait():
    ended = subprocess.run([sys.executable, "-c", FAILS], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 1
    assert "in arrived" in ended.stderr
    assert "device-side assert" in ended.stderr
