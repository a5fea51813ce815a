"""Cross-cutting: graphs of iterations that exchange through peer memory train, bit by bit, what those with collectives
train: losses, weights and optimizer states."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torchrec import EmbeddingBagCollection
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

import dlrm_bench.pipeline.five_stage.switches
import dlrm_bench.pipeline.five_stage.trimmed.capacity_dist
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.five_stage import reasons
from dlrm_bench.pipeline.five_stage.graph_obstacles import runs_in_graphs
from dlrm_bench.pipeline.five_stage.iteration_obstacles import lookup_kernels
from dlrm_bench.pipeline.five_stage.options import FiveStageOptions
from dlrm_bench.pipeline.five_stage.pipeline import FiveStagePipeline
from dlrm_bench.pipeline.five_stage.sharded_modules import sharded_modules
from dlrm_bench.pipeline.five_stage.trimmed.sharder import TrimmedEBCSharder
from tests.pipeline.five_stage import test_iteration_forms
from tests.pipeline.five_stage.peers.memory_on_cpu import peer_memory_on_cpu
from tests.pipeline.five_stage.test_iteration_forms import BAGS, CHANGING, SHARDERS, data_of
from tests.pipeline.five_stage.test_iteration_graph import (
    EAGER,
    WHOLE,
    Run,
    adam,
    assert_equal,
    every_step,
    moves,
    prepare,
    rates,
    whole,
)
from tests.pipeline.five_stage.test_overflows import one_row
from tests.pipeline.five_stage.torchrec_models import HOT, batches, build, drain, state

STEPS, FEW, SIZE = 200, 14, 32
LARGE = 3000
"""Samples of a rank: 1.1 MB of vectors, and no row that a batch names more than 1024 times, whose sums FBGEMM rounds in
any order."""
ON_GPU = 1e-5
"""Backwards of attention add in any order there."""
PEERS = replace(WHOLE, peer_memory=True)
MODULE = "model.sparse_arch.embedding_bag_collection"
PLACES = [False, pytest.param(True, marks=pytest.mark.multi_gpu)]


@dataclass(frozen=True)
class Case:
    """A model, its plan and what happens on the way."""

    built: dict[str, Any]
    exchanged: tuple[str, ...]
    """The sharding types whose vectors are exchanged."""
    sharder: dict[str, Any]
    each: Callable[[int, Any, Any], None] | None = None
    overflows: tuple[int, ...] = ()
    """Steps in which one rank has more ids than room."""
    size: int = SIZE


BY_ROWS = {"row_capacity": 1.0}
CASES = {
    "tables": Case({"plan": "TW", "kind": "dot"}, ("table_wise",), {}),
    "tables under Adam and row-wise Adagrad": Case(
        {"plan": "TW", "tables_by": RowWiseAdagrad, "dense_by": adam}, ("table_wise",), {}
    ),
    "a rank without tables": Case({"plan": "TW of rank 0"}, ("table_wise",), {}),
    "graphs of the dists": Case({"plan": "TW"}, ("table_wise",), {"cuda_graph": True}),
    "columns": Case({"plan": "CW"}, ("column_wise",), {}),
    "columns, tables and replicas": Case(
        {"plan": "mixed with TWCW"}, ("table_wise", "table_column_wise", "column_wise"), {}
    ),
    "rows with padding": Case({"plan": "RW"}, ("row_wise",), BY_ROWS),
    "all kinds, rows with padding": Case({"plan": "mixed"}, ("table_wise", "row_wise", "column_wise"), BY_ROWS),
    "all kinds, rows to all": Case({"plan": "mixed"}, ("table_wise", "row_wise", "column_wise"), {"rows_to_all": True}),
    "batches with more ids than room": Case(
        {"plan": "mixed"}, ("table_wise", "row_wise", "column_wise"), BY_ROWS, overflows=(1, 4, 7, 9, 10, FEW - 1)
    ),
    "another rate in every step": Case({"plan": "TW"}, ("table_wise",), {}, each=every_step),
    "another rate at times": Case({"plan": "TW"}, ("table_wise",), {}, each=rates),
    "a weight in other memory": Case({"plan": "TW"}, ("table_wise",), {}, each=moves),
    "large batches": Case({"plan": "mixed"}, ("table_wise", "row_wise", "column_wise"), BY_ROWS, size=LARGE),
}
ON_CPU = [name for name in CASES if name not in ("large batches", "another rate in every step")]


def data(ranks: Ranks, case: Case, steps: int) -> list[Any]:
    made = batches(ranks, steps, size=case.size, fixed=True)
    for step in case.overflows if ranks.rank == 1 else ():
        made[step] = one_row(made[step])
    return made


def trained(ranks: Ranks, case: Case, steps: int, options: FiveStageOptions) -> Run:
    sharder = TrimmedEBCSharder(HOT, **case.sharder)
    return whole(ranks, data(ranks, case, steps), case.each, options, sharder=sharder, **case.built)


def compared(ranks: Ranks, name: str, steps: int) -> Run:
    """Returns what trained through peer memory, after it was compared with collectives."""
    prepare(ranks)
    if ranks.device.type == "cpu":
        peer_memory_on_cpu()
    case = CASES[name]
    peers, collectives = (trained(ranks, case, steps, options) for options in (PEERS, WHOLE))
    try:
        assert_equal(peers.trained, collectives.trained, 0.0)
    except AssertionError as error:
        again = trained(ranks, case, steps, WHOLE)
        try:
            assert_equal(again.trained, collectives.trained, 0.0)
            error.add_note("Two trainings with collectives are equal: peer memory makes the difference.")
        except AssertionError as other:
            error.add_note(f"But two trainings with collectives differ too: {other}")
        raise
    for count in ("replays", "captures", "eager"):
        assert peers.described[count] == collectives.described[count]
    assert "peer_memory" not in collectives.described
    return peers


@pytest.mark.parametrize(
    ("name", "gpu"),
    [(name, False) for name in ON_CPU] + [pytest.param(name, True, marks=pytest.mark.multi_gpu) for name in CASES],
)
def test_trains_what_collectives_train(run_ranks: Callable[..., Any], name: str, gpu: bool) -> None:
    case, steps = CASES[name], STEPS if gpu else 30 if CASES[name].each else FEW
    for run in run_ranks(2, compared, name, steps, gpu=gpu):
        of_dists = [f"pooled vectors of {MODULE}, {kind}" for kind in case.exchanged]
        through = [*of_dists, *(f"gradients of the {of}" for of in of_dists), "dense gradients", f"ids of {MODULE}"]
        assert run.described["peer_memory"]["by_nccl"] == {}
        assert sorted(run.described["peer_memory"]["through"]) == sorted(through)
        assert run.described["bytes"]["peer_memory"] > 0
        assert "peer_memory" not in run.off
        if case.overflows:
            assert run.described["eager"] == {reasons.OVERFLOW(): 5}
        if case.each is None:
            assert run.described["captures"] == 1
            assert run.described["replays"] == steps - EAGER - sum(run.described["eager"].values())


def of_three(ranks: Ranks) -> None:
    """Sums of three ranks are in rank order, which gloo's are not."""
    prepare(ranks)
    peer_memory_on_cpu()
    case = CASES["all kinds, rows with padding"]
    peers, collectives = (trained(ranks, case, FEW, options) for options in (PEERS, WHOLE))
    assert_equal(peers.trained, collectives.trained, 1e-4)


def test_three_ranks(run_ranks: Callable[..., Any]) -> None:
    run_ranks(3, of_three)


def forms(ranks: Ranks) -> dict[str, Any]:
    """Bags and sequences of several modules; batches of several forms, some with more ids than room."""
    test_iteration_forms.prepare(ranks)
    if ranks.device.type == "cpu":
        peer_memory_on_cpu()
    runs = []
    with (
        patch.object(dlrm_bench.pipeline.five_stage.trimmed.capacity_dist, "OVERFLOWS", 0.9),
        patch.dict(SHARDERS, {EmbeddingBagCollection: TrimmedEBCSharder(BAGS, row_capacity=1.0)}),
    ):
        for options in (PEERS, WHOLE):
            parts, plan = [data_of(ranks, CHANGING)], test_iteration_forms.mixed
            runs.append(test_iteration_forms.train(ranks, parts, True, plan=plan, options=options))
    assert_equal(runs[0].trained, runs[1].trained, 0.0 if ranks.device.type == "cpu" else ON_GPU)
    assert runs[0].described["captures"] == runs[1].described["captures"] > 4
    return runs[0].described


@pytest.mark.parametrize("gpu", PLACES)
def test_batches_of_several_forms(run_ranks: Callable[..., Any], gpu: bool) -> None:
    for described in run_ranks(2, forms, gpu=gpu):
        assert described["peer_memory"]["by_nccl"] == {}
        through = described["peer_memory"]["through"]
        assert {"ids of items", "ids of weighted", "dense gradients"} < set(through)
        assert any(of.startswith("vectors of items, ") for of in through)


def in_between(ranks: Ranks) -> None:
    """Evaluations between iterators that end, and a second pipeline after the first one, as in one process."""
    prepare(ranks)
    if ranks.device.type == "cpu":
        peer_memory_on_cpu()
    parts = [batches(ranks, count, seed, fixed=True) for seed, count in enumerate((12, 3, 0, 9))]
    held_out, results = batches(ranks, 3, 9, fixed=True), []
    for options in (PEERS, WHOLE, PEERS):
        model, optimizer = build(ranks, "TW", sharder=TrimmedEBCSharder(HOT))
        with FiveStagePipeline(model, optimizer, ranks.device, options) as pipeline:
            outputs = []
            for part in parts:
                outputs += drain(pipeline, iter(part)).outputs
                model.eval()
                with torch.no_grad():
                    outputs += drain(pipeline, iter(held_out)).outputs
                model.train()
            results.append((outputs, state(model, optimizer)))
            assert pipeline.describe()["replays"] > 8
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
    torch.testing.assert_close(results[2], results[1], rtol=0, atol=0)


@pytest.mark.parametrize("gpu", PLACES)
def test_evaluations_ends_of_data_and_a_second_pipeline(run_ranks: Callable[..., Any], gpu: bool) -> None:
    run_ranks(2, in_between, gpu=gpu)


class Gathers(torch.autograd.Function):
    """The rows of all ranks."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor) -> torch.Tensor:
        everyone = rows.new_empty(dist.get_world_size() * rows.shape[0], rows.shape[1])
        dist.all_gather_into_tensor(everyone, rows.contiguous())
        return everyone

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad.chunk(dist.get_world_size())[dist.get_rank()]


def gathers(module: Any, arguments: Any, vectors: torch.Tensor) -> torch.Tensor:
    flat = vectors.view(vectors.shape[0], -1)
    return vectors + 0 * Gathers.apply(flat).sum()


def gathering(train: Any) -> None:
    """Has the model send its pooled vectors to all ranks, straight from where they are."""
    arch, forward = train.model.sparse_arch, train.model.sparse_arch.forward
    arch.forward = lambda features: gathers(arch, (features,), forward(features))


def hooked(train: Any) -> None:
    """Has a hook that runs in graphs do so."""
    train.model.sparse_arch.register_forward_hook(runs_in_graphs(gathers))


def sent_on(ranks: Ranks, sending: Callable[[Any], None]) -> tuple[bool, dict[str, Any]]:
    """NCCL would hang in a graph that sends a long message from peer memory."""
    prepare(ranks)
    if ranks.device.type == "cpu":
        peer_memory_on_cpu()
    size = LARGE if ranks.device.type == "cuda" else SIZE
    made, runs, copies = batches(ranks, FEW, size=size, fixed=True), [], []
    for options in (PEERS, WHOLE):
        model, optimizer = build(ranks, "TW", change=sending, sharder=TrimmedEBCSharder(HOT))
        with FiveStagePipeline(model, optimizer, ranks.device, options) as pipeline:
            run = drain(pipeline, iter(made))
            run.state = state(model, optimizer)
            runs.append(run)
            if options.peer_memory:
                copies.append(pipeline._by_graph._peers.copies)  # type: ignore[union-attr]
                described = pipeline.describe()
    assert_equal(*runs, 0.0)
    return copies[0], described


@pytest.mark.parametrize("sending", [gathering, hooked])
@pytest.mark.parametrize("gpu", PLACES)
def test_a_model_that_sends_pooled_vectors_itself(
    run_ranks: Callable[..., Any], sending: Callable[[Any], None], gpu: bool
) -> None:
    for copies, described in run_ranks(2, sent_on, sending, gpu=gpu):
        assert copies
        assert described["replays"] == FEW - EAGER


# Where there is none


def off(ranks: Ranks, why_not: Sequence[str], options: FiveStageOptions, trimmed: bool) -> tuple[dict[str, str], bool]:
    prepare(ranks)
    peer_memory_on_cpu(why_not=why_not)
    sharder = TrimmedEBCSharder(HOT) if trimmed else None
    run = whole(ranks, batches(ranks, 8, fixed=True), options=options, sharder=sharder)
    return run.off, "peer_memory" in run.described


def test_without_peer_memory_collectives_exchange_and_the_reason_is_told(run_ranks: Callable[..., Any]) -> None:
    why = reasons.PEERS_APART(hosts=2)
    for said, described in run_ranks(2, off, [why], PEERS, True):
        assert said["peer_memory"] == why
        assert not described


def test_without_a_graph_of_iterations_nothing_goes_through_peer_memory(run_ranks: Callable[..., Any]) -> None:
    options = replace(PEERS, cuda_graph="iteration-or-dense")
    for said, described in run_ranks(2, off, [], options, False):
        assert said["peer_memory"] == reasons.PEERS_NO_GRAPH()
        assert not described


def of_one_rank(ranks: Ranks, options: FiveStageOptions) -> dict[str, str] | str:
    """Rank 1 alone has a table that no graph takes."""
    prepare(ranks)
    peer_memory_on_cpu()
    model, optimizer = build(ranks, "TW", sharder=TrimmedEBCSharder(HOT))
    if ranks.rank == 1:
        _, kernel = next(lookup_kernels(sharded_modules(model)))
        kernel.weights_uvm = torch.zeros(1)
    try:
        with FiveStagePipeline(model, optimizer, ranks.device, options) as pipeline:
            drain(pipeline, iter(batches(ranks, 8, fixed=True)))
            return pipeline.switched_off
    except ValueError as error:
        return str(error)


def test_a_reason_of_one_rank_is_all_ranks(run_ranks: Callable[..., Any]) -> None:
    """Or the others would wait for it in a collective."""
    why = reasons.HOST_MEMORY(module=MODULE)
    for said in run_ranks(2, of_one_rank, PEERS):
        assert why in said
    for off in run_ranks(2, of_one_rank, replace(PEERS, cuda_graph="iteration-or-dense", uneven_end="ignore")):
        assert why in off["cuda_graph"]
        assert off["peer_memory"] == reasons.PEERS_NO_GRAPH()


def on_host(ranks: Ranks) -> tuple[dict[str, str], list[str]]:
    model, optimizer = build(ranks, "TW", sharder=TrimmedEBCSharder(HOT))
    warned: list[str] = []
    with (
        patch.object(dlrm_bench.pipeline.five_stage.switches, "_warn_once", lambda text, *of: warned.append(text % of)),
        FiveStagePipeline(model, optimizer, ranks.device, PEERS) as pipeline,
    ):
        drain(pipeline, iter(batches(ranks, 3, fixed=True)))
        return pipeline.switched_off, warned


def test_a_cpu_has_no_such_graph(run_ranks: Callable[..., Any]) -> None:
    whys = {"cuda_graph": reasons.NO_GPU(device="cpu"), "peer_memory": reasons.PEERS_NO_GRAPH()}
    told = [f"{option} is off: {why}" for option, why in whys.items()]
    for (said, warned), expected in zip(run_ranks(2, on_host), (told, []), strict=True):  # rank 0 for all
        assert whys.items() <= said.items()
        assert warned == expected
