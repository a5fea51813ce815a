"""Traces: a real one of a CPU, and made-up ones of a GPU in which every number is known."""

import gzip
import json
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from dlrm_bench.bench.doctor.trace import ITERATION, read_trace
from dlrm_bench.bench.profile.kernel_names import OTHER, STAGES
from dlrm_bench.bench.profile.trace import summarize_trace
from tests.bench.profile.gpu_traces import (
    GRAPH,
    SEND_RECV,
    call,
    event,
    graph_trace,
    on_gpu,
    stock_trace,
    two_thread_trace,
)


def test_counts_are_per_iteration_and_leave_out_what_came_before() -> None:
    calls = summarize_trace(stock_trace()).calls
    assert calls == {"kernel_launches": 4, "graph_launches": 0, "stream_syncs": 1, "memcpy_calls": 1, "d2h_copies": 1}


def test_host_time_is_exclusive_and_complete() -> None:
    stages = summarize_trace(stock_trace()).host_stages_ms
    assert stages == pytest.approx(
        {
            "input_dist": 0.2,
            "embedding_forward": 0.1,
            "dense_forward_backward": 0.2 + 0.1,  # forward without its lookup; a node of autograd's thread
            "embedding_backward": 0,
            "dense_update": 0.05,
            OTHER: 0.45,
        }
    )


def test_gpu_time_is_that_of_the_stage_that_launched_it() -> None:
    summary = summarize_trace(stock_trace())
    assert summary.gpu is not None
    assert summary.gpu.busy_ms == pytest.approx(0.25)
    assert summary.gpu.idle_fraction == pytest.approx(1 - 2 * 250 / (1970 - 40))
    assert summary.gpu.computing_ms == summary.gpu.busy_ms
    assert summary.gpu_stages_ms == pytest.approx(
        {
            "input_dist": 0.01,
            "embedding_forward": 0.1,
            "dense_forward_backward": 0.15,
            "embedding_backward": 0,
            "dense_update": 0.02,
            OTHER: 0,
        }
    )


def test_a_graph_of_a_whole_iteration() -> None:
    summary = summarize_trace(graph_trace())
    assert summary.calls == {
        "kernel_launches": 0,
        "graph_launches": 1,
        "stream_syncs": 0,
        "memcpy_calls": 1,
        "d2h_copies": 0,
    }
    expected = dict.fromkeys((*STAGES, OTHER), 0.0)
    for _, _, us, _, stage in GRAPH:
        expected[stage] += us / 1000
    expected["input_dist"] += 0.012  # the copy
    assert summary.gpu_stages_ms == pytest.approx(expected)
    assert summary.kernels is not None
    assert sum(kernel["us"] for kernel in summary.kernels) == pytest.approx(sum(expected.values()) * 1000)
    names = [(kernel["name"], kernel["stage"], kernel["calls"], round(kernel["us"], 6)) for kernel in summary.kernels]
    assert names[:3] == [
        ("GEMM (nvjet)", "dense_forward_backward", 4, 170),
        ("NCCL ReduceScatter_Sum_bf16_RING_LL", "dense_forward_backward", 1, 100),
        ("sorted_adagrad: _sorted_adagrad_kernel", "embedding_backward", 1, 90),
    ]


def test_the_timeline_shows_what_overlaps() -> None:
    """Whatever the host's lead; a copy for a later batch may run before the iteration that launched it."""
    timeline = summarize_trace(graph_trace()).timeline
    assert timeline == pytest.approx(
        {
            "input_dist": pytest.approx({"start_ms": -0.1, "end_ms": 0.085, "busy_ms": 0.012 + 0.083}),
            "embedding_forward": pytest.approx({"start_ms": 0, "end_ms": 0.07, "busy_ms": 0.07}),
            "dense_forward_backward": pytest.approx({"start_ms": 0.004, "end_ms": 0.335, "busy_ms": 0.28}),
            "embedding_backward": pytest.approx({"start_ms": 0.18, "end_ms": 0.325, "busy_ms": 0.145}),
            "dense_update": pytest.approx({"start_ms": 0, "end_ms": 0.35, "busy_ms": 0.035}),
        }
    )


def test_a_second_launching_thread_counts_and_a_graph_in_a_stage_belongs_to_it() -> None:
    summary = summarize_trace(two_thread_trace())
    assert summary.calls == {
        "kernel_launches": 1,
        "graph_launches": 1,
        "stream_syncs": 2,
        "memcpy_calls": 0,
        "d2h_copies": 0,
    }
    assert summary.host_stages_ms["input_dist"] == pytest.approx(0.15)
    assert summary.gpu_stages_ms is not None
    assert {stage: round(ms, 6) for stage, ms in summary.gpu_stages_ms.items() if ms} == {
        "input_dist": 0.03,
        "dense_forward_backward": 0.062,
    }


def test_a_range_of_ours_decides_for_what_others_open_within_it() -> None:
    """TorchRec awaits the ids' all-to-all under the name of the pooled vectors', and autograd runs on this thread."""
    summary = summarize_trace(
        [
            event("user_annotation", ITERATION, 0, 200),
            event("user_annotation", "input_dist", 10, 60),
            event("user_annotation", "[output_dist_wait]_[ebc]_[table_wise]", 20, 40),
            call("cudaGraphLaunch", 30, 20, 1),
            event("user_annotation", "embedding_backward", 80, 100),
            event("cpu_op", "autograd::engine::evaluate_function: _PooledBackward", 90, 50),
            call("cudaGraphLaunch", 100, 20, 2),
            on_gpu(SEND_RECV, 60, 30, 1),
            on_gpu(SEND_RECV, 130, 10, 2),
        ]
    )
    assert summary.host_stages_ms == pytest.approx(
        dict.fromkeys((*STAGES, OTHER), 0) | {"input_dist": 0.06, "embedding_backward": 0.1, OTHER: 0.04}
    )
    assert summary.gpu_stages_ms == pytest.approx(
        dict.fromkeys((*STAGES, OTHER), 0) | {"input_dist": 0.03, "embedding_backward": 0.01}
    )
    assert summary.gpu is not None
    assert (summary.gpu.busy_ms, summary.gpu.computing_ms) == (pytest.approx(0.04), 0)


def test_a_real_trace_of_the_cpu(tmp_path: Path) -> None:
    x = torch.randn(64, 64)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(3):
            with record_function(ITERATION):
                for stage in STAGES:
                    with record_function(stage):
                        x = torch.tanh(x @ x)
    path = tmp_path / "trace.json.gz"
    profiler.export_chrome_trace(str(path))
    summary = summarize_trace(read_trace(path))
    assert summary.gpu is None
    assert summary.gpu_stages_ms is None
    assert summary.kernels is None
    assert list(summary.timeline) == list(STAGES)
    starts = [span["start_ms"] for span in summary.timeline.values()]
    assert 0 <= starts[0] <= starts[-1]
    assert starts == sorted(starts)
    assert all(summary.host_stages_ms[stage] > 0 for stage in STAGES)
    iterations = sum(e["dur"] for e in read_trace(path) if e["name"] == ITERATION)
    assert sum(summary.host_stages_ms.values()) * 3 == pytest.approx(iterations / 1000, rel=1e-3)


def test_what_is_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    for content in (b"", b"not gzip", gzip.compress(b"{}"), gzip.compress(b'{"traceEvents": ['), gzip.compress(b"[]")):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"trace\.json\.gz is no Chrome trace"):
            read_trace(path)
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": [event("cpu_op", "mm", 0, 1)]}).encode()))
    with pytest.raises(ValueError, match="no range named 'iteration'"):
        summarize_trace(read_trace(path))
