"""Times of the host's calls; times of graphs need a GPU."""

from types import SimpleNamespace

import pytest
import torch

from dlrm_bench.kernels.benchmark import graph_time
from dlrm_bench.kernels.benchmark.graph_time import graph_us, host_us


def test_a_call_counts_alone_or_with_the_devices_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds of a clock that each call moves on by one, and each wait for the device by 20: the first wait lies before
    the calls."""
    clock = [0.0]

    def passes(seconds: float) -> None:
        clock[0] += seconds

    monkeypatch.setattr(graph_time, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: passes(20.0))
    assert host_us(lambda: passes(1.0), 10) == 1e6
    assert clock == [20.0 + 10.0]
    assert host_us(lambda: passes(1.0), 10, wait=True) == 3e6
    assert clock == [30.0 + 20.0 + 10.0 + 20.0]


@pytest.mark.gpu
def test_a_graph_takes_longer_for_more_work() -> None:
    few, many = (torch.zeros(count, device="cuda") for count in (1 << 10, 1 << 28))
    assert graph_us(lambda: many.add_(1)) > 10 * graph_us(lambda: few.add_(1))
