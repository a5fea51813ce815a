"""Benchmark cases for unpooled embeddings, as 1,024 samples of DLRMv4 on one of two ranks: 461,264 places, a third of
which hold one of a hundred rows and the rest any of 50,000."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from dlrm_bench.kernels.benchmark.timing import Case
from dlrm_bench.kernels.embedding.distinct_rows import DistinctRows, distinct_rows, owner_keys
from dlrm_bench.kernels.embedding.distinct_sums import distinct_sums
from dlrm_bench.kernels.embedding.gather_rows import gather_rows
from dlrm_bench.kernels.embedding.row_wise_adagrad import row_wise_adagrad
from dlrm_bench.kernels.input_dist.sort_ids import sort_rows

_PLACES, _COLUMNS, _OWNERS, _ROWS, _DISTINCT, _ENTRIES = 3 * 150_000 + 11 * 1024, 512, 2, 4_000_000, 50_000, 32_000


def _keys() -> Tensor:
    named = torch.randint(_OWNERS * _ROWS, (_DISTINCT,), device="cuda", dtype=torch.int32)
    which = torch.randint(_DISTINCT, (_PLACES,), device="cuda")
    which[: _PLACES // 3] %= 100
    return named[which]


def _in_order(keys: Tensor) -> tuple[Tensor, Tensor]:
    ordered, places = torch.empty_like(keys), torch.empty_like(keys)
    sort_rows(keys, torch.arange(len(keys), dtype=torch.int32, device="cuda"), ordered, places)
    return ordered, places


def _distinct() -> tuple[Tensor, DistinctRows]:
    """Returns the places of keys in sorted order, and the lists of their distinct rows."""
    ordered, places = _in_order(_keys())
    slots = torch.empty(_PLACES, dtype=torch.int32, device="cuda")
    lists = torch.empty(_OWNERS, _ENTRIES, dtype=torch.int32, device="cuda")
    out = DistinctRows(lists, slots, torch.empty(1, dtype=torch.int32, device="cuda"))
    distinct_rows(ordered, _ROWS, out)
    return places, out


def distinct_rows_cases() -> Iterator[Case]:
    ids, (ordered, _) = _keys(), _in_order(_keys())
    shape, (_, out) = f"{_PLACES} places, {_OWNERS} owners", _distinct()
    keys = torch.empty_like(ids)
    yield Case(
        "owner_keys",
        shape,
        12 * _PLACES,
        partial(owner_keys, ids, torch.zeros_like(ids), _OWNERS, 2 * _OWNERS * _ROWS, keys),
    )
    yield Case(
        "distinct_rows",
        shape,
        8 * _PLACES + 4 * out.rows.numel(),
        partial(distinct_rows, ordered, _ROWS, out),
    )


def gather_rows_cases() -> Iterator[Case]:
    places, lists = _distinct()
    rows = torch.randn(lists.rows.numel(), _COLUMNS, device="cuda")
    for dtype in (torch.float32, torch.bfloat16):
        out = torch.empty(_PLACES, _COLUMNS, dtype=dtype, device="cuda")
        yield Case(
            "gather_rows",
            f"{_PLACES} x {_COLUMNS}, {str(dtype).removeprefix('torch.')}",
            out.nbytes + 4 * _DISTINCT * _COLUMNS,
            partial(gather_rows, rows, lists.slots, out, places),
        )


def distinct_sums_cases() -> Iterator[Case]:
    places, lists = _distinct()
    gradients = torch.randn(_PLACES, _COLUMNS, device="cuda")
    sums = torch.empty(lists.rows.numel(), _COLUMNS, device="cuda")
    yield Case(
        "distinct_sums",
        f"{_PLACES} x {_COLUMNS}",
        gradients.nbytes + 4 * _DISTINCT * _COLUMNS,
        partial(distinct_sums, gradients, lists.slots, places, sums),
    )


def row_wise_adagrad_cases() -> Iterator[Case]:
    """Yields one rank's update by places, and an update by the rows of two lists."""
    weights = torch.randn(_OWNERS * _ROWS, _COLUMNS, device="cuda")
    state, rate = torch.rand(len(weights), 1, device="cuda"), torch.tensor([1e-6], device="cuda")
    listed = torch.randint(_ROWS, (2 * _DISTINCT // _OWNERS,), device="cuda", dtype=torch.int32)
    for name, rows, distinct in (("places", _keys(), _DISTINCT), ("rows of two lists", listed, len(listed))):
        gradients = torch.randn(len(rows), _COLUMNS, device="cuda")
        yield Case(
            "row_wise_adagrad",
            f"{len(rows)} {name}",
            gradients.nbytes + 8 * distinct * _COLUMNS,
            partial(row_wise_adagrad, weights, state, gradients, *_in_order(rows), rate, 1e-8),
        )
