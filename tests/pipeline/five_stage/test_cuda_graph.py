"""A function replayed as a CUDA graph gives what a plain call gives, in tensors of the caller's own."""

import gc
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import dlrm_bench.pipeline.five_stage.cuda_graph
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.five_stage.cuda_graph import GraphedFunction, record
from tests.cases import GPU_PLACES

Function = Callable[[Tensor], tuple[Tensor, ...]]


class ReplayedOnCPU:
    """Stands for a graph: replays into the memory of the results that the capture gave."""

    def __init__(self, work: Callable[[], None], results: list[tuple[Tensor, ...]]) -> None:
        self._work, self._results = work, results

    def replay(self) -> None:
        self._work()
        for first, now in zip(self._results[0], self._results.pop(), strict=True):
            first.copy_(now)

    def reset(self) -> None:
        """There is nothing to free."""


def graphs_on_cpu(patch: pytest.MonkeyPatch) -> None:
    class NoStream:
        def wait_stream(self, other: Any) -> None: ...

    def record(work: Callable[[], None]) -> ReplayedOnCPU:
        with patch.context() as capturing:  # which runs no collective
            capturing.setattr(dist, "all_reduce", lambda *_, **__: None)
            work()
        (results,) = (cell.cell_contents for cell in work.__closure__ if isinstance(cell.cell_contents, list))  # type: ignore[attr-defined]
        return ReplayedOnCPU(work, results)

    patch.setattr(dlrm_bench.pipeline.five_stage.cuda_graph, "record", record)
    patch.setattr(dlrm_bench.pipeline.five_stage.cuda_graph, "captures", lambda device: True)
    patch.setattr(torch.cuda, "current_stream", lambda device: NoStream())


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    if request.param == "cpu":
        graphs_on_cpu(monkeypatch)
    return torch.device(request.param)


def halves(x: Tensor) -> tuple[Tensor, ...]:
    return x.flip(0)[: len(x) // 2] * 2, x.amax(dim=0)


def test_replays_give_what_plain_calls_give(device: torch.device) -> None:
    calls = 0

    def counted(x: Tensor) -> tuple[Tensor, ...]:
        nonlocal calls
        calls += 1
        return halves(x)

    graphed, given, expected = GraphedFunction(counted, "halves", None), [], []
    for step in range(5):
        x = torch.randn(6, 4, device=device, generator=torch.Generator(device).manual_seed(step))
        if step == 3:
            x = x.t().contiguous().t()  # of another layout, as autograd may hand it over
        given.append(graphed(x))
        expected.append(halves(x))
        x.zero_()
    torch.testing.assert_close(given, expected, rtol=0, atol=0)  # later calls overwrite nothing
    assert graphed.describe() == {"name": "halves", "replayed": True, "failure": None}
    if device.type == "cuda":
        assert calls == 2, "once eagerly, once for the capture"


def test_other_shapes_and_dtypes_run_plainly(device: torch.device) -> None:
    graphed = GraphedFunction(halves, "halves", None)
    shapes = [(4, 2), (4, 2), (4, 2), (6, 2), (4, 2)]
    for shape in shapes:
        for dtype in (torch.float32, torch.float64) if shape == (6, 2) else (torch.float32,):
            x = torch.randn(shape, device=device, dtype=dtype)
            torch.testing.assert_close(graphed(x), halves(x), rtol=0, atol=0)
    assert graphed.describe()["replayed"]


def test_a_closed_one_runs_plainly(device: torch.device) -> None:
    graphed, x = GraphedFunction(halves, "halves", None), torch.ones(4, 2, device=device)
    for _ in range(3):
        graphed(x)
    graphed.close()
    graphed.close()
    assert not graphed.describe()["replayed"]
    for _ in range(3):
        torch.testing.assert_close(graphed(2 * x), halves(2 * x), rtol=0, atol=0)
    assert not graphed.describe()["replayed"]


def test_what_cannot_be_captured_runs_plainly(device: torch.device, caplog: pytest.LogCaptureFixture) -> None:
    calls = 0

    def reads(x: Tensor) -> tuple[Tensor, ...]:
        nonlocal calls
        calls += 1
        if device.type == "cpu" and calls == 2:
            raise RuntimeError("operation not permitted when stream is capturing")
        return (x * x.sum().item(),)

    graphed = GraphedFunction(reads, "what reads the device", None)
    for step in range(4):
        x = torch.full((3,), float(step), device=device)
        torch.testing.assert_close(graphed(x), (x * 3 * step,))
    assert "capturing" in graphed.describe()["failure"] or "capture" in graphed.describe()["failure"]
    (said,) = caplog.messages
    assert "what reads the device cannot be captured" in said


def one_rank_cannot(ranks: Ranks) -> list[dict[str, Any]]:
    """What is said of a sum over the ranks, which the last rank cannot capture, and of one that all can."""
    group, said = dist.new_group(), []
    for alone in (True, False):
        calls = 0

        def summed(x: Tensor, alone: bool = alone) -> tuple[Tensor, ...]:
            nonlocal calls
            calls += 1
            x = x.clone()
            if alone and ranks.rank == ranks.world_size - 1:
                if ranks.device.type == "cpu" and calls == 2:
                    raise RuntimeError("operation not permitted when stream is capturing")
                x *= 1 + 0 * x.sum().item()
            dist.all_reduce(x, group=group)
            return (x,)

        with pytest.MonkeyPatch.context() as patch:
            if ranks.device.type == "cpu":
                graphs_on_cpu(patch)
            graphed = GraphedFunction(summed, "the sum", group)
            for step in range(5):
                (result,) = graphed(torch.full((3,), float(step + ranks.rank), device=ranks.device))
                expected = ranks.world_size * step + sum(range(ranks.world_size))
                assert result.tolist() == [float(expected)] * 3
        said.append(graphed.describe())
        graphed.close()
    return said


@pytest.mark.parametrize(("world_size", "gpu"), [(2, False), *GPU_PLACES[1:]])
def test_all_ranks_replay_or_none(run_ranks: Callable[..., list[Any]], world_size: int, gpu: bool) -> None:
    *others, last = run_ranks(world_size, one_rank_cannot, gpu=gpu)
    assert "captur" in last[0]["failure"]
    for alone, _ in others:
        assert alone == {"name": "the sum", "replayed": False, "failure": "another rank could not capture it"}
    for _, together in (*others, last):
        assert together == {"name": "the sum", "replayed": True, "failure": None}


@pytest.mark.gpu
def test_calls_from_another_stream_wait_for_those_before() -> None:
    graphed, n = GraphedFunction(lambda x: (x.cumsum(0),), "cumsum", None), 1 << 24
    side, results = torch.cuda.Stream(), []
    given = [torch.full((n,), step % 3, device="cuda", dtype=torch.int64) for step in range(8)]
    graphed(given[0])
    graphed(given[0])
    torch.cuda.synchronize()
    for step, x in enumerate(given):
        with torch.cuda.stream(side if step % 2 else torch.cuda.current_stream()):
            results.append(graphed(x)[0][-1])
    torch.cuda.synchronize()
    assert [int(result) for result in results] == [n * (step % 3) for step in range(8)]


def use_idle_runtime(monkeypatch: pytest.MonkeyPatch, end: Callable[..., None] = lambda *_: None) -> list[str]:
    """Stands for a GPU: a runtime that does nothing. end: of allocations to a pool. Returns the pool's releases."""
    released: list[str] = []
    generator = SimpleNamespace(clone_state=lambda: None, graphsafe_set_state=lambda _: None)
    runtime = {
        "CUDAGraph": lambda **_: "graph",
        "graph_pool_handle": lambda: 0,
        "current_device": lambda: 0,
        "default_generators": [generator],
        "current_stream": lambda: None,
        "stream": lambda _: nullcontext(),
        "graph": lambda *_, **__: nullcontext(),
        "synchronize": lambda: None,
    }
    for name, value in runtime.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda _, pool: released.append(pool), raising=False)
    return released


def no_capture() -> None:
    raise RuntimeError("no capture")


def test_a_failed_capture_gives_its_pool_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDAGraph does not where the end of the capture failed too; where it did not, it does, and torch says so."""
    released = use_idle_runtime(monkeypatch)
    with pytest.raises(RuntimeError, match="no capture"):
        record(no_capture, pool="pool")
    assert released == ["pool"]
    record(lambda: None, pool="pool")
    assert released == ["pool"]

    def ended(*_: Any) -> None:
        raise RuntimeError("endAllocatePool: not currently recording to mempool_id")

    released = use_idle_runtime(monkeypatch, ended)
    with pytest.raises(RuntimeError, match="no capture"):
        record(no_capture, pool="pool")
    assert released == []


@pytest.mark.parametrize("collects", [True, False])
def test_python_collects_nothing_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch, collects: bool) -> None:
    """Afterwards it collects if it did before, whatever was raised."""
    use_idle_runtime(monkeypatch)
    found = []

    def fails() -> None:
        found.append(gc.isenabled())
        raise RuntimeError("no capture")

    if not collects:
        gc.disable()
    try:
        assert record(lambda: found.append(gc.isenabled())) == "graph"
        with pytest.raises(RuntimeError, match="no capture"):
            record(fails)
        assert gc.isenabled() == collects
    finally:
        monkeypatch.undo()
        gc.enable()
    assert found == [False, False]
