"""Times every kernel: python -m dlrm_bench.kernels.benchmark [name ...]. One table, by CUDA graph replay.

Bytes are the minimum traffic: gradient rows once per id, weight and state rows once per distinct id, read and written.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dlrm_bench.kernels.benchmark.attention import last_query_attention_cases, silu_attention_cases
from dlrm_bench.kernels.benchmark.dynamic_rows import id_map_cases, initial_rows_cases, place_ids_cases
from dlrm_bench.kernels.benchmark.fp8 import fp8_cases, fp8_copies_cases, fp8_weights_cases
from dlrm_bench.kernels.benchmark.input_dist import (
    HOT_ROWS,
    fetch_cases,
    gather_segments_cases,
    history_events_cases,
    pick_rows_cases,
    sort_ids_cases,
)
from dlrm_bench.kernels.benchmark.single_ids import (
    distinct_rows_cases,
    distinct_sums_cases,
    gather_rows_cases,
    row_wise_adagrad_cases,
)
from dlrm_bench.kernels.benchmark.sorted_ids import row_sums_cases, sorted_adagrad_cases
from dlrm_bench.kernels.benchmark.tiers import find_places_cases, plan_moves_cases, tiered_rows_cases
from dlrm_bench.kernels.benchmark.timing import Case, print_times
from dlrm_bench.kernels.benchmark.tokens import (
    column_sums_cases,
    flat_adam_cases,
    gated_norm_cases,
    norm_cases,
    sorted_sums_cases,
    swish_norm_cases,
    token_input_cases,
    zero_tail_cases,
)
from dlrm_bench.kernels.dense import cross, fused_cross, loss, mlp
from dlrm_bench.kernels.dense.flat_adagrad import flat_adagrad
from dlrm_bench.kernels.dense.peer_sums import peer_sums
from dlrm_bench.kernels.dense.sharded_adagrad import sharded_adagrad
from dlrm_bench.kernels.dense.small_mlp import small_mlp
from dlrm_bench.kernels.embedding import regroup
from dlrm_bench.kernels.embedding.pooled_lookup import LookupTable, PooledTable, pooled_lookup
from dlrm_bench.kernels.embedding.push_columns import PushTable, push_columns
from dlrm_bench.kernels.input_dist.gather_segments import Segment
from dlrm_bench.kernels.input_dist.push_segments import SegmentPushTable, push_segments
from dlrm_bench.kernels.non_finite import (
    GradientTables,
    Watch,
    clear_gradients,
    clear_reported,
    cleared_gradients,
    raise_flag,
    report_together,
)
from dlrm_bench.kernels.peer_tensors import PeerTensors

PEERS = 4  # number of ranks whose buffers a peer-memory kernel reads or writes
BF16 = torch.bfloat16


def push_segments_cases() -> Iterator[Case]:
    hots = (100, 27, 12, 1)
    ids = sum(hots)
    for batch in (6912, 512):
        segments = []
        for rank in range(PEERS):
            starts = [rank * ids + sum(hots[:table]) for table in range(len(hots))]
            segments.append(
                [
                    Segment(start * batch, (start - rank * ids) * PEERS * batch, hot * batch)
                    for start, hot in zip(starts, hots, strict=True)
                ]
            )
        table = SegmentPushTable(segments, torch.device("cuda"))
        source = torch.zeros(PEERS * ids * batch, dtype=torch.int32, device="cuda")
        yield Case(
            "push_segments",
            f"B {batch}, {PEERS * ids} ids a sample, {PEERS} local buffers",
            2 * source.nbytes,
            partial(push_segments, source, table, local_peers(table.out_size, torch.int32)),
        )


def pooled_lookup_cases() -> Iterator[Case]:
    """Yields cases in which all four ranks' outputs are local: the times exclude the cost of NVLink."""
    ranks, columns, device = 4, 64, torch.device("cuda")
    one_very_hot = [(100, HOT_ROWS), (2, 39060), (1, 7122), (1, 17295)]
    rows = [12_000_000, 39060, 17295, 7_424_000, 20265, 3, 7122, 1543, 63, 11_316_796, 2_953_546, 403_346, 10, 2209]
    mixed_tables = list(zip((3, 1, 2, 6, 7, 3, 8, 9, 5, 1, 1, 12, 27, 10), rows, strict=True))
    # Each row is followed by its optimizer state.
    weights = torch.rand(sum(rows for _, rows in one_very_hot), 2, columns, device="cuda")[:, 0]
    for local_batch in (3456, 512):
        for sizes in (one_very_hot, mixed_tables):
            batch, first_row = ranks * local_batch, 0
            tables: list[PooledTable] = []
            ids: list[Tensor] = []
            for hot, rows_of_table in sizes:
                tables.append(PooledTable(hot, first_row, columns * len(tables)))
                ids.append(torch.randint(rows_of_table, (batch * hot,), device="cuda", dtype=torch.int32))
                first_row += rows_of_table
            table, flat_ids = LookupTable(tables, local_batch, ranks, device), torch.cat(ids)
            out = torch.zeros(ranks, local_batch, 3456, dtype=BF16, device="cuda")
            yield Case(
                "pooled_lookup",
                f"G {batch}, {len(tables)} tables, hot {max(sizes)[0]} at most, C {columns}",
                len(flat_ids) * (4 + 4 * columns) + batch * len(tables) * columns * out.itemsize,
                partial(pooled_lookup, weights, flat_ids, table, PeerTensors(out.unbind(), 0)),
            )


def regroup_cases() -> Iterator[Case]:
    for batch in (6912, 512):
        runs, block_columns = [], [32] * 4 + [800] * 4
        for block, columns in enumerate(block_columns):
            for start in range(0, columns, 128):
                matrix_column = 128 + sum(block_columns[:block]) + start
                runs.append(regroup.Run(block, start, matrix_column, min(128, columns - start)))
        table = regroup.RegroupTable(batch, block_columns, runs, torch.device("cuda"))
        matrix = torch.zeros(batch, 3456, dtype=BF16, device="cuda")
        flat = torch.zeros(batch * 3328, dtype=BF16, device="cuda")
        moved = 2 * flat.nbytes
        name = f"[{batch}, 3456], bf16"
        yield Case("regroup_forward", name, moved, partial(regroup.regroup_forward, flat, table, matrix))
        yield Case("regroup_backward", name, moved, partial(regroup.regroup_backward, matrix, table, flat))
        sums = regroup.RegroupSumTable(batch, block_columns, runs, torch.device("cuda"))
        yield Case("regroup_sum", name, moved, partial(regroup.regroup_sum, flat, sums, matrix))


def cross_cases() -> Iterator[Case]:
    for batch in (6912, 512):
        for dtype in (BF16, torch.float32):
            x0, x, y, dy, dx0 = torch.randn(5, batch, 3456, device="cuda").to(dtype).unbind()
            bias, partials = (torch.zeros(*shape, 3456, device="cuda") for shape in ((), (cross.partial_rows(batch),)))
            name = f"[{batch}, 3456], {dtype}"
            yield Case("cross_forward", name, 4 * x.nbytes, partial(cross.cross_forward, x0, x, y, bias, dy))
            for accumulate in (False, True):
                yield Case(
                    "cross_backward",
                    f"{name}{', accumulate' * accumulate}",
                    (6 if accumulate else 5) * x.nbytes,
                    partial(cross.cross_backward, x, x0, y, bias, dy, dx0, partials, accumulate),
                )
            output = partial(cross.cross_output_backward, x, x0, dy, partials)
            yield Case("cross_output_backward", name, 3 * x.nbytes, output)


def fused_cross_cases() -> Iterator[Case]:
    """Yields each kernel; if it replaces a GEMM and a second kernel, these two come first."""

    def in_two_forward(x0: Tensor, x: Tensor, u: Tensor, w: Tensor, bias: Tensor, y: Tensor, out: Tensor) -> None:
        torch.mm(u, w.t(), out=y)
        cross.cross_forward(x0, x, y, bias, out)

    def in_two_backward(g: Tensor, du: Tensor, v: Tensor, *of_cross_backward: Any) -> None:
        cross.cross_backward(g.addmm_(du, v), *of_cross_backward)

    width, depth, layers = 3456, 512, 3
    for batch in (6912, 3456, 512):
        x0, x, y, dx, dy, dx0 = torch.randn(6, batch, width, device="cuda").to(BF16).unbind()
        matrices = list(torch.randn(2 * layers, batch, width, device="cuda").to(BF16).unbind())
        inputs = matrices[:layers], matrices[layers:]
        shapes = (batch, depth), (width, depth), (depth, width)
        u, w, v = ((torch.randn(*shape, device="cuda") / 32).to(BF16) for shape in shapes)
        bias = torch.zeros(width, device="cuda", dtype=BF16)
        fused_sums = torch.zeros(fused_cross.partial_rows(batch, width, x.device), width, device="cuda")
        sums = torch.zeros(cross.partial_rows(batch), width, device="cuda")
        name = f"[{batch}, {width}], depth {depth}, bf16"
        forward, backward = (x0, x, u, w, bias, y, dx), (x, u, v, x0, dx, dy, fused_sums)
        two_backward = partial(in_two_backward, dx, u, v, x0, y, bias, dy, dx0, sums, True)
        yield in_two("cross_forward", name, 4 * x.nbytes, partial(in_two_forward, *forward))
        yield Case("fused_cross_forward", name, 4 * x.nbytes, partial(fused_cross.fused_cross_forward, *forward))
        yield in_two("cross_backward", name, 7 * x.nbytes, two_backward)
        yield Case("fused_cross_backward", name, 4 * x.nbytes, partial(fused_cross.fused_cross_backward, *backward))
        yield Case(
            "fused_cross_input_backward",
            name,
            (2 * layers + 1) * x.nbytes,
            partial(fused_cross.fused_cross_input_backward, *inputs, u, v, dx0),
        )


def in_two(kernel: str, shape: str, moved: float, run: Callable[[], object]) -> Case:
    """Returns the case that a fused kernel replaces: a GEMM followed by `kernel`."""
    return Case(f"GEMM, {kernel}", shape, moved, run)


def mlp_cases() -> Iterator[Case]:
    for batch in (6912, 512):
        for width in (1024, 256):
            z, g, dz = torch.randn(3, batch, width, device="cuda").to(BF16).unbind()
            partials = torch.empty(mlp.partial_rows(batch), width, device="cuda")
            yield Case(
                "bias_relu_backward",
                f"[{batch}, {width}], bf16",
                3 * z.nbytes,
                partial(mlp.bias_relu_backward, g, z, dz, partials),
            )


def loss_cases() -> Iterator[Case]:
    width = 256
    for batch in (6912, 512):
        h, dz = torch.randn(2, batch, width, device="cuda").to(BF16).unbind()
        weight, bias, dlogits = (torch.zeros(n, dtype=BF16, device="cuda") for n in ((1, width), 1, batch))
        labels = torch.ones(batch, device="cuda")
        partials = torch.empty(loss.partial_rows(batch), loss.partial_columns(width, relu=True), device="cuda")
        call = loss.LogitLossBackward(h, weight, bias, labels, dlogits, dz, partials, 8 * batch, relu=True)
        for suffix, predictions in (("", None), (", with predictions", torch.empty(batch, device="cuda"))):
            yield Case(
                "logit_loss_backward",
                f"[{batch}, {width}], bf16{suffix}",
                2 * h.nbytes,
                call._replace(predictions=predictions).launch,
            )
        mean, dbias, dbias_hidden = (torch.zeros(n, device="cuda") for n in (1, 1, width))
        step = torch.zeros((), dtype=torch.int64, device="cuda")
        yield Case(
            "add_up",
            f"{list(partials.shape)}, fp32",
            partials.nbytes,
            partial(loss.add_up, partials, mean, step, dbias, dbias_hidden, batch),
        )


def small_mlp_cases() -> Iterator[Case]:
    widths = (512, 256, 128)
    for batch in (6912, 512):
        shapes = zip(widths, (16, *widths), strict=False)
        weights = [torch.randn(*shape, device="cuda").to(BF16) for shape in shapes]
        biases = [torch.randn(width, device="cuda").to(BF16) for width in widths]
        inputs, *hidden = (torch.empty(batch, width, device="cuda", dtype=BF16) for width in (16, *widths))
        features, out = torch.randn(batch, 13, device="cuda"), torch.empty_like(hidden[-1])
        moved = sum(tensor.nbytes for tensor in (features, *weights, inputs, *hidden, out))
        run = partial(small_mlp, features, weights, biases, inputs, hidden, out)
        yield Case("small_mlp", f"B {batch}, 13-512-256-128", moved, run)


def flat_adagrad_cases() -> Iterator[Case]:
    count = 16_044_544
    master, state = torch.rand(2, count, device="cuda").unbind()
    grad, working = torch.rand(2, count, device="cuda").to(BF16).unbind()
    rate = torch.tensor([0.004], device="cuda")
    yield Case(
        "flat_adagrad",
        f"[{count}], bf16 gradient and copy",
        20 * count,
        partial(flat_adagrad, master, state, grad, rate, 1e-8, working),
    )
    yield Case("flat_adagrad", f"[{count}], fp32", 20 * count, partial(flat_adagrad, master, state, state, rate, 1e-8))


def local_peers(count: int, dtype: torch.dtype) -> PeerTensors:
    """Returns buffers on this GPU that stand in for its peers': the kernel's cost without NVLink's limit."""
    return PeerTensors([torch.zeros(count, device="cuda", dtype=dtype) for _ in range(PEERS)], 0)


def sharded_adagrad_cases() -> Iterator[Case]:
    count = 16_044_544
    size = count // PEERS
    master, state = torch.rand(2, size, device="cuda").unbind()
    rate = torch.tensor([0.004], device="cuda")
    for dtype in (BF16, torch.float32):
        grads, workings = local_peers(size, dtype), local_peers(count, dtype)
        yield Case(
            "sharded_adagrad",
            f"[{size}] x {PEERS} local buffers, {dtype}",
            size * (16 + 2 * PEERS * dtype.itemsize),
            partial(sharded_adagrad, master, state, grads, workings, size, rate, 1e-8),
        )


def peer_sums_cases() -> Iterator[Case]:
    size = 3_542_400 // PEERS  # a cross layer's
    for dtype in (BF16, torch.float32):
        peers, out = local_peers(size, dtype), torch.empty(size, device="cuda", dtype=dtype)
        traffic = (PEERS + 1) * out.nbytes
        yield Case("peer_sums", f"[{size}] of {PEERS} local buffers, {dtype}", traffic, partial(peer_sums, peers, out))


def push_columns_cases() -> Iterator[Case]:
    for batch in (6912, 512):
        columns = 3328 // PEERS
        runs = [regroup.Run(rank, 0, 128 + rank * columns, columns) for rank in range(PEERS)]
        table = PushTable(batch, [columns] * PEERS, [0] * PEERS, runs, torch.device("cuda"))
        for dtype in (BF16, torch.float32):
            matrix = torch.zeros(batch, 3456, dtype=dtype, device="cuda")
            yield Case(
                "push_columns",
                f"[{batch}, 3456] to {PEERS} local buffers, {dtype}",
                2 * batch * 3328 * dtype.itemsize,
                partial(push_columns, matrix, table, local_peers(table.end, dtype)),
            )


def non_finite_cases() -> Iterator[Case]:
    flags, bad = local_peers(PEERS, torch.int32), torch.zeros(25, dtype=torch.int64, device="cuda")
    for batch in (6912, 512):
        losses = torch.rand(batch // 16, 258, device="cuda")[:, 0]
        run = partial(raise_flag, losses, bad, flags)
        yield Case("raise_flag", f"[{len(losses)}] to {PEERS} local buffers", losses.numel() * 32, run)
    gradients = torch.rand(4 * 6912, 832, device="cuda").to(BF16)
    run = partial(clear_gradients, Watch(flags.own, bad[:1]), gradients)
    yield Case("clear_gradients", f"{list(gradients.shape)}, bf16, nothing to clear", gradients.nbytes, run)
    for name, of in (("bf16", gradients), ("fp32", gradients.float())):
        copied = partial(cleared_gradients, Watch(flags.own, bad[:1]), of)
        yield Case("cleared_gradients", f"{list(of.shape)}, {name}, nothing to clear", 2 * of.nbytes, copied)
    of_dense = list(torch.rand(16, 1_000_000, device="cuda").unbind())
    watched, shape = (Watch(flags.own, bad[:1]), of_dense, GradientTables()), "16 of 1 M elements, fp32"
    yield Case("report_together", shape, 64_000_000, partial(report_together, *watched))
    yield Case("clear_reported", f"{shape}, nothing to clear", 0, partial(clear_reported, *watched))


CASES = {
    "silu_attention": silu_attention_cases,
    "last_query_attention": last_query_attention_cases,
    "norm": norm_cases,
    "swish_norm": swish_norm_cases,
    "gated_norm": gated_norm_cases,
    "token_input": token_input_cases,
    "sorted_sums": sorted_sums_cases,
    "zero_tail": zero_tail_cases,
    "column_sums": column_sums_cases,
    "row_sums": row_sums_cases,
    "small_mlp": small_mlp_cases,
    "fetch": fetch_cases,
    "sort_ids": sort_ids_cases,
    "sorted_adagrad": sorted_adagrad_cases,
    "gather_segments": gather_segments_cases,
    "push_segments": push_segments_cases,
    "pick_rows": pick_rows_cases,
    "distinct_rows": distinct_rows_cases,
    "gather_rows": gather_rows_cases,
    "tiered_rows": tiered_rows_cases,
    "find_places": find_places_cases,
    "plan_moves": plan_moves_cases,
    "distinct_sums": distinct_sums_cases,
    "row_wise_adagrad": row_wise_adagrad_cases,
    "id_map": id_map_cases,
    "initial_rows": initial_rows_cases,
    "place_ids": place_ids_cases,
    "pooled_lookup": pooled_lookup_cases,
    "regroup": regroup_cases,
    "cross": cross_cases,
    "fused_cross": fused_cross_cases,
    "fp8": fp8_cases,
    "fp8_copies": fp8_copies_cases,
    "fp8_weights": fp8_weights_cases,
    "mlp": mlp_cases,
    "loss": loss_cases,
    "flat_adagrad": flat_adagrad_cases,
    "flat_adam": flat_adam_cases,
    "history_events": history_events_cases,
    "sharded_adagrad": sharded_adagrad_cases,
    "peer_sums": peer_sums_cases,
    "push_columns": push_columns_cases,
    "non_finite": non_finite_cases,
}


if __name__ == "__main__":
    parser = ArgumentParser(prog="python -m dlrm_bench.kernels.benchmark", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="name", help=f"kernels to time; all by default: {', '.join(CASES)}")
    names = parser.parse_args().names
    unknown = [name for name in names if name not in CASES]
    if unknown:
        sys.exit(f"error: there is no kernel {unknown[0]!r}: choose from {', '.join(CASES)}")
    if not torch.cuda.is_available():
        sys.exit("error: timing kernels needs a CUDA GPU, and this machine has none")
    print_times(CASES, names)
