"""Kernel timing: the benchmark's cases, their timing, and the table that lists them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dlrm_bench.kernels.benchmark.graph_time import graph_us

_COPIED = 1 << 30
"""Bytes that the reference copy reads: far more than a cache holds."""


class Case(NamedTuple):
    kernel: str
    """The function's name."""
    shape: str
    bytes: float
    run: Callable[[], object]


def sorted_ids_case(tables: list[int], batch: int, hot: int) -> tuple[Tensor, Tensor]:
    """Returns linear ids and bags, int32: uniform ids of `tables`, one bag of `hot` ids per table and sample."""
    ids, bags, first_row = [], [], 0
    for table, rows in enumerate(tables):
        ids.append(first_row + torch.randint(rows, (batch * hot,), device="cuda", dtype=torch.int32))
        bag = torch.arange(batch, device="cuda", dtype=torch.int32) * len(tables) + table
        bags.append(bag.repeat_interleave(hot))
        first_row += rows
    return torch.cat(ids), torch.cat(bags)


def print_times(cases: Mapping[str, Callable[[], Iterator[Case]]], names: Sequence[str]) -> None:
    """Times the cases of these names, or all, and prints one line each, with its rate relative to a large copy."""
    copy = _copy_rate()
    print(f"{'kernel':20} {'shape':48} {'us':>8} {'GB/s':>7} {'of copy':>8}")
    for name in names or cases:
        for case in cases[name]():
            us = graph_us(case.run)
            rate = case.bytes / us * 1e6
            print(
                f"{case.kernel:20} {case.shape:48} {us:8.1f} {rate / 1e9:7.0f} {rate / copy:8.0%}",
                flush=True,
            )


def _copy_rate() -> float:
    """Returns bytes per second, read plus written, of an element-wise kernel, which copies faster than the driver."""
    source = torch.zeros(_COPIED // 4, device="cuda")
    target = torch.empty_like(source)
    return 2 * _COPIED / graph_us(lambda: torch.neg(source, out=target)) * 1e6
