"""Cases of the kernel benchmark for tables that every rank has a copy of."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from dlrm_bench.kernels.benchmark.timing import Case, sorted_ids_case
from dlrm_bench.kernels.embedding.row_sums import row_starts, row_sums
from dlrm_bench.kernels.input_dist.sort_ids import SortTable, sort_ids


def row_sums_cases() -> Iterator[Case]:
    for batch in (6912, 512):
        ids, bags = sorted_ids_case([3, 63, 10, 4, 14, 108], batch, 1)
        ordered = torch.empty_like(ids), torch.empty_like(bags)
        sort_ids(ids, SortTable(torch.zeros_like(ids), bags, 202), *ordered)
        starts = row_starts(ordered[0], 202)
        grad, out = torch.randn(len(ids), 128, device="cuda").to(torch.bfloat16), torch.empty(202, 128, device="cuda")
        yield Case(
            "row_sums",
            f"B {batch}, 6 tables, C 128, bf16",
            grad.nbytes + out.nbytes,
            partial(row_sums, grad, ordered[1], starts, out),
        )
