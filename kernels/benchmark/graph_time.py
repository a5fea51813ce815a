"""Timing on a GPU: device work without launch overhead, and the host's calls."""

import statistics
import time
from collections.abc import Callable

import torch


def captured(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Returns a graph of one call of `run`, captured after two warm-up calls."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    return graph


def replayed_us(graph: torch.cuda.CUDAGraph, replays: int) -> float:
    """Returns the mean microseconds of a replay, over `replays` back-to-back replays."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1000 / replays


def graph_us(run: Callable[[], object], replays: int = 20, samples: int = 7) -> float:
    """Returns median microseconds of one call of `run`, captured into a CUDA graph and replayed back to back."""
    graph = captured(run)
    return statistics.median(replayed_us(graph, replays) for _ in range(samples))


def host_us(call: Callable[[], object], calls: int = 1, wait: bool = False) -> float:
    """Returns the mean host microseconds of a call, over `calls` in a row that start on an idle device. wait: includes
    the time until the device is idle again."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    if wait:
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / calls * 1e6
