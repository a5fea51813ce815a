"""One graph of all five stages trains bit by bit what TorchRec's TrainPipelineSparseDist does."""

import signal
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torchrec.distributed import TrainPipelineSparseDist
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.keyed import CombinedOptimizer
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.five_stage import iteration_work
from dlrm_bench.pipeline.five_stage.options import FiveStageOptions
from dlrm_bench.pipeline.five_stage.pipeline import FiveStagePipeline
from dlrm_bench.pipeline.five_stage.trimmed.sharder import TrimmedEBCSharder
from tests.cases import CPU_PLACES, GPU_PLACES
from tests.pipeline.cpu_graphs import iteration_graph_on_cpu
from tests.pipeline.five_stage.torchrec_models import HOT, Trained, batches, build, drain, state

TIMEOUT = 300  # seconds, after which a rank that hangs is killed
MANY, STEPS, FEWER = 200, 50, 16
EAGER = 5  # first iterations, of which the last two rehearse
WHOLE = FiveStageOptions(cuda_graph="iteration")
BITS = 0.0
ON_GPU = 1e-5


def adam(of: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(of, lr=0.01, capturable=True)


def sgd(of: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(of, lr=0.05, momentum=0.9)


CASES: list[dict[str, Any]] = [
    {"plan": "TW", "kind": "dot"},
    {"plan": "CW", "dense_by": sgd},
    {"plan": "TW", "tables_by": RowWiseAdagrad, "dense_by": adam},
    {"plan": "mixed without RW"},
    {"plan": "mixed with TWCW"},
    {"plan": "mixed", "sharder": TrimmedEBCSharder(HOT, rows_to_all=True)},
]


@dataclass
class Run:
    trained: Trained
    described: dict[str, Any]
    off: dict[str, str]


def prepare(ranks: Ranks) -> None:
    signal.alarm(TIMEOUT)
    torch.backends.cuda.matmul.allow_tf32 = False
    if ranks.device.type == "cpu":
        iteration_graph_on_cpu()


def stock(ranks: Ranks, data: list[Any], each: Any = None, wrap: Any = lambda it: it, **built: Any) -> Trained:
    model, optimizer = build(ranks, **({"plan": "TW"} | built))
    optimizer = wrap(optimizer)
    pipeline = TrainPipelineSparseDist(model, optimizer, ranks.device)
    trained = drain(pipeline, iter(data), (lambda step: each(step, optimizer, model)) if each else lambda step: None)
    trained.state = state(model, optimizer)
    return trained


def whole(
    ranks: Ranks,
    data: list[Any],
    each: Any = None,
    options: FiveStageOptions = WHOLE,
    sizes: dict[str, int] = HOT,
    wrap: Any = lambda it: it,
    **built: Any,
) -> Run:
    """each(step, optimizer, model): before every step."""
    model, optimizer = build(ranks, **({"plan": "TW", "sharder": TrimmedEBCSharder(sizes)} | built))
    optimizer = wrap(optimizer)
    with FiveStagePipeline(model, optimizer, ranks.device, options) as pipeline:
        trained = drain(
            pipeline, iter(data), (lambda step: each(step, optimizer, model)) if each else lambda step: None
        )
        trained.state = state(model, optimizer)
        return Run(trained, pipeline.describe(), pipeline.switched_off)


def assert_equal(ours: Trained, theirs: Trained, rtol: float) -> None:
    assert len(ours.outputs) == len(theirs.outputs) > 0
    torch.testing.assert_close(ours.outputs, theirs.outputs, rtol=rtol, atol=rtol)
    torch.testing.assert_close(ours.state, theirs.state, rtol=10 * rtol, atol=rtol)


# What is captured


OF_SGD = {"plan": "TW", "tables_by": torch.optim.SGD}
"""On CPUs: not every build of FBGEMM for GPUs has its kernel."""


def equal_to_stock(ranks: Ranks, rtol: float) -> list[dict[str, Any]]:
    prepare(ranks)
    described = []
    for case in [*CASES, *([OF_SGD] if ranks.device.type == "cpu" else [])]:
        steps = STEPS if case is CASES[0] or ranks.device.type == "cuda" else FEWER
        data = batches(ranks, steps, fixed=True)
        run = whole(ranks, data, **case)
        plain = {name: value for name, value in case.items() if name != "sharder"}
        assert_equal(run.trained, stock(ranks, data, **plain), rtol)
        assert run.described["replays"] == steps - EAGER
        described.append(run.described)
    return described


@pytest.mark.parametrize(
    ("world_size", "gpu", "rtol"),
    [(world, gpu, BITS) for world, gpu in CPU_PLACES]
    + [pytest.param(*place.values, ON_GPU, marks=place.marks) for place in GPU_PLACES],
)
def test_trains_bit_by_bit_as_stock(run_ranks, world_size, gpu, rtol):
    for of_rank in run_ranks(world_size, equal_to_stock, rtol, gpu=gpu):
        for described in of_rank:
            assert described["captures"] == 1
            assert described["eager"] == {}
            assert len(described["in_graph"]) == 6


def long(ranks: Ranks, rtol: float) -> dict[str, Any]:
    prepare(ranks)
    data, case = batches(ranks, MANY, fixed=True), {"plan": "mixed without RW", "dense_by": adam}
    run, plain = whole(ranks, data, **case), stock(ranks, data, **case)
    assert {name.rpartition("/")[2] for name in plain.state if "/" in name} >= {"exp_avg", "exp_avg_sq", "step"}
    assert_equal(run.trained, plain, rtol)
    return run.described


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "gpu", "rtol"),
    [(2, False, BITS), *(pytest.param(*place.values, 10 * ON_GPU, marks=place.marks) for place in GPU_PLACES)],
)
def test_losses_weights_and_states_are_stocks_after_200_steps(run_ranks, world_size, gpu, rtol):
    for described in run_ranks(world_size, long, rtol, gpu=gpu):
        assert (described["replays"], described["captures"], described["eager"]) == (MANY - EAGER, 1, {})


def clipped(optimizer: CombinedOptimizer) -> CombinedOptimizer:
    fused, dense = (part for _, part in optimizer.optimizers)
    return CombinedOptimizer([fused, GradientClippingOptimizer(dense, GradientClipping.VALUE, max_gradient=0.01)])


def warming_up(optimizer: CombinedOptimizer) -> CombinedOptimizer:
    fused, dense = (part for _, part in optimizer.optimizers)
    stages = [WarmupStage(WarmupPolicy.CONSTANT, max_iters=20, value=0.1), WarmupStage(WarmupPolicy.NONE, 1000, 1.0)]
    return CombinedOptimizer([fused, WarmupOptimizer(dense, stages, lr=0.05)])


def rates(step: int, optimizer: Any, model: Any) -> None:
    """The tables' rate changes twice, the dense weights' with every step."""
    tables, dense = (part for _, part in optimizer.optimizers)
    for group in tables.param_groups:
        group["lr"] = 0.05 if step < 15 else 0.03 if step < 25 else 0.01
    for group in dense.param_groups:
        group["lr"] = 0.05 * 0.99**step


def moves(step: int, optimizer: Any, model: Any) -> None:
    """A weight is given other memory, as where averages are swapped in."""
    if step == 15:
        weight = model.module.model.over_arch.model[0]._mlp[0]._linear.weight
        weight.data = weight.data.clone()


def around(ranks: Ranks, rtol: float) -> list[dict[str, Any]]:
    """What stands around a step."""
    prepare(ranks)
    data = batches(ranks, 30, fixed=True)
    cases: list[dict[str, Any]] = [{"wrap": clipped}, {"wrap": warming_up}, {"each": rates}, {"each": moves}]
    described = []
    for case in cases:
        run = whole(ranks, data, **case)
        assert_equal(run.trained, stock(ranks, data, **case), rtol)
        described.append(run.described)
    return described


@pytest.mark.parametrize(
    ("world_size", "gpu", "rtol"),
    [(1, False, BITS), pytest.param(2, True, ON_GPU, marks=pytest.mark.multi_gpu)],
)
def test_what_stands_around_a_step(run_ranks, world_size, gpu, rtol):
    for of_rank in run_ranks(world_size, around, rtol, gpu=gpu):
        clips, warms_up, rate, moved = of_rank
        assert clips["replays"] == 30 - EAGER
        assert "dense update" in clips["in_graph"]
        assert "dense update" not in warms_up["in_graph"]
        assert warms_up["replays"] == 30 - EAGER
        # The dense rate is on the device; the tables' is in the graph's nodes, or takes two more captures.
        assert rate["captures"] == (1 if rate["follows_table_rates"] else 3)
        assert rate["replays"] == 30 - EAGER
        assert moved["captures"] == 2
        ((why, count),) = moved["eager"].items()
        assert "lies in other memory" in why
        assert moved["replays"] == 30 - EAGER - count


def leaves_again(ranks: Ranks) -> list[int]:
    """Returns how many leaves each iteration's embedding backward ends at that the iteration before has ended at."""
    prepare(ranks)
    counts, backward = [], iteration_work.embedding_backward

    def counted(outputs: Any, grads: Any) -> None:
        ahead, seen = [values.grad_fn for values in outputs.values if values.requires_grad], set()
        while ahead:
            node = ahead.pop()
            if node is not None and node not in seen:
                seen.add(node)
                ahead += [following for following, _ in node.next_functions]
        leaves = [node for node in seen if hasattr(node, "variable")]
        assert leaves
        counts.append(sum("used" in leaf.metadata for leaf in leaves))
        for leaf in leaves:
            leaf.metadata["used"] = True
        backward(outputs, grads)

    with patch.object(iteration_work, "embedding_backward", counted):
        whole(ranks, batches(ranks, 9, fixed=True), plan="mixed without RW")
    return counts


def test_a_capture_has_leaves_of_its_own(run_ranks):
    """Autograd would wait for the stream on which they were first used."""
    for counts in run_ranks(2, leaves_again):
        assert len(counts) > 3
        assert not any(counts)


def other_forms(ranks: Ranks) -> list[dict[str, Any]]:
    """A smaller batch in between; batches of another form on one rank alone, which all ranks then run eagerly."""
    prepare(ranks)
    data = batches(ranks, 10, fixed=True) + batches(ranks, 1, size=4, fixed=True) + batches(ranks, 10, 2, fixed=True)
    smaller = whole(ranks, data)
    assert_equal(smaller.trained, stock(ranks, data), BITS)
    data = batches(ranks, 20, fixed=True)
    if ranks.rank == 1:
        data[12].labels = data[12].labels.double()
    one = whole(ranks, data)
    assert_equal(one.trained, stock(ranks, data), BITS)
    return [smaller.described, one.described]


def test_other_forms_run_eagerly_on_all_ranks(run_ranks):
    for of_rank in run_ranks(2, other_forms):
        for described, total in zip(of_rank, (21, 20), strict=True):
            ((why, count),) = described["eager"].items()
            assert "another form" in why
            assert count == 2  # its own iteration, and the one before, which would distribute it
            assert described["replays"] == total - EAGER - count


def in_between(ranks: Ranks) -> None:
    """Evaluation, and iterators that end."""
    prepare(ranks)
    data = [batches(ranks, count, seed, fixed=True) for seed, count in enumerate((12, 3, 0, 9))]
    held_out = batches(ranks, 3, 9, fixed=True)
    results = []
    for ours in (True, False):
        model, optimizer = build(ranks, "TW", sharder=TrimmedEBCSharder(HOT))
        options = WHOLE if ours else FiveStageOptions()
        with FiveStagePipeline(model, optimizer, ranks.device, options) as pipeline:
            trained = Trained()
            for part in data:
                trained.outputs += drain(pipeline, iter(part)).outputs
                model.eval()
                with torch.no_grad():
                    trained.outputs += drain(pipeline, iter(held_out)).outputs
                model.train()
            trained.state = state(model, optimizer)
            results.append(trained)
            assert not ours or pipeline.describe()["replays"] > 8
    assert_equal(*results, BITS)


def test_evaluation_and_ends_of_data(run_ranks):
    run_ranks(2, in_between)


def held_streams(ranks: Ranks) -> list[list[str]]:
    """Side streams that wait for the caller's, by call after a replay: an evaluation's, a replayed one."""
    prepare(ranks)
    data, held = iter(batches(ranks, 20, fixed=True)), list[list[str]]()
    model, optimizer = build(ranks, "TW", sharder=TrimmedEBCSharder(HOT))
    with FiveStagePipeline(model, optimizer, ranks.device, WHOLE) as pipeline:
        while not pipeline.describe().get("replays"):
            pipeline.progress(data)
        for train in (False, True, True):
            names: list[str] = []
            pipeline._streams.hold = lambda name, after, names=names: names.append(name)  # type: ignore[method-assign]
            model.train(train)
            pipeline.progress(data)
            held.append([*names])
        assert pipeline.describe()["replays"] == 3
    return held


def test_collectives_of_an_evaluation_come_after_those_of_the_last_graph(run_ranks):
    # With every call those who read memory that it lets go of; the first batch after the evaluation is distributed
    # without a graph too.
    released = ["input_dist", "copy"]
    assert run_ranks(1, held_streams) == [[[*released, "input_dist"], [*released, "input_dist"], released]]


# What is refused


def every_step(step: int, optimizer: Any, model: Any) -> None:
    """Another rate of everything with every step."""
    for group in optimizer.param_groups:
        group["lr"] = 0.05 * min(1, (step + 1) / 10) * 0.99**step


def follows(ranks: Ranks, rtol: float) -> dict[str, Any]:
    prepare(ranks)
    data, described = batches(ranks, 60, fixed=True), {}
    for tables_by in (torch.optim.Adagrad, RowWiseAdagrad):
        run = whole(ranks, data, every_step, tables_by=tables_by)
        assert_equal(run.trained, stock(ranks, data, every_step, tables_by=tables_by), rtol)
        described = run.described
        assert described["replays"] == 60 - EAGER
        assert described["captures"] == 1
    return described


@pytest.mark.parametrize(("world_size", "gpu"), GPU_PLACES)
def test_a_schedule_of_the_tables_needs_no_new_capture(run_ranks, world_size, gpu):
    for described in run_ranks(world_size, follows, ON_GPU, gpu=gpu):
        assert described["follows_table_rates"]


def moves_on_one_rank(ranks: Ranks) -> tuple[dict[str, Any], bool]:
    """All tables are rank 0's, on CPUs, where no graph can follow their rates."""
    prepare(ranks)
    data, plan = batches(ranks, 20, fixed=True), "TW of rank 0"
    run = whole(ranks, data, every_step, plan=plan)
    assert_equal(run.trained, stock(ranks, data, every_step, plan=plan), BITS)
    return run.described, "cuda_graph" not in run.off


def test_rates_that_move_on_some_ranks_alone_keep_all_on_graphs(run_ranks):
    (first, on), (second, also_on) = run_ranks(2, moves_on_one_rank)
    assert on
    assert also_on
    assert first["replays"] == second["replays"]
    assert first["captures"] > second["captures"] == 1
