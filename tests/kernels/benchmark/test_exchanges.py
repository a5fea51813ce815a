"""Exchanges of rows by host threads and the copy engine: the rows that the kernel exchanges, and rates of what runs at
once."""

import time

import pytest
import torch

from dlrm_bench.kernels.benchmark import exchanges
from dlrm_bench.kernels.benchmark.exchanges import CopiedRows, Registered, rates
from dlrm_bench.kernels.embedding.tiered_rows import Tiers, plain_exchange_rows

PLACES = [torch.device("cpu"), pytest.param(torch.device("cuda", 0), marks=pytest.mark.gpu)]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("device", PLACES)
def test_host_threads_exchange_what_the_kernel_exchanges(device: torch.device, threads: int) -> None:
    rows, columns, moved = 300, 8, 50
    host = Registered(rows, columns, device, huge=True)
    host.tensor.copy_(torch.arange(host.tensor.numel()).view_as(host.tensor))
    tiers = Tiers(-host.tensor.to(device), host.tensor)
    expected = Tiers(tiers.device.clone().cpu(), host.tensor.clone())
    on_device = torch.randperm(rows, device=device)[:moved]
    copied = CopiedRows(tiers, on_device, threads)
    bounds = torch.tensor([0, moved], dtype=torch.int32)
    tiers.device.copy_(expected.device)  # captures have run the copies
    for _ in range(3):
        in_host = torch.randperm(rows)[:moved]
        copied.exchange(in_host)
        plain_exchange_rows(expected, on_device.int().cpu(), in_host.int(), bounds)
        assert torch.equal(tiers.device.cpu(), expected.device)
        assert torch.equal(tiers.host, expected.host)
    assert not torch.equal(tiers.host, tiers.device.cpu())
    copied.close()
    host.free()


def test_memory_says_which_pages_it_has() -> None:
    small = Registered(1 << 13, 128, torch.device("cpu"), huge=False)
    assert small.huge_share() == 0
    assert 0 <= Registered(1 << 13, 128, torch.device("cpu"), huge=True).huge_share() <= 1


def test_works_run_at_once_and_are_counted() -> None:
    def work() -> None:
        time.sleep(0.01)

    (one,), both = rates([work], 0.05, 0.4), rates([work, work], 0, 0.4)
    assert all(10 < rate < 101 for rate in (one, *both))
    (slow,) = rates([lambda: time.sleep(0.2)], 0, 0.1)
    assert 1 < slow < 5.1, "twice"


def test_a_kernel_without_huge_pages_gives_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchanges.mmap, "MADV_HUGEPAGE", 1 << 20)  # no advice that any kernel knows
    assert not Registered(16, 8, torch.device("cpu"), huge=True).tensor.any()
