"""Parameters that only some batches or ranks use are trained as stock does, or refused by name."""

import copy
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper

from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.five_stage import dense_run, reasons
from dlrm_bench.pipeline.five_stage.graph_obstacles import runs_in_graphs
from dlrm_bench.pipeline.five_stage.graph_pool import WARM_UP
from dlrm_bench.pipeline.five_stage.options import FiveStageOptions
from dlrm_bench.pipeline.five_stage.pipeline import FiveStagePipeline
from dlrm_bench.pipeline.five_stage.trimmed.sharder import TrimmedEBCSharder
from tests.pipeline.cpu_graphs import dense_graph_on_cpu, iteration_graph_on_cpu
from tests.pipeline.five_stage import any_models
from tests.pipeline.five_stage.any_models import PLANS, AnyBatch, TwoTower, batches, build

EAGER, DENSE = FiveStageOptions(), FiveStageOptions(cuda_graph="dense")


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


@contextmanager
def wrapped(**arguments: Any) -> Iterator[None]:
    """Models of `build` have a DistributedDataParallel with these arguments."""
    wrapper = DefaultDataParallelWrapper(**arguments)
    with patch.object(
        any_models, "DistributedModelParallel", partial(DistributedModelParallel, data_parallel_wrapper=wrapper)
    ):
        yield


@dataclass
class TaskBatch(AnyBatch):
    task: str = "a"

    def to(self, device: torch.device, non_blocking: bool = False) -> "TaskBatch":
        return TaskBatch(**{f.name: getattr(self, f.name) for f in fields(self)})


class Heads(TwoTower):
    """A head for each task."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(1, 1), nn.Linear(1, 1)

    def logits(self, batch: Any) -> Tensor:
        head = self.a if batch.task == "a" else self.b
        return head(super().logits(batch).unsqueeze(-1)).squeeze(-1)


def of_tasks(ranks: Ranks, tasks: str) -> list[Any]:
    data = batches(ranks, len(tasks))
    return [
        TaskBatch(**{f.name: getattr(batch, f.name) for f in fields(batch)}, task=task)
        for batch, task in zip(data, tasks, strict=True)
    ]


def train(
    ranks: Ranks,
    kind: Callable[[], nn.Module],
    options: FiveStageOptions,
    data: list[Any],
    around: Callable[[Any], None] = lambda model: None,
    sharders: Any = None,
) -> tuple[list[float], dict[str, Tensor], Any]:
    """Losses, dense weights, and the pipeline."""
    model, optimizer = build(ranks, kind, PLANS["TW"], sgd, sharders)
    around(model)
    pipeline = FiveStagePipeline(model, optimizer, ranks.device, options)
    progress, losses = iter(copy.deepcopy(data)), []
    try:
        while True:
            losses.append(pipeline.progress(progress)[0].item())
    except StopIteration:
        pass
    return losses, {n: p.detach().clone() for n, p in model.module.named_parameters() if "tables" not in n}, pipeline


def heads_alternate(ranks: Ranks) -> None:
    signal.alarm(600)
    data = of_tasks(ranks, "ab" * 8)
    with wrapped(static_graph=False, find_unused_parameters=True):
        losses, weights, _ = train(ranks, Heads, EAGER, data)
        dense_graph_on_cpu()
        graphed, of_graphs, pipeline = train(ranks, Heads, DENSE, data)
    assert len(pipeline._graph._pool) == 2
    assert graphed == losses
    torch.testing.assert_close(of_graphs, weights, rtol=0, atol=0)


def test_graphs_of_several_forms_train_the_parameters_of_their_own(run_ranks):
    run_ranks(1, heads_alternate)


def without_marks(ranks: Ranks) -> None:
    signal.alarm(600)
    dense_graph_on_cpu()
    noted: list[int] = []
    note = dense_run._Marks._note

    def counted(marks: Any, place: int, gradient: Tensor) -> None:
        noted.append(place)
        note(marks, place, gradient)

    with patch.object(dense_run._Marks, "_note", counted):
        losses, _, pipeline = train(ranks, TwoTower, DENSE, batches(ranks, 8))
    assert pipeline._graph.captured
    assert len(noted) == len(set(noted)) > 0
    assert len(losses) == 8


def test_the_first_batch_alone_has_hooks_for_the_order_of_gradients(run_ranks):
    """In batches that run eagerly, Python would run once for each gradient."""
    run_ranks(1, without_marks)


def heads_differ(ranks: Ranks) -> list[str]:
    """What is said where ranks differ from the first batch on, and where all change after it."""
    signal.alarm(600)
    dense_graph_on_cpu()
    said = []
    for tasks in ("abab", "baba") if ranks.rank else ("baba", "baba"):
        try:
            train(ranks, Heads, DENSE, of_tasks(ranks, tasks))
        except ValueError as error:
            said.append(str(error))
    return said


def test_parameters_of_some_ranks_or_batches_are_refused_by_name(run_ranks):
    for first, later in run_ranks(2, heads_differ):
        assert first.startswith("a.weight gets a gradient on 1 of 2 ranks: ")
        assert later.startswith("a.weight gets a gradient from this batch, unlike from the first one: ")
        assert "Use every parameter in every batch" in later


class Tied(TwoTower):
    """One network of two names, which both towers use, and one weight of two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.item.mlp = self.user.mlp
        self.out, self.back = nn.Linear(1, 2, bias=False), nn.Linear(2, 1, bias=False)
        self.back.weight = nn.Parameter(self.out.weight.detach().view(1, 2).clone())
        self.again = nn.Linear(2, 1)
        self.again.weight = self.back.weight

    def logits(self, batch: Any) -> Tensor:
        both = self.out(super().logits(batch).unsqueeze(-1))
        return (self.back(both) + self.again(both)).squeeze(-1)


def ties(ranks: Ranks) -> None:
    """A module keeps its own parameters: whoever reads model.parameters() finds the gradients there."""
    signal.alarm(600)
    data, models = batches(ranks, 8), list[Any]()
    losses, weights, _ = train(ranks, Tied, EAGER, data)
    dense_graph_on_cpu()
    graphed, of_graphs, pipeline = train(ranks, Tied, DENSE, data, models.append)
    assert pipeline._graph.captured
    assert graphed == losses
    torch.testing.assert_close(of_graphs, weights, rtol=0, atol=0)
    own = {id(parameter) for parameter in pipeline._graph.parameters}
    dense = {name: p for name, p in models[0].module.named_parameters() if "tables" not in name}
    assert {id(parameter) for parameter in dense.values()} == own
    assert all(parameter.grad is not None for parameter in dense.values())


def test_a_module_of_two_names_trains_in_graphs(run_ranks):
    run_ranks(2, ties)


class Exchanging(TwoTower):
    """Subtracts the mean of all ranks."""

    def logits(self, batch: AnyBatch) -> Tensor:
        logits = super().logits(batch)
        if isinstance(logits, Tensor):
            mean = logits.detach().mean()
            dist.all_reduce(mean)
            logits = logits - 0.1 * mean
        return logits


@runs_in_graphs
def exchanging(module: nn.Module, arguments: Any, output: Any) -> None:
    if isinstance(output, Tensor):
        dist.all_reduce(output.detach().sum())


def hooked(model: Any) -> None:
    model.module.user.mlp.register_forward_hook(exchanging)


def exchanges(ranks: Ranks) -> None:
    signal.alarm(600)
    data = batches(ranks, 10)
    expected, weights, _ = train(ranks, Exchanging, EAGER, data)
    dense_graph_on_cpu()
    losses, trained, pipeline = train(ranks, Exchanging, DENSE, data)
    assert reasons.OWN_COLLECTIVES() in pipeline.switched_off["cuda_graph"]
    assert not pipeline._graph.captured
    assert losses == expected
    torch.testing.assert_close(trained, weights, rtol=0, atol=0)
    _, _, pipeline = train(ranks, TwoTower, DENSE, data, hooked)
    assert pipeline._graph.captured


def test_collectives_of_the_model_switch_dense_graphs_off_on_all_ranks(run_ranks):
    run_ranks(2, exchanges)


def late(ranks: Ranks) -> None:
    signal.alarm(600)
    dense_graph_on_cpu()
    for after in (0, 6):
        model, optimizer = build(ranks, TwoTower, PLANS["TW"], sgd)
        pipeline = FiveStagePipeline(model, optimizer, ranks.device, DENSE)
        data, calls = iter(batches(ranks, 12)), []
        for _ in range(after):
            pipeline.progress(data)
        assert pipeline._graph is not None
        assert pipeline._graph.captured is (after > 0)
        searched = 0 if after else 1  # the search for inputs, before the first batch, calls the model too
        model.module.user.mlp.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        for _ in range(5):
            pipeline.progress(data)
        assert len(calls) == 5 + searched
        assert "hooks of user.mlp were added, or removed," in pipeline.switched_off["cuda_graph"]
        model.module.user.mlp[0].bias.register_hook(lambda grad: grad)
        with pytest.raises(ValueError, match=r"user\.mlp\.0\.bias was given a gradient hook after this pipeline"):
            pipeline.progress(data)


def test_hooks_that_come_late_are_called(run_ranks):
    run_ranks(1, late)


class Task:
    """An object, of which a graph does not know whether it is the same."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __eq__(self, other: object) -> bool:
        return self.name == other

    __hash__ = None  # type: ignore[assignment]


SIZES = {"u0": 2, "u1": 1, "i0": 3, "i1": 2}


def declared(ranks: Ranks, tasks: str, of: Callable[[str], Any] = Task) -> tuple[list[Any], Any]:
    """Batches of declared sizes, with tasks that `of` makes, and sharders."""
    data = of_tasks(ranks, tasks)
    for batch in data:
        lengths = torch.tensor([n for n in SIZES.values() for _ in range(batch.bags.stride())], dtype=torch.int32)
        ids = torch.zeros(int(lengths.sum()), dtype=torch.int64)
        batch.bags = KeyedJaggedTensor(list(SIZES), ids, lengths=lengths, stride=batch.bags.stride())
        batch.task = of(batch.task)
    return data, {EmbeddingBagCollection: TrimmedEBCSharder(SIZES)}


def refused(ranks: Ranks) -> str:
    signal.alarm(600)
    iteration_graph_on_cpu()
    data, sharders = declared(ranks, "aa")
    with pytest.raises(ValueError, match="whose values a graph cannot compare") as raised:
        train(ranks, Heads, FiveStageOptions(cuda_graph="iteration"), data, sharders=sharders)
    return str(raised.value)


def test_objects_in_batches_are_refused_by_name_under_graphs_of_iterations(run_ranks):
    (said,) = run_ranks(1, refused)
    assert "batch.task is a Task" in said


def heads_change(ranks: Ranks) -> None:
    signal.alarm(600)
    iteration_graph_on_cpu()
    data, sharders = declared(ranks, 7 * "a" + "ba", str)
    with pytest.raises(ValueError, match=r"a\.weight gets no gradient from this batch, unlike from the first one"):
        train(ranks, Heads, FiveStageOptions(cuda_graph="iteration"), data, sharders=sharders)


def test_graphs_of_iterations_refuse_other_parameters_on_one_rank_too(run_ranks):
    """Replays publish no gradients: they would step with those of the batch before."""
    run_ranks(1, heads_change)


class LateHead(Heads):
    """Takes its other head from the first batch on that runs as it will be captured, which no field of it shows."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def logits(self, batch: Any) -> Tensor:
        logits = TwoTower.logits(self, batch)
        self.calls += isinstance(logits, Tensor)  # not of the search for inputs
        head = self.a if self.calls <= WARM_UP else self.b
        return head(logits.unsqueeze(-1)).squeeze(-1)


def head_changes_late(ranks: Ranks) -> None:
    signal.alarm(600)
    iteration_graph_on_cpu()
    (data, sharders), models = declared(ranks, 8 * "a", str), list[Any]()
    with pytest.raises(ValueError, match=r"a\.weight gets no gradient from this batch, unlike from the first one"):
        train(ranks, LateHead, FiveStageOptions(cuda_graph="iteration"), data, models.append, sharders)
    assert models[0].module.calls == WARM_UP + 1, "before a step"


def test_other_parameters_are_refused_before_they_are_captured(run_ranks):
    run_ranks(1, head_changes_late)


def heads_alternate_without_iterations(ranks: Ranks) -> None:
    signal.alarm(600)
    iteration_graph_on_cpu()
    dense_graph_on_cpu()
    data, sharders = declared(ranks, "ab" * 4)
    losses, weights, _ = train(ranks, Heads, DENSE, data, sharders=sharders)
    options = FiveStageOptions(cuda_graph="iteration-or-dense")
    ours, of_ours, pipeline = train(ranks, Heads, options, data, sharders=sharders)
    assert "8 of 8 batches ran eagerly: batch.task is a Task" in pipeline.switched_off["cuda_graph"]
    assert ours == losses
    torch.testing.assert_close(of_ours, weights, rtol=0, atol=0)


def test_what_falls_back_to_the_dense_part_trains_what_that_trains(run_ranks):
    """Parameters that only some batches use, on one rank."""
    run_ranks(1, heads_alternate_without_iterations)
