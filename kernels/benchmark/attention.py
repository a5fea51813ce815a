"""Times attention, which is compute-bound: python -m dlrm_bench.kernels.benchmark.attention.

Compares TFLOP/s of the kernels that `silu_attention` chooses on this GPU with its Triton kernels, alternating in one
run, and shows published figures of another machine beside them. Operations count attended keys only: two products
forward and five backward, even if a kernel recomputes some.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from dlrm_bench.kernels.benchmark.graph_time import captured, replayed_us
from dlrm_bench.kernels.benchmark.timing import Case
from dlrm_bench.kernels.dense.last_query_attention import (
    Jagged,
    last_query_attention_backward,
    last_query_attention_forward,
)
from dlrm_bench.kernels.dense.silu_attention import (
    Sequences,
    silu_attention_backward,
    silu_attention_forward,
    triton_silu_attention_backward,
    triton_silu_attention_forward,
)

HEADS, WIDTH = 4, 128  # MLPerf DLRMv4's
SAMPLES, LONGEST = 128, 4095
ROUNDS = 15
_LEAST_US = 4000  # minimum duration of a sample
PUBLISHED = {("2048", "forward"): 466, ("2048", "backward"): 386, ("4096", "forward"): 508, ("4096", "backward"): 433}
"""TFLOP/s of CUTLASS kernels on an H100 by length and direction, at these heads, in bf16, of 512 samples: NVIDIA
recsys-examples, figs/hstu_attn_h100_p10_heatmap.png. Not measured here, nor in one run with ours."""


def jagged_lengths(samples: int) -> list[int]:
    """Returns lengths distributed like DLRMv4's early batches: mean 2082, root mean square 2302."""
    generator = torch.Generator().manual_seed(1)
    spread = math.sqrt(2302**2 - 2082**2)
    drawn = 2082 + spread * torch.randn(samples, generator=generator)
    return [int(length) for length in drawn.clamp(10, LONGEST)]


def silu_attention_cases() -> Iterator[Case]:
    """Yields four samples of DLRMv4's mean length: bound by products, 14.5 and 36 GFLOP, not by bytes."""
    q, k, v, grad, dq, dk, dv = torch.randn(7, 4 * 2661, HEADS, WIDTH, device="cuda").bfloat16().unbind()
    of = Sequences(torch.arange(5, device="cuda") * 2661, torch.ones(4, dtype=torch.int64, device="cuda"), 4087)
    yield Case("silu_attention_forward", "4 of 2661", 4 * q.nbytes, partial(silu_attention_forward, q, k, v, of, dq))
    backward = partial(silu_attention_backward, grad, q, k, v, of, dq, dk, dv)
    yield Case("silu_attention_backward", "4 of 2661", 7 * q.nbytes, backward)


def last_query_attention_cases() -> Iterator[Case]:
    """Yields cases whose keys and values are slices of one projection, as in a layer."""
    for samples in (1024, 128, 16):
        lengths = jagged_lengths(samples)
        keys_and_values = torch.randn(sum(lengths), 2 * HEADS * WIDTH, device="cuda").bfloat16()
        k, v = (part.unflatten(1, (HEADS, WIDTH)) for part in keys_and_values.chunk(2, dim=1))
        dk, dv = (part.unflatten(1, (HEADS, WIDTH)) for part in torch.empty_like(keys_and_values).chunk(2, dim=1))
        q, out, dq = torch.randn(3, samples, HEADS, WIDTH, device="cuda").bfloat16().unbind()
        of = Jagged(torch.tensor([0, *lengths], device="cuda").cumsum(0), LONGEST)
        shape, read = f"{samples} of {sum(lengths) / samples:.0f}", 2 * k.numel() * k.itemsize
        forward = partial(last_query_attention_forward, q, k, v, of, out)
        yield Case("last_query_attention_forward", shape, read, forward)
        backward = partial(last_query_attention_backward, out, q, k, v, of, dq, dk, dv)
        yield Case("last_query_attention_backward", shape, 2 * read, backward)


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Returns order statistics that enclose the values' median with 95 % confidence or more; the minimum and maximum
    if no narrower pair does."""
    ordered, count = sorted(values), len(values)
    outside, rank = 2.0 ** (1 - count), 0  # both tails
    while rank + 1 < count // 2:
        outside += 2.0 ** (1 - count) * math.comb(count, rank + 1)
        if outside > 0.05:
            break
        rank += 1
    return ordered[rank], ordered[-1 - rank]


def attention_runs(lengths: Sequence[int]) -> dict[str, tuple[float, dict[str, Callable[[], object]]]]:
    """Returns, by direction, the number of operations and the calls to time by kernel name."""
    tokens = sum(lengths)
    projected = torch.randn(tokens, 4 * HEADS * WIDTH, device="cuda").bfloat16()
    _, v, q, k = (part.unflatten(1, (HEADS, WIDTH)) for part in projected.chunk(4, dim=1))
    _, dv, dq, dk = (part.unflatten(1, (HEADS, WIDTH)) for part in torch.empty_like(projected).chunk(4, dim=1))
    grad, out = torch.randn(2, tokens, HEADS, WIDTH, device="cuda").bfloat16().unbind()
    offsets = torch.tensor([0, *lengths], device="cuda").cumsum(0)
    of = Sequences(offsets, torch.ones(len(lengths), dtype=torch.int64, device="cuda"), LONGEST)
    product = HEADS * WIDTH * sum(float(length) ** 2 for length in lengths)  # half of 2 L^2 D, as it is causal
    forwards = {"triton": triton_silu_attention_forward, "chosen": silu_attention_forward}
    backwards = {"triton": triton_silu_attention_backward, "chosen": silu_attention_backward}
    return {
        "forward": (2 * product, {name: partial(f, q, k, v, of, out) for name, f in forwards.items()}),
        "backward": (5 * product, {name: partial(f, grad, q, k, v, of, dq, dk, dv) for name, f in backwards.items()}),
    }


def time_in_turn(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Returns microseconds of each call in every round; every other round runs in reverse order."""
    graphs = {name: captured(run) for name, run in runs.items()}
    repeats = {name: max(1, round(_LEAST_US / replayed_us(graph, 1))) for name, graph in graphs.items()}
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for number in range(rounds):
        for name in sorted(graphs, reverse=number % 2 == 1):
            times[name].append(replayed_us(graphs[name], repeats[name]))
    return times


def main() -> None:
    """Prints a line for each shape, direction and kernel."""
    shapes = {"2048": [2048] * SAMPLES, "4096": [4096] * SAMPLES, "jagged": jagged_lengths(SAMPLES)}
    print(f"{SAMPLES} samples, {HEADS} heads of {WIDTH}, bf16; medians of {ROUNDS} rounds with 95 % intervals")
    print("published: CUTLASS on an H100, 512 samples, NVIDIA recsys-examples; TFLOP/s of another machine and run")
    print(f"{'lengths':8} {'':9} {'kernels':8} {'us':>9} {'':21} {'TFLOP/s':>8} {'times':>6} {'published':>9}")
    for shape, lengths in shapes.items():
        for direction, (operations, runs) in attention_runs(lengths).items():
            times = time_in_turn(runs, ROUNDS)
            for name, us in times.items():
                median, (low, high) = statistics.median(us), median_interval(us)
                faster = statistics.median(times["triton"]) / median
                interval = f"({low:.1f} to {high:.1f})"
                rate, published = operations / median / 1e6, PUBLISHED.get((shape, direction), "")
                print(
                    f"{shape:8} {direction:9} {name:8} {median:9.1f} {interval:21} {rate:8.1f} {faster:6.2f} "
                    f"{published:>9}",
                    flush=True,
                )


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit("error: timing kernels needs a CUDA GPU, and this machine has none")
    main()
