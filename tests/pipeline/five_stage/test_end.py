"""Cross-cutting: before the first batch and after the last one: communicators, ends of data, errors, memory."""

import gc
import logging
import signal
import threading
import weakref
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import dlrm_bench.pipeline.five_stage.pipeline
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.five_stage import captured, dense_graph
from dlrm_bench.pipeline.five_stage.options import FiveStageOptions
from dlrm_bench.pipeline.five_stage.pipeline import FiveStagePipeline
from dlrm_bench.pipeline.five_stage.trimmed.sharder import TrimmedEBCSharder
from tests.cases import GPU_PLACES
from tests.pipeline.cpu_graphs import dense_graph_on_cpu, iteration_graph_on_cpu
from tests.pipeline.five_stage.torchrec_models import HOT, batches, build, drain

TIMEOUT = 600  # seconds, after which a rank that hangs is killed
ALL_ON = FiveStageOptions(cuda_graph="dense", launch_threads=2)


class UserError(Exception):
    pass


def end_in_a_block(ranks: Ranks) -> None:
    """By the end of data, and by an error between two calls."""
    signal.alarm(TIMEOUT)
    if ranks.device.type == "cpu":
        dense_graph_on_cpu()
    for expected, fails_at in ((StopIteration, None), (UserError, 6)):
        before, closed = set(threading.enumerate()), list[str]()
        model, optimizer = build(ranks, "TW")
        data = iter(batches(ranks, 8))
        trainer = FiveStagePipeline(model, optimizer, ranks.device, ALL_ON)
        for name in ("_graph", "_graphed_update"):
            note_close(getattr(trainer, name), name, closed)
        with pytest.raises(expected):
            train_in_a_block(trainer, data, fails_at)
        assert closed == ["_graph", "_graphed_update"]
        assert set(threading.enumerate()) == before
        assert trainer._graph is not None
        assert not trainer._graph.captured
        with pytest.raises(RuntimeError, match="was closed"):
            trainer.progress(data)


def train_in_a_block(trainer: Any, data: Iterator[Any], fails_at: int | None) -> None:
    with trainer:
        for step in count():
            if step == fails_at:
                assert trainer._graph.captured
                raise UserError
            trainer.progress(data)


def note_close(graphed: Any, name: str, closed: list[str]) -> None:
    close = graphed.close

    def noted() -> None:
        close()
        closed.append(name)

    graphed.close = noted


@pytest.mark.parametrize(("world_size", "gpu"), [(2, False), *GPU_PLACES])
def test_what_is_raised_between_calls_is_no_failure(run_ranks, world_size, gpu):
    run_ranks(world_size, end_in_a_block, gpu=gpu)


def stop_in_a_block(trainer: Any, data: Iterator[Any], error: type[BaseException]) -> None:
    with trainer:
        trainer.progress(data)
        raise error


def interrupt(ranks: Ranks) -> None:
    """What ends a process waits for nothing, and what closing raises takes the place of no error."""
    signal.alarm(TIMEOUT)
    dense_graph_on_cpu()
    for error, closes in ((KeyboardInterrupt, False), (UserError, True)):
        model, optimizer = build(ranks, "TW")
        trainer = FiveStagePipeline(model, optimizer, ranks.device, FiveStageOptions(cuda_graph="dense"))
        closed: list[str] = []

        def close(closed: list[str] = closed) -> None:
            closed.append("graph")
            raise RuntimeError("CUDA error")

        assert trainer._graph is not None
        trainer._graph.close = close  # type: ignore[method-assign]
        with pytest.raises(error) as raised:
            stop_in_a_block(trainer, iter(batches(ranks, 3)), error)
        assert closed == ["graph"] * closes
        assert getattr(raised.value, "__notes__", []) == ["and the pipeline could not be closed: CUDA error"] * closes
        assert trainer._closed


def test_an_error_between_calls_comes_through(run_ranks):
    run_ranks(1, interrupt)


def replay_in_a_block(trainer: Any, data: Iterator[Any], graphs: list[Any], error: type[BaseException]) -> int:
    """How many graphs of iterations are destroyed, which waits for the device, where `error` ends the block."""
    destroyed: list[Any] = []
    try:
        with trainer:
            while not trainer.describe().get("replays"):
                trainer.progress(data)
            for graph in graphs:
                graph.reset = partial(destroyed.append, graph)
            raise error
    except error:
        return len(destroyed)


def interrupt_whole(ranks: Ranks) -> list[int]:
    signal.alarm(TIMEOUT)
    graphs, counts = iteration_graph_on_cpu(), []
    for error in (KeyboardInterrupt, UserError):
        model, optimizer = build(ranks, "TW", sharder=TrimmedEBCSharder(HOT))
        trainer = FiveStagePipeline(model, optimizer, ranks.device, FiveStageOptions(cuda_graph="iteration"))
        counts.append(replay_in_a_block(trainer, iter(batches(ranks, 9, fixed=True)), graphs, error))
        graphs.clear()
    return counts


def test_an_interrupt_waits_for_no_graph_of_an_iteration(run_ranks):
    assert run_ranks(1, interrupt_whole) == [[0, 2]]


def leave(ranks: Ranks) -> None:
    """A pipeline that is dropped is gone at once: garbage collection is off in a timed loop."""
    signal.alarm(TIMEOUT)
    dense_graph_on_cpu()
    model, optimizer = build(ranks, "TW")
    trainer = FiveStagePipeline(model, optimizer, ranks.device, FiveStageOptions(cuda_graph="dense"))
    drain(trainer, iter(batches(ranks, 6)))
    graph = weakref.ref(trainer._graph)
    gc.disable()
    trainer.close()
    del trainer
    assert graph() is None


def test_nothing_keeps_a_closed_pipeline(run_ranks):
    run_ranks(1, leave)


def close_all(ranks: Ranks) -> None:
    signal.alarm(TIMEOUT)
    dense_graph_on_cpu()
    for module in (dense_graph, captured):
        module.record = partial(counted, module.record)  # type: ignore[attr-defined]
    trainer = FiveStagePipeline(*build(ranks, "TW"), ranks.device, FiveStageOptions(cuda_graph="dense"))
    drain(trainer, iter(batches(ranks, 6)))
    assert list(KEPT.values()) == ["mean", "run"]
    trainer.close()
    assert not KEPT


KEPT: dict[int, str] = {}
"""Names of what graphs hold that are not destroyed."""


def counted(record: Any, work: Any, **arguments: Any) -> Any:
    graph = record(work, **arguments)
    KEPT[id(graph)] = "mean" if work.__name__ == "mean" else "run"
    graph.reset = partial(KEPT.pop, id(graph))
    return graph


def test_all_graphs_of_the_dense_part_are_destroyed_with_the_pipeline(run_ranks):
    """NCCL waits for those with its collectives."""
    run_ranks(2, close_all)


def fail_in_a_block(ranks: Ranks) -> None:
    signal.alarm(TIMEOUT)
    model, optimizer = build(ranks, "TW")

    def fail(*_: Any) -> None:
        raise UserError

    trainer = FiveStagePipeline(model, optimizer, ranks.device)
    model.module.model.over_arch.register_forward_pre_hook(fail)
    with pytest.raises(UserError):
        train_in_a_block(trainer, iter(batches(ranks, 8)), None)
    assert trainer._failed


def test_what_comes_out_of_a_call_is_one(run_ranks):
    run_ranks(1, fail_in_a_block)


def reuse_memory(ranks: Ranks) -> list[list[str]]:
    """Streams that wait for the caller's before the first batch of a third iterator, after the ends of two."""
    held: list[list[str]] = []
    for avoid_record_streams in (True, False):
        options = FiveStageOptions(avoid_record_streams=avoid_record_streams)
        model, optimizer = build(ranks, "TW")
        with FiveStagePipeline(model, optimizer, ranks.device, options) as trainer:
            drain(trainer, iter(batches(ranks, 3)))
            drain(trainer, iter([]))
            of_call: list[str] = []
            trainer._streams.hold = lambda name, after, names=of_call: names.append(name)  # type: ignore[method-assign]
            trainer.progress(iter(batches(ranks, 1)))
            held.append(of_call[:])
    return held


def test_copies_wait_for_readers_of_outputs_that_outlived_their_epoch(run_ranks):
    assert run_ranks(1, reuse_memory) == [[["input_dist", "copy"], []]]


def new_groups(ranks: Ranks, store: Path) -> None:
    signal.alarm(TIMEOUT)
    given = timedelta(hours=3)
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1, timeout=given)
    model, optimizer = build(ranks, "TW")
    with FiveStagePipeline(model, optimizer, ranks.device, FiveStageOptions(launch_threads=2)) as trainer:
        group = trainer._input_dists._group
        assert group is not None
        assert group._get_backend(ranks.device).options._timeout == given


def test_its_communicator_has_the_timeout_of_the_process_group(run_ranks, tmp_path):
    run_ranks(1, new_groups, tmp_path / "store")


def warn(ranks: Ranks) -> list[str]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("dlrm_bench.pipeline.five_stage.switches").addHandler(handler)
    dlrm_bench.pipeline.five_stage.pipeline.few_queues = lambda options, device_type: (
        "too few queues" if options.launch_threads == 2 else None
    )
    for threads in (1, 2):
        options = FiveStageOptions(avoid_record_streams=False, pinned_d2h=False, launch_threads=threads)  # type: ignore[arg-type]
        model, optimizer = build(ranks, "TW")
        FiveStagePipeline(model, optimizer, ranks.device, options).close()
    return said


def test_too_few_hardware_queues_are_said_once(run_ranks):
    assert run_ranks(2, warn) == [["too few queues"], []]
