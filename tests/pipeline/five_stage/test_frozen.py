"""What a user changes in a model between batches is seen by its graphs, or refused by name, as stock does."""

import copy
import logging
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn
from torchrec.distributed import TrainPipelineSparseDist
from torchrec.models.dlrm import DLRMTrain

from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.five_stage.frozen import FrozenModel, TrainedParameters
from dlrm_bench.pipeline.five_stage.graph_pool import WARM_UP
from dlrm_bench.pipeline.five_stage.options import FiveStageOptions
from dlrm_bench.pipeline.five_stage.pipeline import FiveStagePipeline
from tests.cases import GPU_PLACES
from tests.pipeline.five_stage.test_dense_graph import DENSE, assert_equal
from tests.pipeline.five_stage.test_dense_graph_models import start
from tests.pipeline.five_stage.torchrec_models import Trained, batches, build, drain, state

PLACES = [(2, False), *GPU_PLACES]
CHANGED_AT = 8
"""The batch before which the model is changed: graphs run since some batches."""
LAYER = "model.over_arch.model.0._mlp.0._linear.weight"


class Sharded(nn.Module):
    """Stands for a sharded module with feature processors."""

    def __init__(self) -> None:
        super().__init__()
        self.tables, self._feature_processors = Norm(), Norm()


class Norm(nn.Module):
    """Has a parameter, a buffer that it only reads, a mode and a tensor that may be none."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(3, 3, bias=False), nn.Dropout()
        self.register_buffer("scale", torch.ones(3))


def test_changes_are_named_once() -> None:
    model = nn.Sequential(Norm(), Norm(), Sharded())
    frozen = FrozenModel(model, [model[1], model[2]])
    linear = model[0].linear
    changes: list[tuple[Callable[[], Any], str | None]] = [
        (lambda: None, None),
        (lambda: linear.weight.data.mul_(2), None),
        (lambda: linear.requires_grad_(False), None),
        (lambda: setattr(linear.weight, "data", linear.weight.data.clone()), "0.linear.weight lies in other memory"),
        (lambda: setattr(linear.weight, "data", linear.weight.data.t()), "0.linear.weight lies in other memory"),
        (lambda: setattr(linear, "weight", copy.deepcopy(linear.weight)), "another tensor is 0.linear.weight"),
        (lambda: setattr(linear, "bias", nn.Parameter(torch.ones(3))), "another tensor is 0.linear.bias"),
        (lambda: setattr(model[0], "scale", torch.ones(3)), "another tensor is 0.scale"),
        (lambda: model[0].dropout.eval(), "module 0.dropout is in eval mode"),
        (lambda: setattr(model[0].dropout, "p", 0.1), "another value is 0.dropout.p"),
        (lambda: setattr(model[0], "dropout", nn.Dropout(0.1)), "another module is 0.dropout"),
        (lambda: setattr(model[0].dropout, "p", 0.2), "another value is 0.dropout.p"),
        (lambda: setattr(model[1].dropout, "p", 0.1), None),
        (lambda: setattr(model[1].linear.weight, "data", torch.ones(3, 3)), None),
        (lambda: setattr(model[2].tables.linear.weight, "data", torch.ones(3, 3)), None),
        (
            lambda: setattr(model[2]._feature_processors.linear.weight, "data", torch.ones(3, 3)),
            "2._feature_processors.linear.weight lies in other memory",
        ),
    ]
    for change, what in changes:
        change()
        assert frozen.change() == what
        assert frozen.change() is None
    scale = model[0].scale
    assert frozen.put_back() is None
    model[0].scale = torch.zeros(3)
    assert frozen.put_back() == "puts another tensor in the place of 0.scale"
    assert model[0].scale is scale
    assert frozen.change() is None


def test_parameters_are_frozen_before_the_first_batch_or_never() -> None:
    model, processor = nn.ModuleDict({"a": nn.Linear(2, 1), "b": nn.Linear(2, 1)}), nn.Parameter(torch.ones(2))
    model["b"].requires_grad_(False)
    trained = TrainedParameters(model.named_parameters(), [processor])
    processor.requires_grad_(False)
    with pytest.raises(ValueError, match=r"a sharded module's parameter of shape \(2,\) was frozen"):
        trained.check()
    processor.requires_grad_(True)
    model["b"].bias.requires_grad_(True)
    with pytest.raises(ValueError, match=r"b\.bias was unfrozen .* after this pipeline was made"):
        trained.check()
    model["b"].bias.requires_grad_(False)
    model["a"].bias.requires_grad_(False)
    trained.check()
    trained.check()
    model["a"].bias.requires_grad_(True)
    with pytest.raises(ValueError, match=r"a\.bias was unfrozen .* after the first batch.*make a new pipeline"):
        trained.check()
    model["a"].bias.requires_grad_(False)
    model["a"].weight.requires_grad_(False)
    with pytest.raises(ValueError, match=r"a\.weight was frozen .* after the first batch"):
        trained.check()


def train(
    ranks: Ranks,
    options: FiveStageOptions | None,
    change: Callable[[nn.Module], None],
    at: int = CHANGED_AT,
    before: Callable[[DLRMTrain], None] = lambda model: None,
) -> tuple[Trained, Any]:
    """Twenty batches, by stock without options; `change` is called with the model before one of them."""
    model, optimizer = build(ranks, "TW", change=before)
    torch.manual_seed(7)  # for dropout
    data = iter(batches(ranks, 20))
    if options is None:
        trainer: Any = TrainPipelineSparseDist(model, optimizer, ranks.device)
    else:
        trainer = FiveStagePipeline(model, optimizer, ranks.device, options)
    trained = drain(trainer, data, lambda step: change(model.module) if step == at else None)
    trained.state = state(model, optimizer)
    if options is not None:
        trained.captured = trainer._graph.captured
        trainer.close()
    return trained, trainer


def move(model: nn.Module, kept: list[Tensor]) -> None:
    """As averages are swapped in. kept: the memory that graphs know."""
    for name, parameter in model.named_parameters():
        if "arch" in name and "sparse" not in name:
            kept.append(parameter.data)
            parameter.data = parameter.data * 0.9


class Scaled(nn.Module):
    """Scales by a buffer, and drops out."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(12))
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(x * self.scale)


def add_scaled(model: DLRMTrain) -> None:
    model.model.over_arch.model.insert(1, Scaled())


def rescale(model: Any, kept: list[Tensor]) -> None:
    scaled = model.model.over_arch.model[1]
    kept.append(scaled.scale)
    scaled.scale = torch.full_like(scaled.scale, 0.5)


def drop_nothing(model: Any, kept: list[Tensor]) -> None:
    model.model.over_arch.model[1].dropout.eval()


def drop_less(model: Any, kept: list[Tensor]) -> None:
    model.model.over_arch.model[1].dropout.p = 0.1


def take_out(model: Any, kept: list[Tensor]) -> None:
    model.model.over_arch.model[1].dropout = nn.Identity()


CHANGES = {
    move: "lies in other memory",
    rescale: "another tensor is",
    drop_nothing: "is in eval mode",
    drop_less: "another value is model.over_arch.model.1.dropout.p",
    take_out: "another module is model.over_arch.model.1.dropout",
}


def changed(ranks: Ranks) -> None:
    tolerance = start(ranks)
    said: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = said.append  # type: ignore[method-assign]
    logger = logging.getLogger("dlrm_bench.pipeline.five_stage.dense_graph")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    for change, what in CHANGES.items():
        kept: list[Tensor] = []
        theirs, _ = train(ranks, None, partial(change, kept=kept), before=add_scaled)
        for threads in (1, 2):
            said.clear()
            options = FiveStageOptions(cuda_graph="dense", launch_threads=threads)
            ours, trainer = train(ranks, options, partial(change, kept=kept), before=add_scaled)
            assert_equal(ours, theirs, tolerance)
            assert ours.captured
            assert any(what in record.getMessage() for record in said)
            assert f"{WARM_UP} of 20 batches ran eagerly: within {WARM_UP} batches something had changed" in (
                trainer._graph.why_eager or ""
            )


@pytest.mark.parametrize(("world_size", "gpu"), PLACES)
def test_a_changed_model_trains_as_stock(run_ranks, world_size, gpu):
    run_ranks(world_size, changed, gpu=gpu)


def freeze(model: nn.Module, frozen: bool = True) -> None:
    dict(model.named_parameters())[LAYER].requires_grad_(not frozen)


def freezes(ranks: Ranks) -> None:
    tolerance = start(ranks)
    theirs, _ = train(ranks, None, freeze, at=0)
    ours, _ = train(ranks, DENSE, freeze, at=0)
    assert_equal(ours, theirs, tolerance)
    assert not any(LAYER in name and "sum" in name and value.any() for name, value in ours.state.items())
    with pytest.raises(RuntimeError, match="training graph has changed"):
        train(ranks, None, freeze)
    with pytest.raises(ValueError, match=rf"{LAYER} was frozen \(requires_grad\) after the first batch"):
        train(ranks, DENSE, freeze)


@pytest.mark.parametrize(("world_size", "gpu"), PLACES)
def test_freezing_does_what_it_does_in_stock(run_ranks, world_size, gpu):
    run_ranks(world_size, freezes, gpu=gpu)


def thaws(ranks: Ranks) -> None:
    """A layer that was frozen when the pipeline was made: no graph makes its gradient."""
    start(ranks)
    with pytest.raises(ValueError, match=rf"{LAYER} was unfrozen \(requires_grad\) after the first batch"):
        train(ranks, DENSE, partial(freeze, frozen=False), before=freeze)


def test_unfreezing_is_refused_by_name(run_ranks):
    run_ranks(2, thaws)


M = TypeVar("M", bound=nn.Module)


def train_with(ranks: Ranks, kind: type[M]) -> tuple[Trained, Any, list[M]]:
    """Trains by stock and in graphs, each with a module of this kind within, and alike. Returns the latter's result and
    pipeline, and both modules."""
    tolerance = start(ranks)
    made: list[M] = []

    def before(model: DLRMTrain) -> None:
        made.append(kind())
        model.model.over_arch.model.insert(1, made[-1])

    theirs, _ = train(ranks, None, lambda model: None, before=before)
    ours, trainer = train(ranks, DENSE, lambda model: None, before=before)
    assert_equal(ours, theirs, tolerance)
    return ours, trainer, made


class Replaces(nn.Module):
    """Makes a new buffer of every one, from some batch on: while graphs are captured, not before."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))
        self.number = 0

    def forward(self, x: Tensor) -> Tensor:
        self.number += 1
        if self.number > WARM_UP + 1:  # and a rehearsal
            self.calls = self.calls + 1
        return x + self.calls * 1e-3


def replaces(ranks: Ranks) -> None:
    ours, trainer, _ = train_with(ranks, Replaces)
    assert not ours.captured
    assert "puts another tensor in the place of model.over_arch.model.1.calls" in trainer.switched_off["cuda_graph"]


@pytest.mark.parametrize(("world_size", "gpu"), PLACES)
def test_a_buffer_that_the_forward_replaces_is_named(run_ranks, world_size, gpu):
    run_ranks(world_size, replaces, gpu=gpu)


class Anneals(nn.Module):
    """Counts its calls, by which it scales."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def forward(self, x: Tensor) -> Tensor:
        self.number += 1
        return x * 0.9**self.number


def anneals(ranks: Ranks) -> None:
    _, trainer, made = train_with(ranks, Anneals)
    what = "its forward changes the value of model.over_arch.model.1.number, which no replay does"
    assert what in trainer.switched_off["cuda_graph"]
    assert made[0].number == made[1].number


@pytest.mark.parametrize(("world_size", "gpu"), PLACES)
def test_a_number_that_the_forward_changes_is_named(run_ranks, world_size, gpu):
    run_ranks(world_size, anneals, gpu=gpu)


class Counts(nn.Module):
    """Adds to a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.total = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.total = self.total.to(x.device) + 1
        return x


def counts(ranks: Ranks) -> None:
    _, trainer, made = train_with(ranks, Counts)
    assert "puts another tensor in the place of model.over_arch.model.1.total" in trainer.switched_off["cuda_graph"]
    assert [of.total.item() for of in made] == [20, 20]


@pytest.mark.parametrize(("world_size", "gpu"), PLACES)
def test_an_attribute_that_the_forward_replaces_is_named(run_ranks, world_size, gpu):
    run_ranks(world_size, counts, gpu=gpu)


def test_attributes_are_watched_from_a_capture_to_the_next_change() -> None:
    model = nn.Sequential(Counts(), Norm())
    frozen = FrozenModel(model, [])
    model[0].total = torch.ones(())
    assert frozen.change() is None
    frozen.watch_attributes()
    model[1].later = 0
    frozen.watch_attributes()
    total, model[0].total, model[1].made, model[1].later = model[0].total, *(torch.zeros(()) for _ in range(3))
    assert frozen.put_back() == "puts another tensor in the place of 0.total"
    assert model[0].total is total
    assert not hasattr(model[1], "made")
    assert model[1].later == 0
    assert type(model[1].later) is int
    model[0].total = torch.zeros(())
    assert frozen.change() == "another tensor is 0.total"
    model[0].total = torch.zeros(())
    assert frozen.change() is None
