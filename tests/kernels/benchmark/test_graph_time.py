"""Times of the host's calls; times of graphs need a GPU."""

import time

import pytest
import torch

from dlrm_bench.kernels.benchmark.graph_time import graph_us, host_us


def test_a_call_counts_alone_or_with_the_devices_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device's work is what a wait for it takes, from the second one on: the first lies before the calls."""
    waits: list[float] = []

    def synchronize() -> None:
        time.sleep(0.02)
        waits.append(0.02)

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    called: list[int] = []
    alone = host_us(lambda: called.append(1), 10)
    assert (len(called), len(waits)) == (10, 1)
    waited = host_us(lambda: called.append(1), 10, wait=True)
    assert (len(called), len(waits)) == (20, 3)
    assert alone < 1000
    assert waited > 2000


@pytest.mark.gpu
def test_a_graph_takes_longer_for_more_work() -> None:
    few, many = (torch.zeros(count, device="cuda") for count in (1 << 10, 1 << 28))
    assert graph_us(lambda: many.add_(1)) > 10 * graph_us(lambda: few.add_(1))
