"""What a graph would leave out of a model is found before the first batch."""

import signal
from typing import Any

import torch
from torch import nn
from torch.distributed.optim.apply_optimizer_in_backward import (
    _apply_optimizer_in_backward as apply_optimizer_in_backward,
)
from torch.nn.parallel.distributed import _MixedPrecision

from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.five_stage.graph_obstacles import runs_in_graphs, why_not_graphed
from dlrm_bench.pipeline.five_stage.sharded_modules import sharded_modules
from tests.pipeline.five_stage.any_models import MODELS, PLANS, Everything, TwoTower, build
from tests.pipeline.five_stage.test_dense_run import wrapped

GPU = torch.device("cuda", 0)


class Hooked(TwoTower):
    def __init__(self) -> None:
        super().__init__()
        self.user.mlp.register_forward_hook(runs_in_graphs(lambda *_: None))
        self.item.mlp.register_forward_hook(lambda *_: None)


class OfGradients(TwoTower):
    def __init__(self) -> None:
        super().__init__()
        self.user.mlp[0].bias.register_hook(lambda grad: grad)


class Scripted(TwoTower):
    def __init__(self) -> None:
        super().__init__()
        self.item.mlp = torch.jit.script(self.item.mlp)


class InBackward(TwoTower):
    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Linear(1, 1)
        apply_optimizer_in_backward(torch.optim.SGD, self.more.parameters(), {"lr": 0.1})


WRAPPERS: tuple[dict[str, Any], ...] = (
    {"find_unused_parameters": True, "static_graph": False},
    {"params_to_ignore": ["user.mlp.2.bias"]},
    {"ddp_kwargs": {"mixed_precision": _MixedPrecision(param_dtype=torch.float32)}},
)
"""Arguments of DistributedDataParallel's wrapper that no graph follows."""


def obstacles(ranks: Ranks) -> list[Any]:
    signal.alarm(600)

    def why(model: Any) -> str | None:
        sharded, _ = build(ranks, model, PLANS["mixed"])
        return why_not_graphed(sharded, sharded_modules(sharded), GPU)

    class Shared(Everything):
        def __init__(self) -> None:
            super().__init__()
            self.weights = next(self.processed._feature_processors.parameters())

    class HookedProcessor(Everything):
        def __init__(self) -> None:
            super().__init__()
            next(self.processed._feature_processors.parameters()).register_hook(lambda grad: grad)

    plain = [why(model) for model in MODELS.values()]
    return [plain, *map(why, (Shared, HookedProcessor, Hooked, OfGradients, InBackward, Scripted))]


def wrappers(ranks: Ranks) -> list[Any]:
    signal.alarm(600)
    said = []
    for arguments in WRAPPERS:
        with wrapped(**arguments):
            sharded, _ = build(ranks, TwoTower, PLANS["TW"])
        said.append(why_not_graphed(sharded, sharded_modules(sharded), GPU))
    with wrapped(params_to_ignore=["user.mlp.2.bias"]):
        sharded, _ = build(ranks, TwoTower, PLANS["TW"])
    sharded.module.user.mlp[2].bias.requires_grad_(False)
    return [*said, why_not_graphed(sharded, sharded_modules(sharded), GPU)]


def test_what_ddp_does_with_gradients_otherwise_is_named(run_ranks):
    ((unused, ignored, mixed, frozen),) = run_ranks(1, wrappers)
    assert unused.startswith("DistributedDataParallel has find_unused_parameters=True")
    assert ignored.startswith("DistributedDataParallel ignores user.mlp.2.bias")
    assert mixed.startswith("DistributedDataParallel has mixed_precision")
    assert frozen is None


def test_hooks_and_the_like_are_named(run_ranks):
    ((plain, shared, hooked_processor, hooked, of_gradients, in_backward, scripted),) = run_ranks(1, obstacles)
    assert plain == [None] * len(MODELS)
    assert shared == "weights is a parameter of the feature processors of processed too: give each its own"
    assert hooked_processor.startswith("processed._feature_processors.")
    assert "has gradient hooks" in hooked_processor
    assert hooked.startswith("hooks of item.mlp (Sequential) would run at captures only")
    assert of_gradients.startswith("user.mlp.0.bias has gradient hooks")
    assert in_backward.startswith("more.weight is updated in the backward")
    assert scripted.startswith("item.mlp is compiled by torch.jit.script")
