"""Traces: a real one of a CPU, and a made-up one of a GPU in which every number is known."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from bench.trace import ITERATION, OTHER, STAGES, read_trace, summarize_trace


def event(cat: str, name: str, ts: float, dur: float, tid: int = 1, correlation: int | None = None) -> dict[str, Any]:
    args = {} if correlation is None else {"correlation": correlation}
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "args": args}


def gpu_trace() -> list[dict[str, Any]]:
    """Two iterations of 1 ms: stock TorchRec's ranges, a backward thread, a graph launch; times in microseconds."""
    events = [event("cuda_runtime", "cudaLaunchKernel", -50, 5, correlation=999)]  # before the window
    events.append(event("kernel", "before", -40, 10, correlation=999))
    for i in range(2):
        t, c = 1000.0 * i, 100 * i
        events += [
            event("user_annotation", ITERATION, t, 1000),
            event("user_annotation", "## start_sparse_data_dist 3 ##", t + 10, 200),
            event("cuda_runtime", "cudaMemcpyAsync", t + 20, 30, correlation=c + 1),
            event("cuda_runtime", "cudaStreamSynchronize", t + 60, 40, correlation=c + 2),
            event("user_annotation", "## forward 3 ##", t + 300, 300),
            event("user_annotation", "[lookup]_[ebc]_[table_wise]", t + 320, 100),
            event("cuda_runtime", "cudaLaunchKernel", t + 330, 10, correlation=c + 3),
            event("cuda_driver", "cuLaunchKernelEx", t + 500, 10, correlation=c + 4),
            event("cpu_op", "autograd::engine::evaluate_function: AddmmBackward0", t + 650, 100, tid=2),
            event("cuda_runtime", "cudaLaunchKernelExC", t + 660, 10, tid=2, correlation=c + 5),
            event("user_annotation", "## optimizer 3 ##", t + 900, 50),
            event("cuda_runtime", "cudaGraphLaunch", t + 910, 20, correlation=c + 6),
            event("user_annotation", "gloo:all_reduce", t, 900, tid=3),  # a thread that launches nothing
            event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", t + 40, 10, tid=7, correlation=c + 1),
            event("kernel", "split_embedding_forward", t + 350, 100, tid=7, correlation=c + 3),
            event("kernel", "gemm", t + 420, 100, tid=8, correlation=c + 4),  # overlaps by 30
            event("kernel", "gemm", t + 700, 50, tid=7, correlation=c + 5),
            event("kernel", "_update_tiles", t + 950, 20, tid=7, correlation=c + 6),
            event("kernel", "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage)", t + 970, 10, tid=7, correlation=c + 6),
        ]
    return events


def test_counts_are_per_iteration_and_leave_out_what_came_before() -> None:
    calls = summarize_trace(gpu_trace()).calls
    assert calls == {"kernel_launches": 3, "graph_launches": 1, "stream_syncs": 1, "memcpy_calls": 1, "d2h_copies": 1}


def test_host_time_is_exclusive_and_complete() -> None:
    stages = summarize_trace(gpu_trace()).host_stages_ms
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
    summary = summarize_trace(gpu_trace())
    assert summary.gpu_busy_ms == pytest.approx(0.26)
    assert summary.gpu_stages_ms == pytest.approx(
        {
            "input_dist": 0.01 + 0.01,  # the graph's all-to-all, which came before nothing that tells more
            "embedding_forward": 0.1,
            "dense_forward_backward": 0.15,
            "embedding_backward": 0.02,
            "dense_update": 0,
            OTHER: 0,
        }
    )


def test_an_all_to_all_in_a_graph_belongs_to_what_came_before() -> None:
    names = ["embedding_forward_kernel", "SendRecv", "gemm", "SendRecv", "embedding_backward_kernel"]
    events = [
        event("user_annotation", ITERATION, 0, 1000),
        event("cuda_runtime", "cudaGraphLaunch", 1, 5, correlation=1),
    ]
    events += [event("kernel", name, 100 * i, 50, correlation=1) for i, name in enumerate(names)]
    stages = summarize_trace(events).gpu_stages_ms
    assert stages is not None
    assert {stage: ms for stage, ms in stages.items() if ms} == pytest.approx(
        {"embedding_forward": 0.1, "dense_forward_backward": 0.05, "embedding_backward": 0.1}
    )


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
    assert summary.gpu_busy_ms is None
    assert summary.gpu_stages_ms is None
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
