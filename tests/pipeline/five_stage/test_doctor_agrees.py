"""Cross-cutting: the doctor, which imports nothing of the five-stage pipeline, names what keeps a model out of the
graph of an iteration wherever the pipeline's own reasons do."""

import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torchrec import EmbeddingBagCollection, EmbeddingCollection
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

from dlrm_bench.bench.doctor import capture, capture_update
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.five_stage import reasons
from dlrm_bench.pipeline.five_stage.captured_update import CapturedUpdate
from dlrm_bench.pipeline.five_stage.graph_obstacles import why_not_graphed
from dlrm_bench.pipeline.five_stage.iteration_obstacles import OPTIMIZERS, _of_kernel, why_no_iteration
from dlrm_bench.pipeline.five_stage.sharded_modules import sharded_modules
from dlrm_bench.pipeline.five_stage.step_graph import NATIVE
from dlrm_bench.pipeline.five_stage.table_steps import COUNTING
from dlrm_bench.pipeline.five_stage.trimmed.ec_sharder import TrimmedECSharder
from dlrm_bench.pipeline.five_stage.trimmed.sharder import TrimmedEBCSharder
from tests.pipeline.five_stage.any_models import PLANS, RW, Everything, Plan, Sequence, TwoTower, build
from tests.pipeline.five_stage.test_dense_run import wrapped
from tests.pipeline.five_stage.test_graph_obstacles import WRAPPERS, Hooked, InBackward, OfGradients, Scripted
from tests.pipeline.five_stage.test_iteration_obstacles import (
    BAGS,
    LENGTHS,
    Processed,
    hooked,
    kernel,
    processed_by_rows,
    unprocessed,
)
from tests.pipeline.five_stage.test_overflows import two_towers

GPU = torch.device("cuda", 0)
TABLES = {
    reasons.NOT_TRIMMED: "needs bags or sequences of declared sizes",
    reasons.PROCESSED_ROWS: "has feature processors and tables that are split by rows",
    reasons.PROCESSOR_HOOKS: "hooks of the feature processors",
    reasons.READS_SIZES: "reads the sizes of",
    reasons.VALIDATES: "validate=True",
    reasons.GIVES_IDS: "need_indices",
}
KERNELS = {
    reasons.OTHER_KERNEL: "plan the compute kernel `fused`",
    reasons.COUNTS_STEPS: "with numbers of the host",
    reasons.ROUNDS_AT_RANDOM: "rounds its weights at random",
}
DENSE = {
    reasons.NO_DDP: "wrap it by DistributedDataParallel",
    reasons.COMM_HOOK: "communication hook",
    reasons.UNUSED: "find_unused_parameters",
    reasons.IGNORED: "DistributedDataParallel ignores",
    reasons.MIXED: "mixed_precision",
    reasons.TRACKED: "model tracker",
    reasons.SHARED_PARAMETER: "share weights with other modules",
    reasons.SCRIPTED: "torch.jit.script has compiled item.mlp",
    reasons.MODULE_HOOKS: "hooks of item.mlp would run at captures only",
    reasons.IN_BACKWARD: "apply_optimizer_in_backward",
    reasons.GRADIENT_HOOKS: "gradient hooks of user.mlp.0.bias",
}
UPDATES = {
    reasons.DOES_MORE: "the step of WarmupOptimizer may do more",
    reasons.OWN_STEP: "has a step of its own",
    reasons.OWN_ZERO_GRAD: "has a zero_grad of its own",
    reasons.GIVEN_ZERO_GRAD: "was given another zero_grad",
    reasons.NOT_CAPTURABLE: "has no option `capturable`",
    reasons.HOST_STATE: "NAdam keeps state on the host",
    reasons.COMPLEX: "complex parameters",
    reasons.WATCHED: "hooks, or a step in the place",
}
ELSEWHERE = {
    reasons.UNDECLARED: "tests/bench/doctor/test_capture.py",
    reasons.HOST_MEMORY: "test_kernels_in_host_memory",
    reasons.STEPS_STAY: "of the driver, on a GPU",
    reasons.SCALED: "while a scaler steps",
    reasons.READS_DEVICE: "findings of the doctor",
    reasons.OTHER_FORM: "findings of the doctor, of shapes",
}
"""Reasons that the doctor gives too, with where it is tested, or whence it has them."""
UNSEEN = {
    *(reasons.NO_GPU, reasons.LATE_HOOKS, reasons.OWN_COLLECTIVES),  # of the pipeline's own circumstances
    *(reasons.VARIABLE_BATCH, reasons.OBJECT, reasons.ON_HOST, reasons.READS_KJT, reasons.MANY_FORMS),  # of batches
    *(reasons.READ_PAST, reasons.RATE_MOVES, reasons.FIRST, reasons.CHANGED, reasons.AUTOCAST, reasons.OVERFLOW),
}
"""Reasons that only batches, captures and steps show."""
EXCHANGES = {
    *(reasons.PEERS_ALONE, reasons.PEERS_NO_GRAPH, reasons.PEERS_APART, reasons.PEERS_UNSEEN, reasons.PEERS_NO_ACCESS),
    *(reasons.PEERS_NO_TRITON, reasons.PEERS_QUANTISED, reasons.PEERS_OTHER_DIST),
    *(reasons.PEERS_DTYPE, reasons.PEERS_LARGE),
}
"""Reasons that leave an exchange to NCCL, within the graph all the same."""


def reason_of(why: str) -> reasons.Reason:
    """Returns the reason that a sentence is made of."""
    every = [reason for section in reasons.SECTIONS for reason in section.reasons]
    return next(of for of in every if re.fullmatch(re.sub(r"\\{\w+\\}", ".*", re.escape(of.text)), why))


def agree(why: str | None, found: list[str], known: dict[reasons.Reason, str]) -> reasons.Reason | None:
    """Asserts that the doctor has found what the pipeline says; returns its reason."""
    if why is None:
        assert found == []
        return None
    assert any(known[reason_of(why)] in line for line in found), (why, found)
    return reason_of(why)


def test_each_reason_is_known_here() -> None:
    every = {reason for section in reasons.SECTIONS for reason in section.reasons}
    parts = [*map(set, (TABLES, KERNELS, DENSE, UPDATES, ELSEWHERE)), UNSEEN, EXCHANGES]
    assert every == set().union(*parts)
    assert len(every) == sum(map(len, parts))


def test_names_are_those_of_the_pipeline() -> None:
    assert {of.value for of in OPTIMIZERS} == set(capture.UPDATES)
    assert {of.value for of in COUNTING} == set(capture.COUNTING)
    assert {of.__name__ for of in NATIVE} == set(capture_update.NATIVE)


def test_kernels_in_host_memory() -> None:
    hosts = {kind.value for kind in EmbeddingComputeKernel if any(map(kind.value.count, capture._IN_HOST_MEMORY))}
    assert {"fused_uvm", "fused_uvm_caching", "key_value"} <= hosts
    assert not hosts & {"dense", "fused"}


@pytest.mark.parametrize(
    "of",
    [
        kernel(),
        SimpleNamespace(),
        kernel(optimizer=EmbOptimType.LARS_SGD),
        kernel(_used_rowwise_adagrad_with_counter=True),
        kernel(weights_precision=SparseType.FP16),
        kernel(weights_precision=SparseType.FP16, stochastic_rounding=False),
    ],
)
def test_of_kernels(of: Any) -> None:
    collection = SimpleNamespace(_lookups=[SimpleNamespace(_emb_modules=[SimpleNamespace(emb_module=of)])])
    agree(_of_kernel("tables", of), list(capture._of_kernels("tables", collection)), KERNELS)


# Whole models


def sharders(validate: bool = False, lengths: Any = LENGTHS) -> dict[type, Any]:
    bags = TrimmedEBCSharder(BAGS, validate=validate)
    return {
        EmbeddingBagCollection: bags,
        FeatureProcessedEmbeddingBagCollection: FeatureProcessedEmbeddingBagCollectionSharder(bags),
        EmbeddingCollection: TrimmedECSharder(lengths),
    }


class Shared(Processed):
    def __init__(self) -> None:
        super().__init__()
        self.weights = next(self.processed._feature_processors.parameters())


def by_rows(index: int, sequence: bool) -> str:
    return RW


def models(ranks: Ranks) -> Iterator[tuple[Any, Any]]:
    """Yields models with their optimizers."""
    trimmed, plain = sharders(), PLANS["TW"]
    cases: list[tuple[Callable[[], Any], Plan, dict[type, Any] | None]] = [
        *((model, plain, trimmed) for model in (TwoTower, Sequence, Processed, unprocessed, hooked)),
        *((model, plain, trimmed) for model in (Shared, Hooked, OfGradients, InBackward, Scripted)),
        *((model, plain, None) for model in (TwoTower, Sequence, Everything)),
        (Sequence, plain, sharders(lengths={"history": 6})),
        (two_towers, by_rows, trimmed),
        (TwoTower, plain, sharders(validate=True)),
        (Processed, processed_by_rows, trimmed),
    ]
    for case in cases:
        yield build(ranks, case[0], case[1], sharders=case[2])
    for arguments in WRAPPERS:
        with wrapped(**arguments):
            yield build(ranks, TwoTower, plain, sharders=trimmed)
    model, optimizer = build(ranks, TwoTower, plain, sharders=trimmed)
    model._dmp_wrapped_module.register_comm_hook(None, fp16_compress_hook)
    yield model, optimizer
    model, optimizer = build(ranks, TwoTower, plain, sharders=trimmed)
    model.model_trackers = {"loads": object()}
    yield model, optimizer
    model, optimizer = build(ranks, TwoTower, plain, sharders=trimmed)
    model._dmp_wrapped_module = model.module
    yield model, optimizer


def whole_models(ranks: Ranks) -> list[str]:
    """Returns the texts of the reasons that were given."""
    given = set()
    for model, optimizer in models(ranks):
        modules = sharded_modules(model)
        why = why_no_iteration(modules) or why_not_graphed(model, modules, GPU)
        found = capture.of_pipeline(SimpleNamespace(_model=model, _optimizer=optimizer))
        if (reason := agree(why, found, TABLES | DENSE)) is not None:
            given.add(reason.text)
    return sorted(given)


def test_of_models(run_ranks: Callable[..., Any]) -> None:
    (given,) = run_ranks(1, whole_models)
    assert given == sorted(reason.text for reason in TABLES | DENSE)


# The dense update


class Own(torch.optim.Adam):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Keeps(torch.optim.Adam):
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Keeps the gradients."""


class Marked(Own):
    runs_in_graphs = True


def watched(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam(parameters)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


def told_to_keep(keyed: KeyedOptimizerWrapper) -> Any:
    keyed.zero_grad = lambda set_to_none=True: None  # type: ignore[method-assign]
    return keyed


def warming_up(keyed: KeyedOptimizerWrapper) -> Any:
    return WarmupOptimizer(keyed, [WarmupStage(WarmupPolicy.NONE)])


def as_it_is(keyed: KeyedOptimizerWrapper) -> Any:
    return keyed


CASES: list[tuple[Callable[..., Any], Callable[..., Any], torch.dtype]] = [
    *((kind, as_it_is, torch.float32) for kind in (torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad, Marked)),
    *((kind, as_it_is, torch.float32) for kind in (torch.optim.NAdam, RowWiseAdagrad, Own, Keeps, watched)),
    (torch.optim.LBFGS, as_it_is, torch.float32),
    *((torch.optim.Adam, wrap, torch.float32) for wrap in (warming_up, told_to_keep)),
    (torch.optim.Adam, as_it_is, torch.complex64),
]


def test_of_updates() -> None:
    given = set()
    for kind, wrap, dtype in CASES:
        named = {"p": nn.Parameter(torch.ones(3, 1, dtype=dtype))}
        keyed = KeyedOptimizerWrapper(named, lambda params, kind=kind: kind(params))
        optimizer = CombinedOptimizer([CombinedOptimizer([]), wrap(keyed)])
        why = CapturedUpdate(optimizer, named.values()).why_not
        given.add(agree(why, list(capture_update.of_optimizer(optimizer)), UPDATES))
    assert given == {None, *UPDATES}
