"""Tables updated by Adam in the graph of a whole iteration: each replay is given its step, and trains as stock.

FBGEMM has no Adam on CPUs: there a plain one stands for it, and graphs keep the step of their capture until they are
given another.
"""

import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch.optim import Adam
from torchrec import KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed import TrainPipelineSparseDist
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.optim.optimizers import LAMB, PartialRowWiseAdam, PartialRowWiseLAMB
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.five_stage import iteration_graph, reasons
from dlrm_bench.pipeline.five_stage.iteration_obstacles import lookup_kernels
from dlrm_bench.pipeline.five_stage.options import FiveStageOptions
from dlrm_bench.pipeline.five_stage.pipeline import FiveStagePipeline
from dlrm_bench.pipeline.five_stage.sharded_modules import sharded_modules
from dlrm_bench.pipeline.five_stage.table_steps import COUNTING, TableSteps
from dlrm_bench.pipeline.five_stage.trimmed.sharder import TrimmedEBCSharder
from tests.cases import CPU_PLACES, GPU_PLACES
from tests.pipeline.cpu_graphs import Checked, iteration_graph_on_cpu
from tests.pipeline.five_stage import any_models, test_iteration_forms
from tests.pipeline.five_stage.adam_on_cpu import adam, adam_on_cpu
from tests.pipeline.five_stage.test_iteration_graph import BITS, EAGER, ON_GPU, TIMEOUT, WHOLE, assert_equal, every_step
from tests.pipeline.five_stage.test_iteration_habits import SHARDERS, Several, sgd
from tests.pipeline.five_stage.torchrec_models import HOT, Trained, batches, build, drain, state

STEPS, SIZE = 14, 32
DECAY = {"weight_decay": 0.01}


def test_steps_go_on_from_the_hosts_count_or_where_it_is_zero_from_the_devices() -> None:
    def kernel(host: int, device: int, optimizer: EmbOptimType = EmbOptimType.ADAM) -> Any:
        return SimpleNamespace(optimizer=optimizer, iter_cpu=torch.tensor([host]), iter=torch.tensor([device]))

    kernels = [kernel(3, 5), kernel(0, 7), kernel(9, 9, EmbOptimType.EXACT_ROWWISE_ADAGRAD)]
    steps = TableSteps(kernels)
    assert len(steps) == 2
    assert steps.counted == [3, 7]
    steps.set([4, 8])
    assert [int(of.iter_cpu) for of in kernels] == [4, 8, 9]
    assert [int(of.iter) for of in kernels] == [5, 7, 9]


def test_the_plain_adam_is_that_of_torch() -> None:
    rows = torch.randn(5, 8)
    parameter = torch.nn.Parameter(rows.clone())
    theirs = torch.optim.AdamW([parameter], lr=0.01, weight_decay=0.1)
    of, moments = SimpleNamespace(eps=1e-8, beta1=0.9, beta2=0.999, weight_decay=0.1), torch.zeros(2, 5, 8)
    for step in range(1, 20):
        parameter.grad = torch.randn(5, 8)
        theirs.step()
        adam(rows, *moments, parameter.grad, lr=0.01, step=step, of=of)
    torch.testing.assert_close(rows, parameter.detach(), rtol=1e-4, atol=1e-4)


# Training


def prepare(ranks: Ranks) -> list[Checked]:
    signal.alarm(TIMEOUT)
    torch.backends.cuda.matmul.allow_tf32 = False
    if ranks.device.type == "cuda":
        return []
    adam_on_cpu()
    return iteration_graph_on_cpu(numbered=True)


def counts(model: Any) -> dict[str, torch.Tensor]:
    """Steps that FBGEMM has counted, on the host and on the device."""
    kernels = [of for _, of in lookup_kernels(sharded_modules(model)) if of.optimizer in COUNTING]
    return {f"steps of kernel {i}": torch.tensor([int(of.iter_cpu), int(of.iter)]) for i, of in enumerate(kernels)}


def train(
    ranks: Ranks,
    parts: Sequence[list[Any]],
    built: tuple[Any, Any],
    options: FiveStageOptions | None,
    each: Any = None,
    held_out: Sequence[Any] = (),
) -> tuple[Trained, dict[str, Any]]:
    """On parts of data, each with an iterator of its own and held-out batches in between. options: None for stock."""
    model, optimizer = built
    pipeline: Any = TrainPipelineSparseDist(model, optimizer, ranks.device)
    if options is not None:
        pipeline = FiveStagePipeline(model, optimizer, ranks.device, options)
    trained, described = Trained(), {}
    for data in parts:
        trained.outputs += drain(
            pipeline, iter(data), (lambda step: each(step, optimizer, model)) if each else lambda step: None
        ).outputs
        model.eval()
        with torch.no_grad():
            trained.outputs += drain(pipeline, iter(held_out)).outputs
        model.train()
    trained.state = state(model, optimizer) | counts(model)
    if options is not None:
        described = pipeline.describe()
        pipeline.close()
    return trained, described


CASES: dict[str, dict[str, Any]] = {
    "tables": {"plan": "TW", "kind": "dot"},
    "columns": {"plan": "CW"},
    "mixed": {"plan": "mixed without RW"},
    "decay": {"plan": "TW", "fused": DECAY},
    "rows": {"plan": "RW"},
    "mixed rows": {"plan": "mixed"},
    "rows, decay": {"plan": "RW", "fused": DECAY},
    "rows, decay of another": {"plan": "RW", "fused": DECAY, "tables_by": RowWiseAdagrad},
    "schedule": {"plan": "TW", "each": every_step},
}


def parity(ranks: Ranks, cases: dict[str, dict[str, Any]], rtol: float) -> dict[str, dict[str, Any]]:
    prepare(ranks)
    data = batches(ranks, STEPS, size=SIZE, fixed=True)
    found = {}
    for name, case in cases.items():
        of_model = {"tables_by": Adam} | {key: value for key, value in case.items() if key not in ("fused", "each")}
        fused, each = case.get("fused"), case.get("each")
        ours = build(ranks, sharder=TrimmedEBCSharder(HOT, fused, row_capacity=1.0), **of_model)
        theirs = build(ranks, sharder=EmbeddingBagCollectionSharder(fused), **of_model)
        trained, found[name] = train(ranks, [data], ours, WHOLE, each)
        assert "steps of kernel 0" in trained.state or of_model["tables_by"] is RowWiseAdagrad
        expected, _ = train(ranks, [data], theirs, None, each)
        assert_equal(trained, expected, rtol)
    return found


@pytest.mark.parametrize(
    ("world_size", "gpu", "rtol"),
    [(world, gpu, BITS) for world, gpu in CPU_PLACES]
    + [pytest.param(*place.values, ON_GPU, marks=place.marks) for place in GPU_PLACES],
)
def test_trains_as_stock(run_ranks: Callable[..., Any], world_size: int, gpu: bool, rtol: float) -> None:
    for of_rank in run_ranks(world_size, parity, CASES, rtol, gpu=gpu):
        for name, described in of_rank.items():
            assert (name, described["eager"]) == (name, {})
            assert (described["captures"], described["replays"]) == (1, STEPS - EAGER)
            assert described["follows_table_rates"]


OTHERS = {kind.__name__: {"plan": "TW", "tables_by": kind} for kind in (PartialRowWiseAdam, LAMB, PartialRowWiseLAMB)}


@pytest.mark.parametrize(("world_size", "gpu"), GPU_PLACES)
def test_other_optimizers_that_are_given_their_step(run_ranks: Callable[..., Any], world_size: int, gpu: bool) -> None:
    for of_rank in run_ranks(world_size, parity, OTHERS, ON_GPU, gpu=gpu):
        for described in of_rank.values():
            assert (described["captures"], described["replays"]) == (1, STEPS - EAGER)


def first_rows(batch: Batch) -> Batch:
    """The batch with ids of the first two rows, which rank 0 has."""
    kjt = batch.sparse_features
    ids = KeyedJaggedTensor(kjt.keys(), kjt.values() % 2, lengths=kjt.lengths(), stride=kjt.stride())
    return replace(batch, sparse_features=ids)


def eagerly_between(ranks: Ranks, capacity: float, rtol: float) -> dict[str, Any]:
    """Batches that no rank's rows but the first one's are named by. capacity: 1.0 has no room for them, 2.0 has."""
    prepare(ranks)
    data = batches(ranks, STEPS, size=SIZE, fixed=True)
    for step in (1, 4, 7, 9, 10, STEPS - 1):
        data[step] = first_rows(data[step])
    sharder = TrimmedEBCSharder(HOT, row_capacity=capacity)
    trained, described = train(ranks, [data], build(ranks, "RW", sharder=sharder, tables_by=Adam), WHOLE)
    expected, _ = train(ranks, [data], build(ranks, "RW", tables_by=Adam), None)
    assert_equal(trained, expected, rtol)
    return described


@pytest.mark.parametrize("capacity", [1.0, 2.0])
@pytest.mark.parametrize(("gpu", "rtol"), [(False, BITS), pytest.param(True, ON_GPU, marks=pytest.mark.multi_gpu)])
def test_batches_that_do_not_fit_or_name_no_row_of_a_rank_run_eagerly(
    run_ranks: Callable[..., Any], gpu: bool, rtol: float, capacity: float
) -> None:
    for described in run_ranks(2, eagerly_between, capacity, rtol, gpu=gpu):
        assert described["eager"] == {reasons.OVERFLOW(): 5}
        assert described["replays"] == STEPS - EAGER - 5


def in_between(ranks: Ranks) -> None:
    """Evaluation, which FBGEMM counts too, and iterators that end."""
    prepare(ranks)
    parts = [batches(ranks, count, seed, fixed=True) for seed, count in enumerate((9, 3, 7))]
    held_out = batches(ranks, 3, 9, fixed=True)
    trained, described = train(
        ranks, parts, build(ranks, "TW", sharder=TrimmedEBCSharder(HOT), tables_by=Adam), WHOLE, held_out=held_out
    )
    expected, _ = train(ranks, parts, build(ranks, "TW", tables_by=Adam), None, held_out=held_out)
    assert_equal(trained, expected, BITS)
    assert described["replays"] > 8


def test_evaluation_and_ends_of_data(run_ranks: Callable[..., Any]) -> None:
    run_ranks(2, in_between)


def goes_on(ranks: Ranks, graph_first: bool) -> None:
    """Half of the training under each pipeline, the second from the state of the first."""
    prepare(ranks)
    data = [batches(ranks, count, seed, size=SIZE, fixed=True) for seed, count in enumerate((10, 11))]
    of_model: dict[str, Any] = {"plan": "mixed", "tables_by": Adam}
    results = []
    for options in ((WHOLE, None) if graph_first else (None, WHOLE)), (None, None):
        loaded: Any = None
        for part, of_part in zip(data, options, strict=True):
            sharder = TrimmedEBCSharder(HOT, row_capacity=1.0) if of_part else None
            model, optimizer = build(ranks, sharder=sharder, **of_model)
            if loaded is not None:
                model.load_state_dict(loaded[0])
                optimizer.load_state_dict(loaded[1])
                optimizer.set_optimizer_step(len(data[0]))  # which TorchRec saves nowhere
            trained, described = train(ranks, [part], (model, optimizer), of_part)
            assert of_part is None or described["replays"] == len(part) - EAGER
            loaded = model.state_dict(), optimizer.state_dict()
        results.append(trained)
    assert_equal(*results, BITS)
    counted = {tuple(value.tolist()) for key, value in results[0].state.items() if key.startswith("steps")}
    assert counted == {(21, 21)}


@pytest.mark.parametrize("graph_first", [True, False])
def test_saved_under_the_graph_and_loaded_by_stock_and_the_reverse(
    run_ranks: Callable[..., Any], graph_first: bool
) -> None:
    run_ranks(2, goes_on, graph_first)


def several(ranks: Ranks, rtol: float) -> list[dict[str, Any]]:
    """Weighted bags and sequences, in several modules; of one number of ids, and of three with graphs for all pairs."""
    prepare(ranks)
    cases = (
        (SHARDERS, any_models.batches(ranks, STEPS, full=True)),
        (test_iteration_forms.SHARDERS, test_iteration_forms.data_of(ranks, test_iteration_forms.CHANGING)),
    )
    found = []
    for sharders, data in cases:
        model = any_models.build(ranks, Several, any_models.PLANS["TW"], sgd, sharders, Adam)
        trained, described = train(ranks, [data], model, WHOLE)
        expected, _ = train(
            ranks, [data], any_models.build(ranks, Several, any_models.PLANS["TW"], sgd, tables=Adam), None
        )
        assert_equal(trained, expected, rtol)
        found.append(described)
    return found


@pytest.mark.parametrize(
    ("world_size", "gpu", "rtol"),
    [(2, False, BITS), *(pytest.param(*place.values, 1e-4, marks=place.marks) for place in GPU_PLACES)],
)
def test_several_modules_and_forms(run_ranks: Callable[..., Any], world_size: int, gpu: bool, rtol: float) -> None:
    for one_form, three in run_ranks(world_size, several, rtol, gpu=gpu):
        assert one_form["replays"] == STEPS - EAGER
        assert (three["forms"], three["captures"], three["eager"]) == (3, 9, {})


# What is refused


def refused(ranks: Ranks) -> tuple[str, str]:
    """Where no graph can be given another step; and rows that all ranks look up."""
    signal.alarm(TIMEOUT)
    adam_on_cpu()
    iteration_graph_on_cpu()
    data = batches(ranks, 8, fixed=True)
    with pytest.raises(ValueError, match="cuda_graph='iteration'") as caught:
        train(ranks, [data], build(ranks, "TW", sharder=TrimmedEBCSharder(HOT), tables_by=Adam), WHOLE)
    prepare(ranks)
    to_all = build(ranks, "RW", sharder=TrimmedEBCSharder(HOT, rows_to_all=True), tables_by=Adam)
    with pytest.raises(ValueError, match="cuda_graph='iteration'") as by_rows:
        train(ranks, [data], to_all, WHOLE)
    return str(caught.value), str(by_rows.value)


def test_what_cannot_be_captured_is_named(run_ranks: Callable[..., Any]) -> None:
    ((keeps, by_rows),) = run_ranks(1, refused)
    assert "adam, is given its step by the host" in keeps
    assert "depends on the ids" in by_rows


def a_mark_is_lost(ranks: Ranks) -> str:
    """FBGEMM's kernel is given the step in some other way."""
    from tests.pipeline import cpu_graphs

    prepare(ranks)
    plain = cpu_graphs.Numbers.__init__

    def without_steps(self: Any, graph: Any, of: list[Any]) -> None:
        plain(self, graph, of)
        self.found -= {len(of) - 1}

    cpu_graphs.Numbers.__init__ = without_steps  # type: ignore[method-assign]
    built = build(ranks, "TW", sharder=TrimmedEBCSharder(HOT), tables_by=Adam)
    with pytest.raises(ValueError, match="cuda_graph='iteration'") as caught:
        train(ranks, [batches(ranks, 8, fixed=True)], built, WHOLE)
    return str(caught.value)


def test_a_step_that_comes_to_no_kernel_is_an_error(run_ranks: Callable[..., Any]) -> None:
    for said in run_ranks(2, a_mark_is_lost):
        assert "has come to none of the captured kernels" in said


def interrupted(ranks: Ranks) -> None:
    """In the first capture, by a user who then goes on with a new pipeline."""
    prepare(ranks)
    data, built = batches(ranks, 20, fixed=True), build(ranks, "TW", sharder=TrimmedEBCSharder(HOT), tables_by=Adam)

    def interrupt(work: Any, **_: Any) -> None:
        work.func.__self__._rates.mark()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), patch.object(iteration_graph, "record", interrupt):
        train(ranks, [data], built, WHOLE)
    assert [int(of[0]) for of in counts(built[0]).values()] == [EAGER]
    trained, _ = train(ranks, [data[EAGER:]], built, WHOLE)
    expected, _ = train(ranks, [data], build(ranks, "TW", tables_by=Adam), None)
    torch.testing.assert_close(trained.state, expected.state, rtol=0, atol=0)


def test_an_interrupt_of_a_capture_leaves_steps_and_rates_as_they_were(run_ranks: Callable[..., Any]) -> None:
    run_ranks(1, interrupted)
