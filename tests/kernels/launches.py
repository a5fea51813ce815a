"""Launches of the Triton kernels of DLRMv4's static pipeline, of small sizes, on whatever tensors have no GPU."""

import torch

from dlrm_bench.kernels.dense import (
    flat_adam,
    gated_norm,
    last_query_attention,
    norm,
    silu_attention,
    sorted_sums,
    swish_norm,
    token_input,
    zero_tail,
)
from dlrm_bench.kernels.dense._dropout import Dropout
from dlrm_bench.kernels.embedding import (
    distinct_rows,
    distinct_sums,
    gather_rows,
    id_map,
    initial_rows,
    row_wise_adagrad,
)
from dlrm_bench.kernels.input_dist import fetch, gather_segments, history_events, push_segments
from dlrm_bench.kernels.input_dist.gather_segments import Segment
from dlrm_bench.kernels.non_finite import Watch
from dlrm_bench.kernels.peer_tensors import PeerTensors

OVER_TOKENS = (
    gated_norm,
    history_events,
    last_query_attention,
    norm,
    silu_attention,
    sorted_sums,
    token_input,
    zero_tail,
)
OVER_IDS = (
    distinct_rows,
    distinct_sums,
    fetch,
    flat_adam,
    gather_rows,
    gather_segments,
    id_map,
    initial_rows,
    push_segments,
    row_wise_adagrad,
    swish_norm,
)
SAMPLES, WIDTH, LONGEST, EVENTS, RANKS = 6, 16, 300, 64, 3
OFFSETS = torch.arange(SAMPLES + 1) * 10
DROPOUT = Dropout(0.2, torch.zeros(1, dtype=torch.int64), 1)


def int32(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def layers(tokens: int, dtype: torch.dtype = torch.float32) -> None:
    """Launches what a layer does over these tokens, forward and backward."""
    x, weight, end = torch.zeros(tokens, WIDTH, dtype=dtype), torch.zeros(WIDTH), OFFSETS[-1:]
    norm.triton_norm_forward(x, weight, weight, end, x, 1e-6)
    norm.triton_norm_backward(x, x, weight, weight, end, x, x, x, weight, weight, 1e-6)
    joined = torch.zeros(tokens, 3 * WIDTH, dtype=dtype)
    gated_norm.triton_gated_norm_forward(x, x, weight, weight, end, DROPOUT, joined, 1e-6)
    gated_norm.triton_gated_norm_backward(joined, x, x, weight, weight, end, DROPOUT, x, x, weight, weight, 1e-6)
    q = k = v = out = x.unflatten(1, (1, WIDTH))
    sequences = silu_attention.Sequences(OFFSETS, torch.ones_like(OFFSETS[1:]), LONGEST)
    silu_attention.triton_silu_attention_forward(q, k, v, sequences, out)
    silu_attention.triton_silu_attention_backward(out, q, k, v, sequences, q, k, v)
    jagged, last = last_query_attention.Jagged(OFFSETS, LONGEST), torch.zeros(SAMPLES, 1, WIDTH, dtype=dtype)
    last_query_attention.triton_last_query_attention_forward(last, k, v, jagged, last)
    last_query_attention.triton_last_query_attention_backward(last, last, k, v, jagged, last, k, v)
    zero_tail.triton_zero_tail(x, end)


def first_input(tokens: int, dtype: torch.dtype = torch.float32) -> None:
    """Launches what makes these tokens, forward and backward."""
    count = tokens - 9 * SAMPLES
    event, query = int32(count), int32(SAMPLES)
    places = token_input.TokenPlaces(OFFSETS, event, event, query, 8, LONGEST)
    events, context = torch.zeros(EVENTS + SAMPLES, WIDTH, dtype=dtype), torch.zeros(SAMPLES, 8, WIDTH, dtype=dtype)
    position, time = torch.zeros(LONGEST, WIDTH), torch.zeros(20, WIDTH)
    x, rows = torch.zeros(tokens, WIDTH, dtype=dtype), token_input.no_rows(tokens, events, time)
    token_input.triton_token_input_forward(events, context, position, time, places, 4.0, DROPOUT, x, rows)
    token_input.triton_token_input_backward(x, places, DROPOUT, x, position)
    sorted_sums.triton_sorted_sums(x, sorted_sums.sort_keys(rows.event, len(events)), 4.0, events)
    history_events.triton_history_events(int32(3, SAMPLES), query, OFFSETS, int32(3, EVENTS + 1), event)


def lookups(count: int, dtype: torch.dtype = torch.float32) -> None:
    """Launches what embedding stages do with this number of ids, and the update of dense weights."""
    ids, rows = int32(count), torch.zeros(count, WIDTH, dtype=dtype)
    table, state, one = torch.zeros(50, WIDTH), torch.zeros(50, 1), torch.zeros(1)
    watch = Watch(int32(1), torch.zeros(1, dtype=torch.int64))
    distinct_rows.triton_owner_keys(ids, ids, RANKS, 50, ids)
    distinct_rows.triton_distinct_rows(ids, 50, distinct_rows.DistinctRows(int32(RANKS, 40), ids, int32(1)))
    gather_rows.triton_gather_rows(table, ids, rows, ids)
    distinct_sums.triton_distinct_sums(rows, ids, ids, rows)
    row_wise_adagrad.triton_row_wise_adagrad(table, state, rows, ids, ids, one, 1e-8, 0.5, watch)
    of_tables = initial_rows.RowsOfTables(OFFSETS, OFFSETS, torch.zeros(7), torch.zeros(7), 0, RANKS)
    initial_rows.triton_initial_rows(table, ids, ids, of_tables)
    slots = id_map.empty_slots(200, torch.device("cpu"))
    id_map.triton_find_ids(ids, slots, ids)
    id_map.triton_insert_ids(ids, ids, slots, int32(201))
    swish_norm.triton_swish_norm_forward(rows, one.expand(WIDTH), one.expand(WIDTH), rows, 1e-5)
    swish_norm.triton_swish_norm_backward(
        rows, rows, one.expand(WIDTH), one.expand(WIDTH), rows, torch.zeros(WIDTH), torch.zeros(WIDTH), 1e-5
    )
    adam = flat_adam.AdamState(one, torch.zeros(count), torch.zeros(count))
    options = flat_adam.AdamOptions((0.9, 0.999), 1e-8, 0.4)
    flat_adam.triton_flat_adam(torch.zeros(count), adam, torch.zeros(count), torch.zeros(4), options)
    for is_new in (int32(1), None):
        taken = torch.zeros((), dtype=torch.int64)
        fetch.triton_fetch_next(torch.zeros(8, dtype=torch.int64), taken, int32(4096), is_new)
    segments, device = [Segment(0, 0, count)], torch.device("cpu")
    gather_segments.triton_gather_segments(ids, gather_segments.SegmentTable(segments, device), ids)
    table_of_pushes = push_segments.SegmentPushTable([segments], device)
    push_segments.triton_push_segments(ids, table_of_pushes, PeerTensors([ids], 0))
