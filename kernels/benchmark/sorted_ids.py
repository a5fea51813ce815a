"""Benchmark cases for updates and sums over the rows of sorted ids."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from dlrm_bench.kernels.benchmark.input_dist import HOT_ROWS, ONE_HOT_ROWS
from dlrm_bench.kernels.benchmark.timing import Case, sorted_ids_case
from dlrm_bench.kernels.embedding.row_sums import row_starts, row_sums
from dlrm_bench.kernels.embedding.sorted_adagrad import sorted_adagrad
from dlrm_bench.kernels.input_dist.sort_ids import SortTable, sort_ids

BF16 = torch.bfloat16


def sorted_adagrad_cases() -> Iterator[Case]:
    memory = torch.empty(2 * HOT_ROWS * 128, device="cuda").uniform_(0, 1)
    rate = torch.tensor([0.004], device="cuda")
    for batch in (55296, 4096):
        for tables, hot, widths in (
            ([HOT_ROWS], 100, (16, 32, 64, 128)),
            ([HOT_ROWS], 12, (128,)),
            (ONE_HOT_ROWS, 1, (128,)),
        ):
            ids, bags = sorted_ids_case(tables, batch, hot)
            name = f"G {batch}, {len(tables)} table(s), hot {hot}"
            ordered = torch.empty_like(ids), torch.empty_like(bags)
            sort_ids(ids, SortTable(torch.zeros_like(ids), bags, sum(tables)), *ordered)
            distinct = len(torch.unique_consecutive(ordered[0]))
            for columns in widths:
                rows = sum(tables)
                weights, state = memory[: 2 * rows * columns].view(rows, 2, columns).unbind(1)
                for dtype in (BF16,) if columns < 128 else (BF16, torch.float32):
                    grad = torch.randn(batch, len(tables) * columns, device="cuda").to(dtype)
                    yield Case(
                        "sorted_adagrad",
                        f"{name}, C {columns}, {grad.dtype}",
                        len(ids) * (8 + columns * grad.itemsize) + distinct * columns * 16,
                        partial(sorted_adagrad, weights, state, grad, *ordered, rate, 1e-8),
                    )


def row_sums_cases() -> Iterator[Case]:
    for batch in (6912, 512):
        ids, bags = sorted_ids_case([3, 63, 10, 4, 14, 108], batch, 1)
        ordered = torch.empty_like(ids), torch.empty_like(bags)
        sort_ids(ids, SortTable(torch.zeros_like(ids), bags, 202), *ordered)
        starts = row_starts(ordered[0], 202)
        grad, out = torch.randn(len(ids), 128, device="cuda").to(BF16), torch.empty(202, 128, device="cuda")
        yield Case(
            "row_sums",
            f"B {batch}, 6 tables, C 128, bf16",
            grad.nbytes + out.nbytes,
            partial(row_sums, grad, ordered[1], starts, out),
        )
