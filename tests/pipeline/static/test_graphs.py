"""Captured work runs like eager work; work that cannot be captured is named, and falls back only on request."""

import contextlib
import io
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch.profiler import record_function

import dlrm_bench.pipeline.static.graphs
from dlrm_bench.bench.config import RunConfig
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.dlrm.tables.pooled.distributed_ids import DistributedIds
from dlrm_bench.dlrm.tables.pooled.static_ebc import StaticEBC
from dlrm_bench.pipeline.static.graphs import Graphs, Pool
from tests.cases import CPU_PLACES, GPU_PLACES
from tests.pipeline.cpu_graphs import capture_on_cpu
from tests.pipeline.small_runs import batches_of, small
from tests.pipelines import static_pipeline

STEPS = 8
STAGE = "embedding_forward"
OP = "aten::_local_scalar_dense"


def cannot_be_captured() -> None:
    """Reads a value on the host, which the CPU refuses for tensors without memory."""
    torch.ones((), device="meta").item()


def graphs(ranks: Ranks, works: Sequence[Callable[[], None]], fallback: bool) -> Graphs:
    return Graphs("work", works, ranks, None, fallback)


def run_directly(ranks: Ranks) -> tuple[list[int], str, dict[str, Any]]:
    capture_on_cpu()
    done: list[int] = []
    both = graphs(ranks, [partial(done.append, 0), partial(done.append, 1)], fallback=False)
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        both.forget("too early")
        both.run(0)
        both.run(1)
        both.forget("something changed")
        both.run(1)
    return done, said.getvalue(), both.describe()


def test_graphs_are_captured_once_and_after_a_change(run_ranks: Callable[..., list[Any]]) -> None:
    first, second = run_ranks(2, run_directly)
    assert first == ([0, 1, 1], "something changed: the work is captured again\n", {"captures": 2, "fell_back": None})
    assert second == ([0, 1, 1], "", first[2])


def attempts(ranks: Ranks) -> dict[str, Any]:
    """Two works are captured where rank 1 cannot capture the first one, then the other alone."""
    too_large = [ranks.rank == 1]
    capture_on_cpu(fails=lambda: too_large[0])
    done: list[int] = []
    pool = Pool()
    made = Graphs("work", [cannot_be_captured, partial(done.append, 1)], ranks, None, False, pool)
    found: dict[str, Any] = {
        "first": made.capture(attempt=True),
        "left": ([*made._works], [*made._graphs], pool._graphs),
    }
    too_large[0] = False
    number = made.add(partial(done.append, 2))
    found["second"] = made.capture(attempt=True)
    made.run(number)
    return found | {"held": pool._graphs, "captures": made.captures, "fell back": made.fell_back, "done": done}


def test_an_attempt_that_fails_on_one_rank_leaves_nothing_on_any(run_ranks: Callable[..., list[Any]]) -> None:
    for found in run_ranks(2, attempts):
        assert found == {
            "first": False,
            "left": ([], [], 0),
            "second": True,
            "held": 1,
            "captures": 1,
            "fell back": None,
            "done": [2],
        }


def test_a_pool_is_a_new_one_once_all_its_graphs_are_destroyed(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's caching allocator has given the old one's memory back."""
    handles = iter(range(9))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(handles))
    pool = Pool()
    assert [pool.handle(), pool.handle()] == [0, 1]  # the first capture failed
    pool.count(2)
    pool.count(1)
    assert pool.handle() == 1
    pool.count(-2)
    assert pool.handle() == 1
    pool.count(-1)
    assert pool.handle() == 2


def stages_then(last: Callable[[], Any]) -> None:
    with record_function("one"):
        torch.ones(2).sum()
        with record_function("two"):
            x = torch.ones(2, requires_grad=True)
            (x * 2).sum().backward()
    with record_function("three"):
        last()


def raise_outside_of_ops() -> None:
    torch.ones(3).add_(1)
    raise RuntimeError("no kernel\nand more")


def errors(ranks: Ranks) -> list[str]:
    """Returns the errors of an op, of something else after one, of something outside of all stages, on rank 1 alone."""
    capture_on_cpu(fails=lambda: True)
    texts = []
    for work in (
        partial(stages_then, cannot_be_captured),
        partial(stages_then, raise_outside_of_ops),
        cannot_be_captured,
        partial(stages_then, cannot_be_captured if ranks.rank == 1 else lambda: None),
    ):
        with pytest.raises(RuntimeError) as raised:
            graphs(ranks, [work], fallback=False).run(0)
        texts.append(str(raised.value))
    return texts


def test_errors_name_op_stage_and_exception_on_every_rank(run_ranks: Callable[..., list[Any]]) -> None:
    first, second = run_ranks(2, errors)
    assert first == second
    op, after, outside, one_rank = first
    assert f"work cannot be captured: at {OP} in three: RuntimeError: Tensor.item() cannot be called on meta" in op
    assert "(on 2 rank(s), first 0)" in op
    assert "--cuda-graph try" in op
    assert "after aten::add_.Tensor in three: RuntimeError: no kernel (" in after
    assert f"at {OP} in work: " in outside
    assert f"at {OP} in three: " in one_rank
    assert "(on 1 rank(s), first 1)" in one_rank


def train(
    ranks: Ranks, config: RunConfig, around: Callable[[], AbstractContextManager[Any]] = nullcontext
) -> tuple[list[float], dict[str, Any]]:
    trained, batches, losses = static_pipeline(config, ranks), batches_of(config, ranks), []
    for _ in range(STEPS):
        with around():
            loss = trained.train_step(batches)
        losses.append(loss.item())
    return losses, trained.describe()["cuda_graphs"]


def train_watched(ranks: Ranks) -> None:
    """The watch over a capture lets every op of an iteration through, forward, backward and collectives."""
    for presort in (False, True):
        config = small(presort_ids=presort)
        watches = [dlrm_bench.pipeline.static.graphs._Watch("nothing") for _ in range(STEPS)]
        assert train(ranks, config, partial(watches.pop)) == train(ranks, config)


@pytest.mark.parametrize(("world_size", "gpu"), GPU_PLACES[:1] + CPU_PLACES[1:])
def test_watching_changes_nothing(run_ranks: Callable[..., list[Any]], world_size: int, gpu: bool) -> None:
    run_ranks(world_size, train_watched, gpu=gpu)


def refuse_lookup(when: Callable[[], bool], reads: Callable[[], None]) -> None:
    """Lookups do what cannot be captured."""
    lookup = StaticEBC.lookup

    def refusing(self: StaticEBC, ids: DistributedIds, part: int = 0) -> torch.Tensor:
        if when():
            reads()
        return lookup(self, ids, part)

    StaticEBC.lookup = refusing  # type: ignore[method-assign]


def fall_back(ranks: Ranks) -> dict[str, Any]:
    config = small(overlap=True)
    graph = small(overlap=True, cuda_graph="iteration")
    allowed = small(overlap=True, cuda_graph="try")
    results: dict[str, Any] = {"eager": train(ranks, config)}
    if ranks.device.type == "cuda":
        counter = torch.zeros((), device=ranks.device)
        refuse_lookup(torch.cuda.is_current_stream_capturing, lambda: print(counter.item()))
    else:
        capture_on_cpu()
        results["captured"] = train(ranks, graph)
        capturing = [False]

        def during_capture() -> bool:
            capturing[0] = True
            return True

        def refuse() -> None:
            capturing[0] = False
            cannot_be_captured()

        capture_on_cpu(fails=during_capture)
        refuse_lookup(lambda: capturing[0], refuse)
    results["fell back"] = train(ranks, allowed)
    with pytest.raises(RuntimeError) as raised:
        train(ranks, graph)
    results["error"] = str(raised.value)
    return results


@pytest.mark.parametrize(("world_size", "gpu"), [*CPU_PLACES, *GPU_PLACES])
def test_training_falls_back_only_when_told_to(run_ranks: Callable[..., list[Any]], world_size: int, gpu: bool) -> None:
    for results in run_ranks(world_size, fall_back, gpu=gpu):
        losses, cuda_graphs = results["eager"]
        assert cuda_graphs == {}
        if not gpu:
            assert results["captured"] == (
                losses,
                {"iteration": {"captures": 1, "fell_back": None}, "evaluation": {"captures": 0, "fell_back": None}},
            )
        fell_back, cuda_graphs = results["fell back"]
        assert fell_back == losses
        assert cuda_graphs["iteration"]["captures"] == 0
        reason = cuda_graphs["iteration"]["fell_back"]
        assert f"iteration cannot be captured: at {OP} in {STAGE}: " in reason
        assert reason.partition(" GB of the GPU")[0].rpartition(" (")[0] in results["error"]  # free memory may differ
        assert "--cuda-graph none" in results["error"]


def without_gpu(ranks: Ranks) -> str:
    with pytest.raises(ValueError, match="cuda-graph iteration needs a GPU") as raised:
        static_pipeline(small(cuda_graph="iteration"), ranks)
    return str(raised.value)


def test_graphs_need_a_gpu(run_ranks: Callable[..., list[Any]]) -> None:
    (message,) = run_ranks(1, without_gpu)
    assert "choose --cuda-graph none" in message


def add_later(ranks: Ranks) -> tuple[list[int], dict[str, Any]]:
    capture_on_cpu()
    done: list[int] = []
    of_works = graphs(ranks, [], fallback=False)
    for number in (of_works.add(partial(done.append, 0)), of_works.add(partial(done.append, 1))):
        of_works.run(number)
    of_works.run(of_works.add(partial(done.append, 2)))
    of_works.run(0)
    of_works.clear()
    of_works.run(of_works.add(partial(done.append, 3)))
    return done, of_works.describe()


def test_a_function_that_is_added_is_captured_when_it_is_to_run(run_ranks: Callable[..., list[Any]]) -> None:
    (result,) = run_ranks(1, add_later)
    assert result == ([0, 1, 2, 0, 3], {"captures": 3, "fell_back": None})


def fall_back_later(ranks: Ranks) -> tuple[list[int], dict[str, Any]]:
    done: list[int] = []
    failing = [False]
    capture_on_cpu(fails=lambda: failing[0])
    of_works = graphs(ranks, [partial(done.append, 0)], fallback=True)
    of_works.run(0)
    failing[0] = True

    def work() -> None:
        if failing[0]:
            failing[0] = False
            cannot_be_captured()
        done.append(1)

    of_works.run(of_works.add(work))
    of_works.run(0)
    return done, of_works.describe()


def test_where_a_later_capture_fails_all_run_eagerly(run_ranks: Callable[..., list[Any]]) -> None:
    (result,) = run_ranks(1, fall_back_later)
    assert result[0] == [0, 1, 0]
    assert result[1]["fell_back"].startswith("work cannot be captured: at ")
