"""Tables in host memory behind a cache train bit by bit as by TrainPipelineSparseDist; on CPUs uvm_on_cpu.py stands for
FBGEMM's cache, and fails where a wrong row would be read or written."""

import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torchrec.distributed import PrefetchTrainPipelineSparseDist, TrainPipelineSparseDist
from torchrec.distributed.types import CacheParams

from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.five_stage.iteration_obstacles import lookup_kernels
from dlrm_bench.pipeline.five_stage.options import FiveStageOptions
from dlrm_bench.pipeline.five_stage.pipeline import FiveStagePipeline
from dlrm_bench.pipeline.five_stage.sharded_modules import sharded_modules
from tests.cases import GPU_PLACES
from tests.pipeline.cpu_graphs import dense_graph_on_cpu
from tests.pipeline.five_stage.any_models import MODELS, PLANS, batches, build
from tests.pipeline.five_stage.test_any_model import adam_of
from tests.pipeline.five_stage.torchrec_models import Trained, drain, state
from tests.pipeline.five_stage.uvm_on_cpu import Cache, caches_on_cpu

STEPS = 8
TIMEOUT = 600  # seconds, after which a rank that hangs is killed
SWITCHES = {
    "default": FiveStageOptions(),
    "record_stream": FiveStageOptions(avoid_record_streams=False, pinned_d2h=False),
    "two threads": FiveStageOptions(launch_threads=2),
    "graph": FiveStageOptions(cuda_graph="dense"),
    "graph, asked for a whole one": FiveStageOptions(cuda_graph="iteration-or-dense"),
}


@dataclass(frozen=True)
class Tables:
    """sets: of the cache on CPUs, None for none. load: the share of rows that a cache on GPUs has."""

    model: str = "two towers"
    plan: str = "TW"
    sets: int | None = 4
    load: float = 0.2
    prefetch: bool = True

    def build(self, ranks: Ranks) -> tuple[Any, Any]:
        on_gpu = ranks.device.type == "cuda" and self.sets is not None
        cache = CacheParams(load_factor=self.load, prefetch_pipeline=self.prefetch) if on_gpu else None
        model, optimizer = build(ranks, MODELS[self.model], PLANS[self.plan], adam_of(ranks), cache=cache)
        if ranks.device.type == "cpu":
            caches_on_cpu(model, self.sets, self.prefetch)
        return model, optimizer


TABLES = [
    Tables(),
    Tables(sets=12, load=0.5),
    Tables(prefetch=False),
    Tables("two towers", "mixed"),
    Tables("sequence", "mixed"),
    Tables("sequence", "RW"),
    Tables("everything, unprocessed", "mixed"),
]
# On one rank TorchRec adds in place to vectors that FBGEMM's hook of the backward wants left alone: an error in stock.
PROCESSED = Tables("everything", "mixed")


def start(ranks: Ranks) -> None:
    signal.alarm(TIMEOUT)
    torch.backends.cuda.matmul.allow_tf32 = False
    if ranks.device.type == "cpu":
        dense_graph_on_cpu()


def locked(model: Any, without: str = "s_context") -> int:
    """Lines that are locked, but for those of a table that one model leaves without gradients, whose lines FBGEMM never
    unlocks."""
    kernels = [kernel for _, kernel in lookup_kernels(sharded_modules(model))]
    return sum(int((k.lxu_cache_locking_counter != 0).sum()) for k in kernels if k.table_names != [without])


def train(ranks: Ranks, tables: Tables, kind: Any = None, steps: int = STEPS) -> Trained:
    """kind: a pipeline of TorchRec, or options."""
    model, optimizer = tables.build(ranks)
    data = iter(batches(ranks, steps))
    if isinstance(kind, FiveStageOptions):
        with FiveStagePipeline(model, optimizer, ranks.device, kind) as pipeline:
            trained = drain(pipeline, data)
    else:
        trained = drain((kind or TrainPipelineSparseDist)(model, optimizer, ranks.device), data)
    assert "everything" in tables.model or not locked(model)
    trained.state = state(model, optimizer)
    return trained


def same(ours: Trained, theirs: Trained, what: object) -> None:
    assert len(ours.outputs) == len(theirs.outputs) > 0
    torch.testing.assert_close(ours.outputs, theirs.outputs, rtol=0, atol=0, msg=lambda said: f"{what}: {said}")
    torch.testing.assert_close(ours.state, theirs.state, rtol=0, atol=0, msg=lambda said: f"{what}: {said}")


def parity(ranks: Ranks, cases: list[Tables], switches: dict[str, FiveStageOptions], steps: int) -> None:
    """Also equal to tables without a cache."""
    start(ranks)
    for tables in cases:
        plain = train(ranks, replace(tables, sets=None), steps=steps)
        same(train(ranks, tables, steps=steps), plain, f"stock, {tables}")
        if ranks.device.type == "cuda" and tables.prefetch:
            same(train(ranks, tables, PrefetchTrainPipelineSparseDist, steps), plain, f"stock's prefetch, {tables}")
        for name, options in switches.items():
            same(train(ranks, tables, options, steps), plain, f"{name}, {tables}")


@pytest.mark.parametrize("world_size", [1, 2])
def test_trains_bit_by_bit_as_torchrec(run_ranks, world_size):
    run_ranks(world_size, parity, TABLES if world_size == 1 else [Tables(), PROCESSED], SWITCHES, STEPS)


@pytest.mark.parametrize("load", [0.2, 0.5])
@pytest.mark.parametrize(("world_size", "gpu"), GPU_PLACES)
def test_trains_bit_by_bit_as_torchrec_gpu(run_ranks, world_size, gpu, load):
    # Without sequences, which graphs pad. FBGEMM sums gradients of a row that a batch names often in no fixed order.
    cases = [replace(tables, load=load) for tables in TABLES if "sequence" not in tables.model and tables.plan == "TW"]
    run_ranks(world_size, parity, cases, SWITCHES, 40, gpu=gpu)


# What users do between the calls


def evaluate(model: Any, trainer: Any, held_out: list[Any]) -> Iterator[Any]:
    """By the same pipeline, to the end of what it has in flight."""
    model.eval()
    yield from drain(trainer, iter(held_out)).outputs
    model.train()


def habit(ranks: Ranks, name: str, ours: bool) -> Trained:
    model, optimizer = Tables().build(ranks)
    data, held_out = batches(ranks, 9), batches(ranks, 4, seed=2)
    kind: Any = FiveStagePipeline if ours else TrainPipelineSparseDist
    trainer, other = kind(model, optimizer, ranks.device), kind(model, optimizer, ranks.device)
    iterator, trained = iter(data), Trained()
    for step in range(9):
        trained.outputs.append(trainer.progress(iterator))
        if step == 3:
            HABITS[name](ranks, model, optimizer, other, held_out, trained)
    if ours:
        trainer.close()
        other.close()
        assert not locked(model)
    trained.state = state(model, optimizer)
    return trained


def evaluates_with_another(ranks: Ranks, model: Any, optimizer: Any, other: Any, held_out: Any, trained: Any) -> None:
    model.eval()
    trained.outputs += drain(other, iter(held_out)).outputs
    model.train()


def trains_with_another(ranks: Ranks, model: Any, optimizer: Any, other: Any, held_out: Any, trained: Any) -> None:
    trained.outputs += drain(other, iter(held_out)).outputs


def stops_half_way(ranks: Ranks, model: Any, optimizer: Any, other: Any, held_out: Any, trained: Any) -> None:
    trained.outputs.append(other.progress(iter(held_out)))


def saves_and_loads(ranks: Ranks, model: Any, optimizer: Any, other: Any, held_out: Any, trained: Any) -> None:
    before = {name: value.clone() for name, value in state(model, optimizer).items()}
    trained.outputs.append(tuple(before.values()))
    trains_with_another(ranks, model, optimizer, other, held_out, trained)
    weights = model.state_dict()
    for value in weights.values():
        for target in [shard.tensor for shard in value.local_shards()] if hasattr(value, "local_shards") else [value]:
            if target.is_floating_point():
                target.mul_(0.5)
    model.load_state_dict(weights)


HABITS: dict[str, Callable[..., None]] = {
    one.__name__: one for one in (evaluates_with_another, trains_with_another, stops_half_way, saves_and_loads)
}


def habits(ranks: Ranks) -> None:
    start(ranks)
    for name in HABITS:
        same(habit(ranks, name, ours=True), habit(ranks, name, ours=False), name)


@pytest.mark.parametrize(("world_size", "gpu"), [(1, False), *GPU_PLACES])
def test_whatever_happens_between_calls(run_ranks, world_size, gpu):
    run_ranks(world_size, habits, gpu=gpu)


def evaluation(ranks: Ranks) -> None:
    """By the training pipeline itself: no backward unlocks anything."""
    start(ranks)
    found = []
    for kind in (FiveStagePipeline, TrainPipelineSparseDist):
        model, optimizer = Tables().build(ranks)
        trainer: Any = kind(model, optimizer, ranks.device)
        trained = drain(trainer, iter(batches(ranks, 5)))
        trained.outputs += evaluate(model, trainer, batches(ranks, 5, seed=2))
        if kind is FiveStagePipeline:
            assert not locked(model)
        trained.outputs += drain(trainer, iter(batches(ranks, 5, seed=3))).outputs
        trained.state = state(model, optimizer)
        found.append(trained)
    same(*found, "evaluation")


@pytest.mark.parametrize(("world_size", "gpu"), [(1, False), *GPU_PLACES])
def test_evaluation_leaves_nothing_locked(run_ranks, world_size, gpu):
    run_ranks(world_size, evaluation, gpu=gpu)


def closing(ranks: Ranks) -> None:
    model, optimizer = Tables().build(ranks)
    trainer: Any = FiveStagePipeline(model, optimizer, ranks.device)
    trainer.progress(iter(batches(ranks, 5)))
    assert locked(model)
    trainer.close()
    assert not locked(model)


def test_closing_gives_up_what_was_fetched(run_ranks):
    run_ranks(1, closing)


def foreign_fetch(ranks: Ranks) -> None:
    """What TorchRec's prefetching pipeline leaves in the modules while it has a batch in flight."""
    model, optimizer = Tables().build(ranks)
    (_, kernel), *_ = lookup_kernels(sharded_modules(model))
    kernel.prefetch(torch.tensor([1, 2]), torch.tensor([0, 1, 2]))
    with pytest.raises(ValueError, match=r"user.tables holds fetched rows of a batch that another pipeline"):
        FiveStagePipeline(model, optimizer, ranks.device).progress(iter(batches(ranks, 5)))


def test_refuses_what_another_pipeline_has_fetched(run_ranks):
    run_ranks(1, foreign_fetch)


def failing_lookup(ranks: Ranks) -> None:
    """The next pipeline finds clean modules."""
    model, optimizer = Tables().build(ranks)
    trainer: Any = FiveStagePipeline(model, optimizer, ranks.device)
    data = iter(batches(ranks, 9))
    trainer.progress(data)

    def fail(*_: Any) -> None:
        raise KeyError("planted")

    with patch.object(Cache, "rows_at", fail), pytest.raises(KeyError, match="planted"):
        trainer.progress(data)
    trainer.close()
    drain(FiveStagePipeline(model, optimizer, ranks.device), data)


def test_a_failed_lookup_leaves_clean_modules(run_ranks):
    run_ranks(1, failing_lookup)
