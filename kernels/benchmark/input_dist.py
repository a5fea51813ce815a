"""Benchmark cases for the input dist; the push kernels' cases are in __main__.py."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from dlrm_bench.kernels.benchmark.timing import Case, sorted_ids_case
from dlrm_bench.kernels.input_dist.fetch import fetch_next
from dlrm_bench.kernels.input_dist.gather_segments import Segment, SegmentTable, gather_segments
from dlrm_bench.kernels.input_dist.history_events import POOLS, history_events
from dlrm_bench.kernels.input_dist.pick_rows import PickedTable, Picks, PickTable, pick_rows
from dlrm_bench.kernels.input_dist.sort_ids import SortTable, sort_ids

HOT_ROWS = 40_000_000
ONE_HOT_ROWS = [17295, 3, 7122, 1543, 63, 10, 4, 976, 14, 108]  # all but one of MLPerf's tables of multi-hot size 1


def sort_ids_cases() -> Iterator[Case]:
    """Yields half of MLPerf's ids, as on one of two ranks."""
    for batch in (13824, 1024):
        ids, bags = sorted_ids_case([HOT_ROWS, HOT_ROWS, *ONE_HOT_ROWS], batch, 9)
        table, outs = SortTable(torch.zeros_like(ids), bags, 2 * HOT_ROWS + sum(ONE_HOT_ROWS)), torch.empty(2, len(ids))
        yield Case(
            "sort_ids",
            f"{len(ids)} ids of {table.rows} rows",
            16 * len(ids),
            partial(sort_ids, ids, table, *outs.to(ids).unbind()),
        )


def gather_segments_cases() -> Iterator[Case]:
    for batch, name in ((6912, "G 55296"), (512, "G 4096")):
        segments, at = [], 0
        for hot in (100, 27, 12, 1):
            for rank in range(8):
                segments.append(
                    Segment((rank * 140 + at % 140) * batch, at * 8 * batch + rank * batch * hot, batch * hot)
                )
            at += hot
        table = SegmentTable(segments, torch.device("cuda"))
        source, out = torch.zeros(2, 8 * 140 * batch, dtype=torch.int32, device="cuda")
        yield Case(
            "gather_segments",
            f"{name}, 140 ids a sample",
            8 * len(source),
            partial(gather_segments, source, table, out),
        )


def pick_rows_cases() -> Iterator[Case]:
    """Yields an eighth of the rows of MLPerf's hottest table and of its six hottest, on a rank of 128 and of 8."""
    for batch, parts in ((512 * 128, 1), (3456 * 8, 2)):
        for hots in ((100,), (100, 27, 12, 7, 3, 10)):
            table = PickTable(tuple(PickedTable(hot, 3, 8, 0) for hot in hots), batch, parts, torch.device("cuda"))
            ids = torch.randint(HOT_ROWS, (table.num_ids,), dtype=torch.int32, device="cuda")
            rows, sort_rows, bags = torch.zeros(3, table.num_ids * 5 // 32, dtype=torch.int32, device="cuda")
            offsets, count = (
                torch.zeros(table.num_bags + 1, dtype=torch.int32, device="cuda"),
                torch.zeros_like(ids[:1]),
            )
            yield Case(
                "pick_rows",
                f"{table.num_ids} ids of {len(hots)} table(s), an eighth",
                4 * (2 * table.num_ids + 3 * table.num_ids / 8 + table.num_bags),
                partial(pick_rows, ids, table, Picks(rows, sort_rows, bags, offsets, count)),
            )


def fetch_cases() -> Iterator[Case]:
    """Yields reads of pinned host memory: bound by PCIe, not by GPU memory."""
    for batch in (6912, 512):
        out = torch.empty(batch * 228, dtype=torch.int32, device="cuda")  # an MLPerf batch: 912 bytes a sample
        source = torch.empty(out.shape, dtype=out.dtype, pin_memory=True)
        addresses, taken = torch.tensor([source.data_ptr()]).pin_memory(), torch.zeros((), dtype=torch.int64).cuda()
        yield Case(
            "fetch_next", f"B {batch}, 912 bytes a sample", out.nbytes, partial(fetch_next, addresses, taken, out)
        )


def history_events_cases() -> Iterator[Case]:
    """Yields the histories of 1,024 samples of DLRMv4: neighbouring anchors of 85 users, two of three pools full."""
    users, each, pool = 85, 5000, 1362
    pools = torch.randint(0, 3, (users * each,), dtype=torch.int32, device="cuda")
    start = torch.arange(1020, dtype=torch.int32, device="cuda") // 12 * each
    end = start + each - 11 + torch.arange(1020, dtype=torch.int32, device="cuda") % 12
    first = torch.stack([end - 3 * pool] * POOLS)
    held = 3 * pool
    offsets = torch.arange(1021, device="cuda") * held
    events = torch.empty(1020 * held, dtype=torch.int32, device="cuda")
    yield Case(
        "history_events",
        f"{len(events)} places, {len(pools)} events",
        4 * (len(events) + len(pools)),
        partial(history_events, first, end, offsets, pools, events),
    )
