"""Times work on a GPU without the launches of the host."""

import statistics
from collections.abc import Callable

import torch


def graph_us(run: Callable[[], object], replays: int = 20, samples: int = 7) -> float:
    """Median microseconds of one call of `run`, captured into a CUDA graph and replayed back to back."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    times = []
    for _ in range(samples):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / replays)
    return statistics.median(times)
