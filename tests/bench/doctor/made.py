"""Ranks' files and traces made by hand."""

from typing import Any

from dlrm_bench.bench.doctor.rank_file import (
    MARK,
    MARKED_ITERATION,
    SCHEMA,
    Call,
    Frame,
    Marked,
    Plain,
    RankFile,
    Sampled,
    Window,
)
from dlrm_bench.bench.doctor.trace import ITERATION
from tests.bench.profile.gpu_traces import LOOP, call, event, on_gpu

LIBRARIES = ["/env/lib/python3.12/site-packages", "/env/lib/python3.12"]
PACKAGES = LIBRARIES[0]


def frame(file: str, line: int, function: str = "f", text: str = "") -> Frame:
    return Frame(file=file, line=line, function=function, text=text)


USER = frame("/home/me/train.py", 40, "main", "loss, _ = pipeline.progress(batches)")
DIST = frame(f"{PACKAGES}/torchrec/distributed/dist_data.py", 284, "KJTAllToAll._wait_impl", "x.tolist()")
CALLER = frame(f"{PACKAGES}/torchrec/distributed/types.py", 334, "Awaitable.wait", "self._wait_impl()")
TORCH = frame(f"{PACKAGES}/torch/_tensor.py", 1000, "Tensor.__format__")


def made_call(
    name: str,
    iteration: int,
    stack: int,
    start_us: float,
    us: float = 10.0,
    within: int | None = None,
    **about: Any,
) -> Call:
    made: Any = dict(about)
    return Call(
        iteration=iteration, name=name, stack=stack, start_us=start_us, us=us, within=within, about=made, main=True
    )


def sampled(stacks: list[list[Frame]], samples: list[tuple[float, int, float, float]], iterations: int = 50) -> Sampled:
    """A window of iterations of 1 ms; samples: (time, number of the stack, time that it stands for, CPU time), us."""
    frames = [one for stack in stacks for one in stack]
    return Sampled(
        iterations=iterations,
        ms=1.0,
        period_us=100.0,
        own_us=10.0 * len(samples),
        frames=frames,
        stacks=[[frames.index(one) for one in stack] for stack in stacks],
        samples=[(*one, 0.0) for one in samples],
        starts_us=[1000.0 * i for i in range(iterations + 1)],
    )


def rank_file(
    stacks: list[list[Frame]], calls: list[Call], *, rank: int = 0, device: str = "cuda", iterations: int = 2
) -> RankFile:
    """Iterations of 1 ms, as fast with marks as without."""
    return RankFile(
        schema=SCHEMA,
        rank=rank,
        local_world_size=1,
        world_size=1,
        device=device,
        gpu="NVIDIA H200" if device == "cuda" else None,
        versions={"python": "3.12.3", "torch": "2.11.0"},
        found_by="progress",
        steps=100,
        complete=True,
        reduced=False,
        libraries=LIBRARIES,
        loop=[frame(f"{PACKAGES}/torch/optim/optimizer.py", 500, "wrapper"), frame("/home/me/train.py", 60, "main")],
        sampled=sampled([], []),
        plain=Plain(
            iterations=50,
            ms=1.0,
            times_ms=[1.0] * 50,
            cpu_ms=0.9,
            thread_ms=0.8,
            threads_ms={"reader": 0.1},
            hook_us=2.0,
        ),
        traced=Window(iterations=2, ms=1.2),
        marked=Marked(
            iterations=iterations, ms=1.5, marks_ms=0.5, starts_us=[1000.0 * i for i in range(iterations + 1)]
        ),
        stacks=stacks,
        calls=calls,
    )


def stock_events(marked: bool) -> list[dict[str, Any]]:
    """Two iterations of 1 ms: a sync with a pageable copy to the host, one from a list, and a copy that is pinned.

    Marked ones begin at 10 ms, wait half as long, and have calls 0 and 1 of an iteration around the CUDA calls.
    """
    events = []
    for i in range(2):
        t, c = 1000.0 * i + (10_000 if marked else 0), 100 * i + (1000 if marked else 1)
        wait = 200 if marked else 400
        events += [
            event("user_annotation", MARKED_ITERATION if marked else ITERATION, t, 1000),
            event("cpu_op", "aten::_local_scalar_dense", t + 11, wait + 60),
            call("cudaMemcpyAsync", t + 20, 20, c + 1),
            on_gpu("Memcpy DtoH (Device -> Pageable)", t + 30, 2, c + 1),
            call("cudaStreamSynchronize", t + 50, wait, c + 2),
            event("cpu_op", "aten::copy_", t + 500, 60),
            call("cudaMemcpyAsync", t + 505, 20, c + 3),
            on_gpu("Memcpy HtoD (Pageable -> Device)", t + 515, 2, c + 3),
            call("cudaStreamSynchronize", t + 530, 20, c + 4),
            call("cudaMemcpyAsync", t + 600, 5, c + 5),
            on_gpu("Memcpy HtoD (Pinned -> Device)", t + 610, 5, c + 5),
            call("cudaLaunchKernel", t + 700, 5, c + 6),
            on_gpu("kernel", t + 710, 100, c + 6),
            call("cudaMalloc", t + 800, 50, c + 7),
            call("cudaEventSynchronize", t + 900, 70, c + 8, 555),  # a reader's thread, which launches nothing
        ]
        if marked:
            events += [
                event("cpu_op", f"{MARK}{2 * i}", t + 10, wait + 70, LOOP),
                event("cpu_op", f"{MARK}{2 * i + 1}", t + 499, 62, LOOP),
            ]
    return events


def stock_rank(rank: int = 0) -> RankFile:
    """The file of the rank whose trace stock_events() are."""
    calls = []
    for i in range(2):
        calls += [
            made_call("torch.Tensor.tolist", i, 0, 1000.0 * i + 10, 270.0, device="cuda"),
            made_call("torch.tensor", i, 1, 1000.0 * i + 499, 62.0, from_list=True, shape=[4]),
        ]
    stacks = [[DIST, CALLER, USER], [frame("/home/me/train.py", 12, "batches", "torch.tensor(ids)"), USER]]
    return rank_file(stacks, calls, rank=rank)
