"""The tables' learning rates in captured graphs: marked at the capture, put back after it, followed from then on."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType

import dlrm_bench.pipeline.five_stage.table_rates
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.five_stage.node_parameters import int_marks, marks
from dlrm_bench.pipeline.five_stage.table_rates import CAPTURES_IN_A_ROW, TableRates
from tests.pipeline.cpu_graphs import iteration_graph_on_cpu
from tests.pipeline.five_stage import test_iteration_forms
from tests.pipeline.five_stage.test_iteration_graph import BITS, EAGER, assert_equal, every_step, prepare, stock, whole
from tests.pipeline.five_stage.test_iteration_habits import BY_DEVICE_RATE
from tests.pipeline.five_stage.torchrec_models import batches

GRAPHS: list[Any] = ["one", "other"]


class Arguments:
    """Stands for the arguments of a graph's kernels."""

    missing = 0
    """How many of the marks have come to no kernel."""
    without = GRAPHS
    """Graphs in which they are missing."""
    made: "list[Arguments]"

    def __init__(self, graph: Any, of: list[float]) -> None:
        missing = Arguments.missing if graph in Arguments.without else 0
        self.graph, self.found, self.values = graph, set(range(len(of) - missing)), list(of)
        self._types = list(map(type, of))
        Arguments.made.append(self)

    def set(self, values: list[float]) -> None:
        assert list(map(type, values)) == self._types, "each to its mark"
        self.values = list(values)


@pytest.fixture
def changeable(monkeypatch: pytest.MonkeyPatch) -> None:
    Arguments.missing, Arguments.without, Arguments.made = 0, GRAPHS, []
    monkeypatch.setattr(dlrm_bench.pipeline.five_stage.table_rates, "keeps_graphs", lambda: True)
    monkeypatch.setattr(dlrm_bench.pipeline.five_stage.table_rates, "MarkedArguments", Arguments)


def kernels(*rates: float) -> list[Any]:
    return [
        SimpleNamespace(learning_rate_tensor=torch.tensor(rate), optimizer=EmbOptimType.EXACT_ADAGRAD) for rate in rates
    ]


def rates_of(of: list[Any]) -> list[float]:
    return [round(kernel.learning_rate_tensor.item(), 6) for kernel in of]


def capture(rates: TableRates) -> bool:
    rates.begin_capture()
    rates.mark()
    return rates.end_capture(GRAPHS)


def test_marks_are_there_in_the_capture_alone(changeable: None) -> None:
    of = kernels(0.5, 0.25)
    rates = TableRates(of)
    assert rates.begin_capture()
    rates.mark()
    assert [kernel.learning_rate_tensor.item() for kernel in of] == marks(2)
    assert rates.end_capture(GRAPHS)
    assert rates_of(of) == [0.5, 0.25]
    rates.mark()  # a rehearsal's
    assert rates_of(of) == [0.5, 0.25]
    for graph in GRAPHS:
        rates.bring(graph)
    assert [arguments.values for arguments in Arguments.made] == [[0.5, 0.25]] * 2


def test_graphs_follow(changeable: None) -> None:
    of = kernels(0.5)
    rates = TableRates(of)
    assert capture(rates)
    assert rates.followed
    for step in range(3 * CAPTURES_IN_A_ROW):
        assert rates.are_as_before()
        of[0].learning_rate_tensor.fill_(0.25 / 2**step)
        assert not rates.are_as_before()
        assert rates.follow()
        one, other = Arguments.made
        replayed, left = (one, other) if step % 2 else (other, one)
        rates.bring(replayed.graph)
        assert replayed.values == [0.25 / 2**step]
        assert left.values != replayed.values
        replayed.values = []
        rates.bring(replayed.graph)
        assert replayed.values == []  # nothing has changed
    assert rates.failure is None


def test_graphs_that_come_later_are_followed_too(changeable: None) -> None:
    of = kernels(0.5)
    rates = TableRates(of)
    assert capture(rates)
    rates.begin_capture()
    rates.mark()
    assert rates.end_capture(["later"])  # type: ignore[list-item]
    of[0].learning_rate_tensor.fill_(0.25)
    assert rates.follow()
    for made in Arguments.made:
        rates.bring(made.graph)
        assert made.values == [0.25]
    rates.dropped()
    assert not rates.followed
    of[0].learning_rate_tensor.fill_(0.125)
    assert not rates.follow()


@pytest.mark.parametrize("without", [GRAPHS, GRAPHS[:1], GRAPHS[1:]])
def test_a_mark_that_no_kernel_has_takes_captures_anew(changeable: None, without: list[Any]) -> None:
    of = kernels(0.5, 0.25)
    Arguments.missing, Arguments.without = 1, without
    rates = TableRates(of)
    assert not capture(rates)
    assert not rates.begin_capture()
    rates.mark()
    assert rates_of(of) == [0.5, 0.25]
    assert rates.end_capture(GRAPHS)
    assert not rates.followed
    assert rates.follow()
    of[1].learning_rate_tensor.fill_(0.125)
    assert not rates.follow()
    assert rates.follow()
    for step in range(CAPTURES_IN_A_ROW):
        assert rates.failure is None
        of[0].learning_rate_tensor.fill_(0.5**step / 3)
        assert not rates.follow()
    assert f"changed with each of {CAPTURES_IN_A_ROW} steps" in (rates.failure or "")


def test_captures_anew_do_not_end_where_some_rank_has_no_table(changeable: None) -> None:
    """That rank sees no rate move: it would go on to replay the collectives of graphs that the others have given up."""
    of = kernels(0.5)
    Arguments.missing = 1
    rates = TableRates(of)
    rates.on_all_ranks = False
    assert not capture(rates)
    for step in range(3 * CAPTURES_IN_A_ROW):
        of[0].learning_rate_tensor.fill_(0.5**step / 3)
        assert not rates.follow()
        assert rates.failure is None


def test_a_rank_without_tables_has_nothing_to_follow(changeable: None) -> None:
    rates = TableRates([])
    assert not rates.begin_capture()
    assert rates.end_capture(GRAPHS)
    assert rates.followed
    assert rates.follow()


def adam(rate: float, step: int) -> Any:
    counts = {"iter_cpu": torch.tensor([step]), "iter": torch.tensor([step])}
    return SimpleNamespace(learning_rate_tensor=torch.tensor(rate), optimizer=EmbOptimType.ADAM, **counts)


def test_steps_are_brought_and_counted_with_each_replay(changeable: None) -> None:
    plain, of = kernels(0.5)[0], adam(0.25, 6)
    rates = TableRates([plain, of])
    rates.begin_capture()
    rates.mark()
    assert int(of.iter_cpu) + 1 == int_marks(1)[0]
    of.iter_cpu.add_(2)  # by FBGEMM, at the lookups of a capture of two turns
    assert rates.end_capture(GRAPHS)
    assert int(of.iter_cpu) == 6
    for step, graph in enumerate([*GRAPHS, *GRAPHS], start=7):
        assert rates.follow()
        rates.bring(graph)
        made = Arguments.made[GRAPHS.index(graph)]
        assert made.values == [0.5, 0.25, step]
        assert int(of.iter_cpu) == step
    of.iter_cpu.add_(1)  # by FBGEMM, at the lookup of an iteration without a graph
    rates.bring(GRAPHS[0])
    assert Arguments.made[0].values == [0.5, 0.25, 12]


def test_a_step_that_no_kernel_has_is_an_error(changeable: None) -> None:
    Arguments.missing = 1
    of = adam(0.25, 6)
    rates = TableRates([of])
    with pytest.raises(RuntimeError, match="come to none of the captured kernels"):
        capture(rates)
    assert (int(of.iter_cpu), of.learning_rate_tensor.item()) == (6, 0.25)


def one_schedule(step: int, optimizer: Any, model: Any) -> None:
    """The rates of tables and of dense weights fall together, for the first time when graphs are there."""
    for group in optimizer.param_groups:
        group["lr"] = 0.05 if step < 9 else 0.005


def in_place(step: int, optimizer: Any, model: Any) -> None:
    """The tables' rate is a tensor, which torch's schedulers change in place."""
    tables, _ = (part for _, part in optimizer.optimizers)
    for group in tables.param_groups:
        if step == 0:
            group["lr"] = torch.tensor(0.05)
        group["lr"].fill_(0.05 if step < 9 else 0.005)


def falls(ranks: Ranks, schedule: Callable[..., None]) -> dict[str, Any]:
    prepare(ranks)
    iteration_graph_on_cpu(numbered=True)
    data = batches(ranks, 14, fixed=True)
    run = whole(ranks, data, schedule)
    assert_equal(run.trained, stock(ranks, data, schedule), BITS)
    return run.described


@pytest.mark.parametrize(("schedule", "captures"), [(one_schedule, 2), (in_place, 1)])
def test_tables_step_at_the_new_rate(run_ranks: Callable[..., Any], schedule: Any, captures: int) -> None:
    """Also where graphs are captured again for the dense weights' rate."""
    for described in run_ranks(2, falls, schedule):
        assert described["follows_table_rates"]
        assert (described["captures"], described["replays"]) == (captures, 14 - EAGER)


def forms_come(ranks: Ranks) -> dict[str, Any]:
    """A schedule that begins with the training, whose first graphs wait until all forms have come."""
    prepare(ranks)
    iteration_graph_on_cpu(numbered=True)
    data = test_iteration_forms.data_of(ranks, [0, 0, 0, 0, 1, 2, 0, 2, 1, 0, 0, 2, 0, 2])
    return test_iteration_forms.compared(ranks, [data], BY_DEVICE_RATE, each=every_step)


def test_rates_may_move_while_forms_come(run_ranks: Callable[..., Any]) -> None:
    for described in run_ranks(2, forms_come):
        assert described["follows_table_rates"]
        assert described["eager"] == {}
        assert described["replays"] > 2
