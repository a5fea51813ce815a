"""The five-stage pipeline trains bit by bit what TorchRec's TrainPipelineSparseDist does, with every switch."""

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torchrec.distributed import TrainPipelineSparseDist
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.keyed import CombinedOptimizer

from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.five_stage.optimizers import communicates
from dlrm_bench.pipeline.five_stage.options import FiveStageOptions
from dlrm_bench.pipeline.five_stage.pipeline import FiveStagePipeline
from tests.cases import CPU_PLACES, GPU_PLACES
from tests.pipeline.five_stage.torchrec_models import DP, PLANS, Kind, Trained, batches, build, drain, state

STEPS = 100  # on GPUs, where sums may differ by a little more each step
EQUAL_STEPS = 20  # on CPUs, where each step is equal to the bit or the test fails there
TIMEOUT = 600  # seconds, after which a rank that hangs is killed
ALL_ON = FiveStageOptions(cuda_graph="dense", launch_threads=2)


@dataclass(frozen=True)
class Case:
    plan: str
    options: FiveStageOptions
    kind: Kind = "dcn"
    lengths_known: bool = False


CASES = st.builds(
    Case,
    plan=st.sampled_from(sorted(PLANS)),
    kind=st.sampled_from(["dcn", "dot"]),
    lengths_known=st.booleans(),
    options=st.builds(
        FiveStageOptions,
        avoid_record_streams=st.booleans(),
        pinned_d2h=st.booleans(),
        cuda_graph=st.sampled_from(["none", "dense"]),
        launch_threads=st.sampled_from([1, 2]),
    ),
)


def learning_rate(optimizer: torch.optim.Optimizer) -> Callable[[int], None]:
    """A schedule that warms up and decays, as a user's scheduler sets it between steps."""

    def set_for(step: int) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * min(1, (step + 1) / 10) * 0.99**step

    return set_for


def steps_on(ranks: Ranks) -> int:
    return STEPS if ranks.device.type == "cuda" else EQUAL_STEPS


def stock(ranks: Ranks, case: Case, steps: int) -> Trained:
    model, optimizer = build(ranks, case.plan, case.kind)
    pipeline = TrainPipelineSparseDist(model, optimizer, ranks.device)
    trained = drain(pipeline, iter(batches(ranks, steps)), learning_rate(optimizer))
    trained.state = state(model, optimizer)
    return trained


def five_stage(ranks: Ranks, case: Case, steps: int) -> tuple[Trained, dict[str, str]]:
    model, optimizer = build(ranks, case.plan, case.kind)
    with FiveStagePipeline(model, optimizer, ranks.device, case.options) as pipeline:
        data = iter(batches(ranks, steps, lengths_known=case.lengths_known))
        trained = drain(pipeline, data, learning_rate(optimizer))
        trained.state = state(model, optimizer)
        if ranks.device.type == "cuda" and case.options.cuda_graph == "dense":
            assert pipeline._graph is not None
            assert pipeline._graph.captured
    return trained, pipeline.switched_off


def assert_equal(ours: Trained, theirs: Trained, rtol: float = 0) -> None:
    assert len(ours.outputs) == len(theirs.outputs) > 0
    for mine, other in zip(ours.outputs, theirs.outputs, strict=True):
        torch.testing.assert_close(mine, other, rtol=rtol, atol=rtol)
    assert ours.state.keys() == theirs.state.keys()
    for name, value in ours.state.items():
        torch.testing.assert_close(value, theirs.state[name], rtol=10 * rtol, atol=rtol, msg=lambda m, n=name: n + m)


def parity(ranks: Ranks, cases: list[Case], rtol: float = 0) -> list[dict[str, str]]:
    """What was off in each case."""
    signal.alarm(TIMEOUT)
    torch.backends.cuda.matmul.allow_tf32 = False
    expected: dict[tuple[str, str], Trained] = {}
    off = []
    for case in cases:
        key = (case.plan, case.kind)
        if key not in expected:
            expected[key] = stock(ranks, case, steps_on(ranks))
        trained, switched_off = five_stage(ranks, case, steps_on(ranks))
        assert_equal(trained, expected[key], rtol)
        off.append(switched_off)
    return off


# One list, in which the cases of a plan and kind share what stock trains.
@settings(
    max_examples=1, deadline=None, derandomize=True, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
)
@given(cases=st.lists(CASES, min_size=12, max_size=12, unique=True))
def test_trains_bit_by_bit_as_torchrec(run_ranks, cases):
    for of_rank in run_ranks(2, parity, cases):
        for case, off in zip(cases, of_rank, strict=True):
            options = case.options
            assert ("avoid_record_streams" in off) == options.avoid_record_streams
            assert ("pinned_d2h" in off) == options.pinned_d2h
            assert ("cuda_graph" in off) == (options.cuda_graph == "dense")
            assert ("launch_threads" in off) == (options.launch_threads == 2 and DP in PLANS[case.plan])


@pytest.mark.parametrize("world_size", [world_size for world_size, _ in CPU_PLACES])
def test_every_plan_with_all_switches_on(run_ranks, world_size):
    run_ranks(world_size, parity, [Case(plan, ALL_ON) for plan in PLANS])


@pytest.mark.parametrize(("world_size", "gpu"), GPU_PLACES)
def test_every_plan_with_all_switches_on_gpu(run_ranks, world_size, gpu):
    cases = [Case(plan, ALL_ON, kind) for plan in PLANS for kind in ("dcn", "dot")]
    for of_rank in run_ranks(world_size, parity, cases, 1e-5, gpu=gpu):
        # Data-parallel tables leave the dense update eager.
        assert all(off.get("cuda_graph", "the dense update: ").startswith("the dense update: ") for off in of_rank)
        assert all(off.keys() <= {"cuda_graph", "launch_threads"} for off in of_rank)


@pytest.mark.parametrize(("world_size", "gpu"), GPU_PLACES)
def test_each_switch_alone_gpu(run_ranks, world_size, gpu):
    off = FiveStageOptions(avoid_record_streams=False, pinned_d2h=False)
    alone = [{"avoid_record_streams": True}, {"pinned_d2h": True}, {"cuda_graph": "dense"}, {"launch_threads": 2}]
    cases = [Case("mixed", off), *(Case("TW", replace(off, **switch)) for switch in alone)]
    run_ranks(world_size, parity, cases, 1e-5, gpu=gpu)


def test_parity_can_fail(run_ranks):
    with pytest.raises(Exception, match="Tensor-likes are not equal"):
        run_ranks(1, with_another_rate)


def with_another_rate(ranks: Ranks) -> None:
    trained = stock(ranks, Case("TW", FiveStageOptions()), steps=5)
    other, _ = five_stage(ranks, Case("TW", FiveStageOptions()), steps=5)
    other.state = {name: value + (1e-7 if "sum" in name else 0) for name, value in other.state.items()}
    assert_equal(other, trained)


# Data that ends, and evaluation


def test_iterators_of_any_length(run_ranks):
    run_ranks(2, several_iterators)


def several_iterators(ranks: Ranks) -> None:
    """Drained iterators of 1, 2, 3, 0 and 7 batches, and one that takes over while batches are in flight."""
    signal.alarm(TIMEOUT)
    for threads in (1, 2):
        model, optimizer = build(ranks, "mixed")
        reference, reference_optimizer = build(ranks, "mixed")
        theirs = TrainPipelineSparseDist(reference, reference_optimizer, ranks.device)
        with FiveStagePipeline(model, optimizer, ranks.device, FiveStageOptions(launch_threads=threads)) as ours:
            for seed, length in enumerate((1, 2, 3, 0, 7)):
                got = drain(ours, iter(batches(ranks, length, seed)))
                expected = drain(theirs, iter(batches(ranks, length, seed)))
                assert len(got.outputs) == length
                assert all(
                    torch.equal(a, b)
                    for x, y in zip(got.outputs, expected.outputs, strict=True)
                    for a, b in zip(x, y, strict=True)
                )
            data = batches(ranks, 9, seed=8)
            first, second, results = iter(data[:4]), iter(data[4:]), []
            results += [ours.progress(first)[1] for _ in range(3)]
            results += [output[1] for output in drain(ours, second).outputs]
            expected = drain(theirs, iter(data))
            assert all(torch.equal(a, b[1]) for a, b in zip(results, expected.outputs, strict=True))


def test_an_ended_iterator_is_not_asked_again(run_ranks):
    run_ranks(1, end_once)


def end_once(ranks: Ranks) -> None:
    def data() -> Iterator[Any]:
        yield from batches(ranks, 3)
        asked.append(True)

    asked: list[bool] = []
    model, optimizer = build(ranks, "TW")
    iterator = data()
    with FiveStagePipeline(model, optimizer, ranks.device) as pipeline:
        assert len(drain(pipeline, iterator).outputs) == 3
        with pytest.raises(StopIteration):
            pipeline.progress(iterator)
    assert asked == [True]


@pytest.mark.parametrize("threads", [1, 2])
def test_evaluation_in_between(run_ranks, threads):
    run_ranks(2, evaluate, threads)


def evaluate(ranks: Ranks, threads: int) -> None:
    """By the same pipeline between two iterators, and by a second one while the first has batches in flight."""
    signal.alarm(TIMEOUT)
    options, device = FiveStageOptions(launch_threads=threads), ranks.device
    expected = stock(ranks, Case("mixed", options), steps=20)
    held_out = batches(ranks, 4, seed=9)
    model, optimizer = build(ranks, "mixed")
    training, schedule = iter(batches(ranks, 20)), learning_rate(optimizer)
    trained = Trained()
    with (
        FiveStagePipeline(model, optimizer, device, options) as ours,
        FiveStagePipeline(model, optimizer, device, options) as other,
    ):
        for step in count():
            if step in (7, 12):
                before = state(model, optimizer)
                model.eval()
                with torch.no_grad():
                    outputs = drain(other, iter(held_out)).outputs
                    direct = [model(batch)[1] for batch in held_out]
                for mine, (loss, logits, _) in zip(outputs, direct, strict=True):
                    assert torch.equal(mine[0], loss)
                    assert torch.equal(mine[1], logits)
                model.train()
                after = state(model, optimizer)
                assert all(torch.equal(value, before[name]) for name, value in after.items())
            schedule(step)
            try:
                trained.outputs.append(ours.progress(training))
            except StopIteration:
                break
        trained.state = state(model, optimizer)
        assert_equal(trained, expected)
        model.eval()
        with torch.no_grad():
            assert len(drain(ours, iter(held_out)).outputs) == len(held_out)
        assert all(torch.equal(value, trained.state[name]) for name, value in state(model, optimizer).items())


def test_batch_sizes_that_differ_between_ranks(run_ranks):
    run_ranks(2, uneven)


def uneven(ranks: Ranks) -> None:
    signal.alarm(TIMEOUT)
    data = [batches(ranks, 1, seed, size=2 + (seed + ranks.rank) % 3)[0] for seed in range(12)]
    for plan in ("TW", "CW"):  # gloo has no reduce-scatter of different sizes, which row-wise tables need
        model, optimizer = build(ranks, plan)
        expected = drain(TrainPipelineSparseDist(model, optimizer, ranks.device), iter(data))
        expected.state = state(model, optimizer)
        model, optimizer = build(ranks, plan)
        with FiveStagePipeline(model, optimizer, ranks.device, FiveStageOptions(launch_threads=2)) as pipeline:
            trained = drain(pipeline, iter(data))
            trained.state = state(model, optimizer)
        assert_equal(trained, expected)


# Optimizers that it must treat with care


def test_a_norm_over_all_ranks_keeps_the_update_on_the_caller(run_ranks):
    run_ranks(2, clip)


def clip(ranks: Ranks) -> None:
    signal.alarm(TIMEOUT)

    def clipped(everywhere: bool) -> tuple[Any, CombinedOptimizer]:
        model, optimizer = build(ranks, "TW")
        (fused, dense) = (part for _, part in optimizer.optimizers)
        clipping = GradientClippingOptimizer(
            dense, GradientClipping.NORM, max_gradient=0.01, enable_global_grad_clip=everywhere
        )
        return model, CombinedOptimizer([fused, clipping])

    for everywhere in (False, True):
        results = []
        for threads in (1, 2):
            model, optimizer = clipped(everywhere)
            assert communicates(optimizer) == everywhere
            options = FiveStageOptions(launch_threads=threads)
            with FiveStagePipeline(model, optimizer, ranks.device, options) as pipeline:
                assert ("launch_threads" in pipeline.switched_off) == (everywhere and threads == 2)
                results.append(drain(pipeline, iter(batches(ranks, 10))))
                results[-1].state = state(model, optimizer)
        assert_equal(*results)


def test_switches_that_are_off_are_said_once_on_rank_0(run_ranks):
    """What has nothing to do on a CPU is no loss, and is not said."""
    assert run_ranks(2, said) == [["cuda_graph"], []]


def said(ranks: Ranks) -> list[str]:
    import logging

    records: list[logging.LogRecord] = []
    with ExitStack() as stack:
        handler = logging.Handler()
        handler.emit = records.append  # type: ignore[method-assign]
        logger = logging.getLogger("dlrm_bench.pipeline.five_stage.switches")
        logger.addHandler(handler)
        stack.callback(logger.removeHandler, handler)
        model, optimizer = build(ranks, "TW")
        with FiveStagePipeline(model, optimizer, ranks.device, FiveStageOptions(cuda_graph="dense")) as pipeline:
            drain(pipeline, iter(batches(ranks, 5)))
            assert len(pipeline.switched_off) == 3
    return sorted(str(record.args[0]) for record in records)  # type: ignore[index]
