"""The dense part without DDP makes the gradients that DDP makes; captured, it goes on doing so."""

import logging
import signal
from collections.abc import Callable
from datetime import timedelta
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed import TrainPipelineSparseDist
from torchrec.distributed.model_parallel import get_module
from torchrec.models.dlrm import DLRMTrain

import dlrm_bench.pipeline.five_stage.pipeline
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.five_stage.captured import FeaturesRead
from dlrm_bench.pipeline.five_stage.gradients import flat_gradients
from dlrm_bench.pipeline.five_stage.graph_obstacles import why_not_graphed
from dlrm_bench.pipeline.five_stage.options import FiveStageOptions
from dlrm_bench.pipeline.five_stage.pipeline import FiveStagePipeline
from dlrm_bench.pipeline.five_stage.sharded_modules import sharded_modules
from tests.cases import CPU_PLACES, GPU_PLACES
from tests.pipeline.five_stage.torchrec_models import BATCH, Kind, Trained, batches, build, drain, state

TIMEOUT = 600  # seconds, after which a rank that hangs is killed
DENSE = FiveStageOptions(cuda_graph="dense")


def train(
    ranks: Ranks,
    options: FiveStageOptions | None,
    data: list[Any],
    change: Callable[[DLRMTrain], None] = lambda model: None,
    kind: Kind = "dcn",
    plan: str = "mixed",
    around: Callable[[Any], Any] = lambda progress: progress,
) -> tuple[Trained, Any]:
    """By the five-stage pipeline, or by TorchRec's without options; and the pipeline."""
    model, optimizer = build(ranks, plan, kind, change)
    torch.manual_seed(7)  # for dropout
    if options is None:
        trainer: Any = TrainPipelineSparseDist(model, optimizer, ranks.device)
    else:
        trainer = FiveStagePipeline(model, optimizer, ranks.device, options)
    trainer.progress = around(trainer.progress)
    trained = drain(trainer, iter(data))
    trained.state = state(model, optimizer)
    if options is not None:
        trained.captured = trainer._graph is not None and trainer._graph.captured
        trainer.close()
    return trained, trainer


def assert_equal(one: Trained, other: Trained, rtol: float = 0) -> None:
    assert len(one.outputs) == len(other.outputs) > 0
    torch.testing.assert_close(one.outputs, other.outputs, rtol=rtol, atol=rtol)
    torch.testing.assert_close(one.state, other.state, rtol=10 * rtol, atol=rtol)


def uncaptured(ranks: Ranks) -> None:
    """The dense part as it runs beside its graph, on the CPU, where no graph is."""
    signal.alarm(TIMEOUT)
    dlrm_bench.pipeline.five_stage.pipeline.why_not_graphed = lambda *_: None
    kinds: tuple[Kind, ...] = ("dcn", "dot")
    for kind, plan in product(kinds, ("TW", "mixed")):
        theirs, _ = train(ranks, None, batches(ranks, 50), kind=kind, plan=plan)
        for threads in (1, 2):
            options = FiveStageOptions(cuda_graph="dense", launch_threads=threads)
            ours, trainer = train(ranks, options, batches(ranks, 50), kind=kind, plan=plan)
            assert trainer._graph is not None
            assert_equal(ours, theirs)


@pytest.mark.parametrize("world_size", [world_size for world_size, _ in CPU_PLACES])
def test_trains_bit_by_bit_as_ddp(run_ranks, world_size):
    run_ranks(world_size, uncaptured)


def test_ddp_is_as_it_was_afterwards(run_ranks):
    run_ranks(2, ddp_afterwards)


def ddp_afterwards(ranks: Ranks) -> None:
    """Pipelines with DDP, without it, and with it again, on one model."""
    signal.alarm(TIMEOUT)
    dlrm_bench.pipeline.five_stage.pipeline.why_not_graphed = lambda *_: None
    expected, _ = train(ranks, None, batches(ranks, 12))
    model, optimizer = build(ranks, "mixed")
    trained, data = Trained(), batches(ranks, 12)
    for options, part in (
        (FiveStageOptions(), data[:3]),
        (DENSE, data[3:7]),
        (FiveStageOptions(), data[7:9]),
        (DENSE, data[9:]),
    ):
        with FiveStagePipeline(model, optimizer, ranks.device, options) as trainer:
            trained.outputs += drain(trainer, iter(part)).outputs
    trained.state = state(model, optimizer)
    assert_equal(trained, expected)


def test_another_form_of_batch_is_counted_and_said_once(run_ranks):
    run_ranks(1, other_forms)


def other_forms(ranks: Ranks) -> None:
    dlrm_bench.pipeline.five_stage.pipeline.why_not_graphed = lambda *_: None
    said: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = said.append  # type: ignore[method-assign]
    logging.getLogger("dlrm_bench.pipeline.five_stage.dense_graph").addHandler(handler)
    data = batches(ranks, 3) + batches(ranks, 2, size=BATCH - 2) + batches(ranks, 1)
    _, trainer = train(ranks, DENSE, data)
    assert trainer._graph.eager_batches == 2
    assert len(said) == 1
    with torch.autocast("cpu", torch.bfloat16):
        _, trainer = train(ranks, DENSE, data[:3])
    assert trainer._graph.eager_batches == 0
    model, optimizer = build(ranks, "TW")
    trainer = FiveStagePipeline(model, optimizer, ranks.device, DENSE)
    drain(trainer, iter(data[:2]))
    with torch.autocast("cpu", torch.bfloat16):
        drain(trainer, iter(data[:2]))
    assert trainer._graph.eager_batches == 2


def test_parameters_that_are_not_used_keep_no_gradient(run_ranks):
    run_ranks(2, unused)


def add_unused(model: DLRMTrain) -> None:
    model.idle = nn.Linear(2, 2)


def unused(ranks: Ranks) -> None:
    signal.alarm(TIMEOUT)
    dlrm_bench.pipeline.five_stage.pipeline.why_not_graphed = lambda *_: None
    data = batches(ranks, 5)
    ours, _ = train(ranks, DENSE, data, add_unused)
    theirs, _ = train(ranks, None, data, add_unused)
    assert_equal(ours, theirs)
    assert not any("idle" in name and "sum" in name and value.any() for name, value in ours.state.items())


def timeout(ranks: Ranks) -> None:
    signal.alarm(TIMEOUT)
    dist.destroy_process_group()
    dist.init_process_group("gloo", timeout=timedelta(hours=3))
    dlrm_bench.pipeline.five_stage.pipeline.why_not_graphed = lambda *_: None
    _, trainer = train(ranks, DENSE, batches(ranks, 2), plan="TW")
    assert trainer._graph.group._get_backend(ranks.device).options._timeout == timedelta(hours=3)


def test_its_group_has_the_timeout_of_the_default_one(run_ranks):
    run_ranks(1, timeout)


def test_gradients_lie_aligned_in_one_buffer_a_dtype():
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in ((3, 5), (), (64,))]
    parameters.insert(1, nn.Parameter(torch.zeros(7, dtype=torch.bfloat16)))
    flats, grads = flat_gradients(parameters)
    assert [flat.dtype for flat in flats] == [torch.float32, torch.bfloat16]
    for parameter, grad in zip(parameters, grads, strict=True):
        assert grad.shape == parameter.shape
        assert grad.dtype == parameter.dtype
        assert (grad.data_ptr() - min(flat.data_ptr() for flat in flats if flat.dtype == grad.dtype)) % 128 == 0
    for number, grad in enumerate(grads):
        grad.fill_(number + 1)
    assert [int((flats[0] == number).sum()) for number in (1, 3, 4)] == [15, 1, 64]
    assert flat_gradients([]) == ([], [])


def test_the_dense_part_cannot_read_ids_while_captured():
    with pytest.raises(ValueError, match=r"reads the batch's KJT \(\.lengths\)"):
        FeaturesRead().lengths()


def test_why_not(run_ranks):
    run_ranks(1, reasons)


def reasons(ranks: Ranks) -> None:
    model, _ = build(ranks, "TW")
    gpu = torch.device("cuda", 0)
    assert "need a GPU" in (why_not_graphed(model, sharded_modules(model), ranks.device) or "")
    assert why_not_graphed(model, sharded_modules(model), gpu) is None
    get_module(model).register_comm_hook(None, lambda state, bucket: bucket.get_future())
    assert "communication hook" in (why_not_graphed(model, sharded_modules(model), gpu) or "")


# On GPUs, captured


def add_dropout(model: DLRMTrain) -> None:
    model.model.over_arch.model.insert(1, nn.Dropout(0.3))


class Reads(nn.Module):
    """Reads a number from the device, which no capture survives."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (1.0 if x.sum().item() == 0 else 2.0)


def add_read(model: DLRMTrain) -> None:
    model.model.over_arch.model.insert(1, Reads())


class Doubles(nn.Module):
    """What Reads does to a batch, without the reading."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2.0


def captured(ranks: Ranks) -> None:
    signal.alarm(TIMEOUT)
    torch.backends.cuda.matmul.allow_tf32 = False
    data = batches(ranks, 20)
    for change in (lambda model: None, add_dropout):
        for threads in (1, 2):
            options = FiveStageOptions(cuda_graph="dense", launch_threads=threads)
            eager, _ = train(ranks, FiveStageOptions(launch_threads=threads), data, change)
            graphed, trainer = train(ranks, options, data, change)
            assert graphed.captured
            # The plan has data-parallel tables.
            assert trainer.switched_off.keys() - {"launch_threads"} == {"cuda_graph"}
            assert trainer.switched_off["cuda_graph"].startswith("the dense update: Adagrad has parameters")
            assert_equal(graphed, eager, 1e-5)


@pytest.mark.parametrize(("world_size", "gpu"), GPU_PLACES)
def test_replays_what_eager_does(run_ranks, world_size, gpu):
    run_ranks(world_size, captured, gpu=gpu)


def partial_last_batches(ranks: Ranks) -> None:
    """The first rank runs the first batch of another size eagerly while the others replay; then all replay again."""
    signal.alarm(TIMEOUT)
    torch.backends.cuda.matmul.allow_tf32 = False
    size = BATCH - 2 if ranks.rank == 0 else BATCH
    data = batches(ranks, 8) + batches(ranks, 2, seed=5, size=size) + batches(ranks, 4, seed=6)
    expected, _ = train(ranks, None, data, plan="TW")
    graphed, trainer = train(ranks, DENSE, data, plan="TW")
    assert trainer._graph.eager_batches == (1 if ranks.rank == 0 else 0)
    assert_equal(graphed, expected, 1e-5)


@pytest.mark.parametrize(("world_size", "gpu"), GPU_PLACES)
def test_a_partial_last_batch_runs_eagerly_once(run_ranks, world_size, gpu):
    run_ranks(world_size, partial_last_batches, gpu=gpu)


def cannot_capture(ranks: Ranks) -> None:
    """Not on any rank, or on the last one alone."""
    signal.alarm(TIMEOUT)
    torch.backends.cuda.matmul.allow_tf32 = False
    data = batches(ranks, 12)
    for everywhere in (True, False):
        fails = everywhere or ranks.rank == ranks.world_size - 1

        def change(model: DLRMTrain, fails: bool = fails) -> None:
            add_dropout(model)
            if fails:
                add_read(model)
            else:
                model.model.over_arch.model.insert(1, Doubles())

        eager, _ = train(ranks, FiveStageOptions(), data, change)
        graphed, trainer = train(ranks, DENSE, data, change)
        assert ("cannot be captured" in trainer.switched_off["cuda_graph"]) == fails
        assert_equal(graphed, eager, 1e-5)
        torch.rand(4, device=ranks.device)  # the generator is out of the capture


@pytest.mark.parametrize(("world_size", "gpu"), GPU_PLACES)
def test_what_cannot_be_captured_runs_eagerly(run_ranks, world_size, gpu):
    run_ranks(world_size, cannot_capture, gpu=gpu)


def autocast(ranks: Ranks) -> None:
    signal.alarm(TIMEOUT)
    data = batches(ranks, 20)
    # Around each call: autocast around several keeps weights as it cast them first.
    each = torch.autocast("cuda", torch.bfloat16)
    eager, _ = train(ranks, FiveStageOptions(), data, around=each)
    graphed, _ = train(ranks, DENSE, data, around=each)
    assert graphed.captured
    # A weight cast before the capture and never again would let the loss stand still.
    torch.testing.assert_close(graphed.outputs, eager.outputs, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(("world_size", "gpu"), GPU_PLACES)
def test_autocast_casts_weights_in_every_replay(run_ranks, world_size, gpu):
    run_ranks(world_size, autocast, gpu=gpu)
