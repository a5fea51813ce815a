"""Cross-cutting: what a pipeline says of its switches is true whenever it is read, before, in and after a run."""

import logging
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torchrec.distributed import DistributedModelParallel
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

import dlrm_bench.pipeline.five_stage.step_graph
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.five_stage.dense_update import WATCHED
from dlrm_bench.pipeline.five_stage.options import FiveStageOptions
from dlrm_bench.pipeline.five_stage.pipeline import FiveStagePipeline
from tests.cases import GPU_PLACES
from tests.pipeline.cpu_graphs import dense_graph_on_cpu
from tests.pipeline.five_stage.graphed_steps import graphs_on_cpu
from tests.pipeline.five_stage.torchrec_models import BATCH, batches, build

TIMEOUT = 600  # seconds, after which a rank that hangs is killed
PLACES = [(2, False), *GPU_PLACES]
OPTIONS = FiveStageOptions(avoid_record_streams=False, pinned_d2h=False, cuda_graph="dense")


class OfTheUser(torch.optim.SGD):
    """Steps in a way that nobody knows."""


NOT_CAPTURED = (
    "it is OfTheUser's, which has no option `capturable`; Adam, AdamW, SGD and Adagrad are captured as they are"
)


def graphs(ranks: Ranks) -> None:
    """On the CPU what stands for them, in this process."""
    signal.alarm(TIMEOUT)
    if ranks.device.type == "cpu":
        dense_graph_on_cpu()
        graphs_on_cpu(pytest.MonkeyPatch())


def read(
    ranks: Ranks,
    plan: str = "TW",
    change: Callable[[DistributedModelParallel, Any], Any] = lambda model, optimizer: optimizer,
    each: Callable[[Any, int], None] = lambda optimizer, step: None,
    sizes: tuple[int, ...] = (BATCH,) * 10,
) -> list[str | None]:
    """What is said of cuda_graph: before the first batch, after the last one, and after the end."""
    model, optimizer = build(ranks, plan)
    optimizer = change(model, optimizer)
    data = iter([batches(ranks, 1, seed, size)[0] for seed, size in enumerate(sizes)])
    said: list[str | None] = []
    with suppress(StopIteration), FiveStagePipeline(model, optimizer, ranks.device, OPTIONS) as trainer:
        said.append(trainer.switched_off.get("cuda_graph"))
        for step in range(len(sizes) + 1):
            each(optimizer, step)
            trainer.progress(data)
    assert trainer.switched_off.keys() <= {"cuda_graph"}
    said += [trainer.switched_off.get("cuda_graph")] * 2
    trainer.switched_off.clear()  # it is the reader's own
    assert trainer.switched_off.get("cuda_graph") == said[-1]
    return said


def dense_optimizer(make: Callable[[Any], torch.optim.Optimizer]) -> Callable[[DistributedModelParallel, Any], Any]:
    def change(model: DistributedModelParallel, optimizer: Any) -> CombinedOptimizer:
        dense = dict(in_backward_optimizer_filter(model.named_parameters()))
        return CombinedOptimizer([model.fused_optimizer, KeyedOptimizerWrapper(dense, make)])

    return change


def clipping(model: DistributedModelParallel, optimizer: Any) -> CombinedOptimizer:
    fused, dense = (part for _, part in optimizer.optimizers)
    return CombinedOptimizer([fused, GradientClippingOptimizer(dense, GradientClipping.NORM)])


def scheduled(model: DistributedModelParallel, optimizer: Any) -> Any:
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    return optimizer


def hooked(model: DistributedModelParallel, optimizer: Any) -> Any:
    optimizer.optimizers[1][1]._optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


def set_rate(optimizer: Any, step: int) -> None:
    for group in optimizer.param_groups:
        group["lr"] = 0.05 * 0.9**step


def parts(ranks: Ranks) -> None:
    graphs(ranks)
    assert read(ranks) == [None, None, None]
    for make in (torch.optim.Adam, torch.optim.SGD):
        said = read(ranks, change=dense_optimizer(lambda params, make=make: make(params, lr=0.05)))
        assert said == [None] * 3
    assert read(ranks, change=clipping) == [None] * 3
    said = read(ranks, change=dense_optimizer(lambda params: OfTheUser(params, lr=0.05)))
    assert said == [f"the dense update: {NOT_CAPTURED}"] * 3
    for said_once in read(ranks, "mixed"):
        assert said_once is not None
        assert "of data-parallel tables" in said_once
    assert read(ranks, change=scheduled) == [None] * 3
    assert read(ranks, each=set_rate) == [None] * 3
    first, *after = read(ranks, change=hooked)
    assert first == f"the dense update: {WATCHED}"
    assert after == [f"the dense update: 10 of 10 steps ran eagerly: {WATCHED}"] * 2
    first, *after = read(ranks, sizes=(BATCH,) * 9 + (BATCH - 2,))
    assert first is None
    for said_late in after:
        assert said_late is not None
        assert said_late.startswith("1 of 10 batches ran eagerly")
        assert "the dense update" not in said_late


@pytest.mark.parametrize(("world_size", "gpu"), PLACES)
def test_a_graph_that_is_off_in_part_is_said(run_ranks, world_size, gpu):
    run_ranks(world_size, parts, gpu=gpu)


def failed_capture(ranks: Ranks) -> list[str]:
    """What is logged."""
    graphs(ranks)
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    for name in ("dlrm_bench.pipeline.five_stage.switches", "dlrm_bench.pipeline.five_stage.dense_update"):
        logging.getLogger(name).addHandler(handler)

    def record(*_: Any) -> None:
        raise RuntimeError("planted")

    dlrm_bench.pipeline.five_stage.step_graph.record = record  # type: ignore[assignment]
    why = "its capture failed: RuntimeError: planted"
    assert read(ranks) == [None, *[f"the dense update: 7 of 10 steps ran eagerly: {why}"] * 2]
    assert logged.pop() == f"the dense update runs eagerly: {why}"
    assert logged == []
    read(ranks, change=dense_optimizer(lambda params: OfTheUser(params, lr=0.05)))
    return logged


@pytest.mark.parametrize(("world_size", "gpu"), PLACES)
def test_a_capture_that_fails_is_said_where_it_fails(run_ranks, world_size, gpu):
    first, *others = run_ranks(world_size, failed_capture, gpu=gpu)
    assert first == [f"cuda_graph is off for the dense update: {NOT_CAPTURED}"]
    assert others == [[]] * (world_size - 1)
