"""The static pipeline trains what plain PyTorch does: eager or captured, ahead of its batches, on one or more ranks."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import islice, product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dlrm_bench.bench.config import RunConfig
from dlrm_bench.bench.presets import preset
from dlrm_bench.dlrm.config import Precision
from dlrm_bench.dlrm.data.batch import Batch
from dlrm_bench.dlrm.data.metrics import exact_auc
from dlrm_bench.dlrm.dcnv2.config import DataConfig, ModelConfig, OptimizerConfig
from dlrm_bench.dlrm.dcnv2.data.dataset import open_dataset
from dlrm_bench.dlrm.dcnv2.data.planted import PlantedConfig, generate
from dlrm_bench.dlrm.dcnv2.data.random_batches import RandomDataset
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.dlrm.tables.plan.planner import REPLICATED_ROWS
from dlrm_bench.pipeline.build import build_pipeline
from dlrm_bench.pipeline.static.pipeline import StaticPipeline
from tests.cases import CPU_PLACES, GPU_PLACES, PLACES, WAYS
from tests.pipelines import changed, dense_of, run_config, static_pipeline
from tests.plain_dlrm import PlainDLRM

STEPS = 40
LARGE_BATCH, LARGE_STEPS = 2048, 8
LEARNING_RATE = 0.004
EVALUATE_EVERY = 7
EVALUATION_BATCHES = 3

DENSE: dict[str, Any] = {
    "embedding_dim": 32,
    "dense_in_features": 5,
    "bottom_mlp": (24, 32),
    "cross_layers": 2,
    "cross_rank": 8,
    "top_mlp": (24, 16, 1),
}
MODELS = {
    # Four tables small enough to be replicated, which peer memory leaves out, and five others.
    "tiny tables": ModelConfig(
        num_embeddings=(5000, 7, 30, 9000, REPLICATED_ROWS, 6000, 40, REPLICATED_ROWS + 1, 5200),
        multi_hot_sizes=(3, 1, 2, 12, 1, 4, 1, 2, 1),
        **DENSE,
    ),
    # No table to replicate, one so hot that four ranks split it by columns; all rows are hit again and again.
    "sharded": ModelConfig(
        num_embeddings=tuple(REPLICATED_ROWS + more for more in (50, 1, 100, 200)),
        multi_hot_sizes=(3, 1, 20, 2),
        **DENSE,
    ),
}
LARGE_WAYS = ("presorted", "peer memory")
PARITY = [
    *[pytest.param(*place, model, way) for place in CPU_PLACES for model in MODELS for way in WAYS],
    # Four processes are slow on few cores: each model and each way once.
    (4, False, "tiny tables", "presorted"),
    (4, False, "sharded", "fbgemm"),
    (4, False, "tiny tables", "peer memory"),
    *[
        pytest.param(*place.values, model, way, marks=place.marks)
        for place in GPU_PLACES
        for model in MODELS
        for way in WAYS
    ],
]


def small(model: str, steps: int = STEPS, **changes: Any) -> RunConfig:
    """Returns a configuration with as many distinct batches as steps, so that random labels cannot be learned by heart:
    the loss stays up."""
    changes = {"precision": "fp32", "local_batch_size": 24} | changes
    return run_config(
        "static",
        preset="test",
        model=MODELS[model],
        data=DataConfig(source="random", random_batches=steps + EVALUATION_BATCHES),
        optimizer=OptimizerConfig(learning_rate=LEARNING_RATE),
        iterations=steps,
        warmup_iterations=0,
        **changes,
    )


@dataclass(slots=True)
class Trained:
    """The state of one rank after training, on the CPU."""

    losses: list[float]
    logits: list[Tensor] = field(default_factory=list)
    """Logits of each evaluation, over its batches."""
    tables: list[tuple[int, slice, Tensor, Tensor]] = field(default_factory=list)
    """Table, columns, weights and Adagrad state of each part that the rank holds."""
    weights: dict[str, Tensor] = field(default_factory=dict)
    states: dict[str, Tensor] = field(default_factory=dict)
    num_replicated: int = 0


def batches_of(config: RunConfig, rank: int, world_size: int, pin: bool = False) -> list[Batch]:
    """The training batches of a rank, then those it evaluates."""
    batches = RandomDataset(config.data, config.model, config.seed).train_batches(
        rank, world_size, config.local_batch_size, pin=pin
    )
    return list(islice(batches, config.data.random_batches))


def train(ranks: Ranks, config: RunConfig, steps: int, evaluates: bool = False) -> Trained:
    """Train until an iterator of `steps` batches ends."""
    torch.set_float32_matmul_precision("highest")
    batches = batches_of(config, ranks.rank, ranks.world_size, pin=ranks.device.type == "cuda")
    pipeline = build_pipeline(config, config.pipeline, ranks)
    training = map(pipeline.prepare, batches[:steps])
    losses, logits = [], []
    while True:
        try:
            losses.append(pipeline.train_step(training))
        except StopIteration:
            break
        if evaluates and len(losses) % EVALUATE_EVERY == 0:
            held_out = batches[-EVALUATION_BATCHES:]
            evaluation = list(pipeline.evaluate(map(pipeline.prepare, held_out)))
            for batch, (_, labels) in zip(held_out, evaluation, strict=True):
                assert torch.equal(labels.cpu(), batch.labels)
            logits.append(torch.cat([values for values, _ in evaluation]).cpu())
    with pytest.raises(StopIteration):
        pipeline.train_step(training)
    if isinstance(pipeline, StaticPipeline) and losses:
        with pytest.raises(ValueError, match="have ended"):
            pipeline.train_step(map(pipeline.prepare, batches[:1]))
    trained = Trained([loss.item() for loss in losses], logits)
    if isinstance(pipeline, StaticPipeline):
        for part in pipeline.ebc.table_shards():
            columns = slice(part.shard.column, part.shard.column + part.shard.columns)
            trained.tables.append((part.shard.table, columns, part.weights.cpu(), part.state.cpu()))
        trained.weights = {name: value.cpu() for name, value in dense_of(pipeline).state_dict("master").items()}
        trained.states = {name: value.cpu() for name, value in dense_of(pipeline).state_dict("state").items()}
        trained.num_replicated = len(pipeline.ebc.plan.replicated)
    pipeline.close()
    return trained


Job = tuple[RunConfig, int, bool]
"""Arguments of `train`."""


def train_several(ranks: Ranks, jobs: dict[str, Job]) -> dict[str, Trained]:
    """Runs all jobs in one start of the processes, which costs more than a job does."""
    return {name: train(ranks, *job) for name, job in jobs.items()}


def jobs_of(world_size: int, gpu: bool) -> dict[str, Job]:
    parity: dict[str, Job] = {
        f"{model} {way}": (small(model, **WAYS[way]), STEPS, False) for model in MODELS for way in WAYS
    }
    if world_size == 4:
        return {name: parity[name] for name in ("tiny tables presorted", "sharded fbgemm", "tiny tables peer memory")}
    others: dict[str, Job] = {}
    for way in WAYS:
        config = small("tiny tables", **WAYS[way])
        others[f"evaluates {way}"] = (config, 30, True)
        others[f"does not {way}"] = (config, 30, False)
        others |= {f"{steps} batches {way}": (config, steps, False) for steps in range(4)}
    # So large that the pipeline runs weight gradients elsewhere.
    large = {
        way: small("tiny tables", steps=LARGE_STEPS, local_batch_size=LARGE_BATCH, **WAYS[way]) for way in LARGE_WAYS
    }
    others |= {f"large {way}": (config, LARGE_STEPS, False) for way, config in large.items()}
    if world_size == 2:
        others["stock"] = (changed(small("tiny tables"), "torchrec"), 30, False)
    if gpu:
        for precision, way in product(("fp32", "bf16"), WAYS):
            eager = small("tiny tables", **WAYS[way], precision=precision)
            others[f"eager {precision} {way}"] = (eager, 30, True)
            graph = changed(eager, cuda_graph="iteration", overlap=True)
            others[f"graph {precision} {way}"] = (graph, 30, True)
            others[f"graph alone {precision} {way}"] = (graph, 30, False)
        for way, config in large.items():
            graph = changed(config, cuda_graph="iteration", overlap=True)
            others[f"graph large {way}"] = (graph, LARGE_STEPS, False)
    return parity | others


Run = Callable[[int, bool], list[dict[str, Trained]]]


@pytest.fixture(scope="module")
def trained(run_ranks: Callable[..., list[Any]]) -> Run:
    """trained(world_size, gpu)[rank][job]"""
    return cache(lambda world_size, gpu: run_ranks(world_size, train_several, jobs_of(world_size, gpu), gpu=gpu))


@dataclass(slots=True)
class Expected:
    losses: list[float]
    logits: list[Tensor]
    """Logits of the global evaluation batches, every EVALUATE_EVERY steps."""
    model: PlainDLRM


@cache
def plain(config: RunConfig, world_size: int) -> Expected:
    reference = PlainDLRM(config)
    per_step = list(zip(*(batches_of(config, rank, world_size) for rank in range(world_size)), strict=True))
    losses, logits = [], []
    for step, batches in enumerate(per_step[:-EVALUATION_BATCHES], start=1):
        losses.append(reference.train_step(list(batches)))
        if step % EVALUATE_EVERY == 0:
            with torch.no_grad():
                held_out = [reference.gather(list(batches)) for batches in per_step[-EVALUATION_BATCHES:]]
                logits.append(torch.stack([reference.logits(dense, blocks) for dense, blocks, _ in held_out]))
    return Expected(losses, logits, reference)


def mean_losses(per_rank: list[dict[str, Trained]], job: str) -> Tensor:
    return torch.tensor([jobs[job].losses for jobs in per_rank], dtype=torch.float64).mean(dim=0)


@pytest.mark.parametrize(("world_size", "gpu", "model", "way"), PARITY)
def test_losses_equal_plain_dlrm(trained: Run, world_size: int, gpu: bool, model: str, way: str) -> None:
    per_rank, job = trained(world_size, gpu), f"{model} {way}"
    expected = torch.tensor(plain(small(model), world_size).losses, dtype=torch.float64)
    assert expected.min() > 0.3, "a loss near zero would hide differences"
    torch.testing.assert_close(mean_losses(per_rank, job), expected, rtol=1e-5, atol=0)
    replicated = 4 if model == "tiny tables" and world_size > 1 and way != "peer memory" else 0
    assert {jobs[job].num_replicated for jobs in per_rank} == {replicated}


@pytest.mark.parametrize("way", LARGE_WAYS)
@pytest.mark.parametrize(("world_size", "gpu"), PLACES)
def test_losses_of_large_batches_equal_plain_dlrm(trained: Run, world_size: int, gpu: bool, way: str) -> None:
    config = small("tiny tables", steps=LARGE_STEPS, local_batch_size=LARGE_BATCH)
    expected = torch.tensor(plain(config, world_size).losses, dtype=torch.float64)
    torch.testing.assert_close(mean_losses(trained(world_size, gpu), f"large {way}"), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize(("world_size", "gpu", "model", "way"), PARITY)
def test_tables_weights_and_states_equal_plain_dlrm(
    trained: Run, world_size: int, gpu: bool, model: str, way: str
) -> None:
    reference = plain(small(model), world_size).model
    sums = {parameter: state["sum"] for parameter, state in reference.optimizer.state.items()}
    for jobs in trained(world_size, gpu):
        result = jobs[f"{model} {way}"]
        pairs = [
            (weights, state, reference.tables[table].detach()[:, columns], sums[reference.tables[table]][:, columns])
            for table, columns, weights, state in result.tables
        ]
        pairs += [
            (result.weights[name], result.states[name], parameter.detach(), sums[parameter])
            for name, parameter in reference.dense.named_parameters()
        ]
        for weights, state, expected_weights, expected_state in pairs:
            torch.testing.assert_close(state, expected_state, rtol=1e-3, atol=1e-10)
            # Adagrad divides by the gradients' size, so the rounding error of a tiny gradient moves its weight by a
            # part of the learning rate. A missing or doubled step would move it by lr / sqrt(STEPS), a sixth, or more.
            error = (weights - expected_weights).abs()
            assert error.max() < LEARNING_RATE / 20
            assert error.mean() < LEARNING_RATE / 1e4


def test_all_columns_of_all_tables_are_somewhere(trained: Run) -> None:
    """Otherwise the comparison above would leave some out."""
    held = [
        (table, column)
        for jobs in trained(2, False)
        for table, columns, *_ in jobs["tiny tables fbgemm"].tables
        for column in range(columns.start, columns.stop)
    ]
    assert set(held) == set(product(range(9), range(32)))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("world_size", "gpu"), PLACES)
def test_every_batch_is_used_once_and_in_order_to_the_end(trained: Run, world_size: int, gpu: bool, way: str) -> None:
    for jobs in trained(world_size, gpu):
        whole = jobs[f"tiny tables {way}"].losses
        assert len(whole) == STEPS
        assert len(set(whole)) > 0.9 * STEPS, "batches are too alike to tell their order"
        for steps in range(4):
            assert jobs[f"{steps} batches {way}"].losses == whole[:steps]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("world_size", "gpu"), PLACES)
def test_evaluation_leaves_training_as_it_was(trained: Run, world_size: int, gpu: bool, way: str) -> None:
    """Training stays the same to the bit, which also makes two runs of one seed equal."""
    for jobs in trained(world_size, gpu):
        assert jobs[f"evaluates {way}"].logits
        assert_bitwise_equal(jobs[f"evaluates {way}"], jobs[f"does not {way}"])
        assert jobs[f"does not {way}"].losses == jobs[f"tiny tables {way}"].losses[:30]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("world_size", "gpu"), PLACES)
def test_evaluation_equals_plain_dlrm(trained: Run, world_size: int, gpu: bool, way: str) -> None:
    per_rank = trained(world_size, gpu)
    evaluations = zip(*(jobs[f"evaluates {way}"].logits for jobs in per_rank), strict=True)
    for logits, expected in zip(evaluations, plain(small("tiny tables"), world_size).logits, strict=False):
        by_batch = [rank_logits.view(EVALUATION_BATCHES, -1) for rank_logits in logits]
        torch.testing.assert_close(torch.cat(by_batch, dim=1), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("gpu", [False, pytest.param(True, marks=pytest.mark.multi_gpu)])
def test_losses_equal_stock_torchrec(trained: Run, gpu: bool) -> None:
    per_rank = trained(2, gpu)
    stock = mean_losses(per_rank, "stock")
    assert len(stock) == 30
    for way in WAYS:
        torch.testing.assert_close(mean_losses(per_rank, f"tiny tables {way}")[:30], stock, rtol=1e-5, atol=0)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("world_size", "gpu"), GPU_PLACES)
def test_graph_with_overlap_equals_eager_to_the_bit(
    trained: Run, world_size: int, gpu: bool, precision: str, way: str
) -> None:
    for jobs in trained(world_size, gpu):
        eager, graph = (jobs[f"{how} {precision} {way}"] for how in ("eager", "graph"))
        assert len(graph.losses) == 30
        assert_bitwise_equal(jobs[f"graph alone {precision} {way}"], graph)  # evaluation leaves training as it was
        assert len(graph.logits) == 30 // EVALUATE_EVERY
        assert_bitwise_equal(graph, eager)
        for logits, expected in zip(graph.logits, eager.logits, strict=True):
            assert torch.equal(logits, expected)


@pytest.mark.parametrize("way", LARGE_WAYS)
@pytest.mark.parametrize(("world_size", "gpu"), GPU_PLACES)
def test_graph_with_overlap_equals_eager_for_large_batches(trained: Run, world_size: int, gpu: bool, way: str) -> None:
    for jobs in trained(world_size, gpu):
        assert_bitwise_equal(jobs[f"graph large {way}"], jobs[f"large {way}"])


def assert_bitwise_equal(a: Trained, b: Trained) -> None:
    assert a.losses == b.losses
    for (_, _, *tensors), (_, _, *expected) in zip(a.tables, b.tables, strict=True):
        assert all(map(torch.equal, tensors, expected))
    for tensors, expected in ((a.weights, b.weights), (a.states, b.states)):
        assert all(torch.equal(tensors[name], expected[name]) for name in expected)


def auc_after_an_epoch(ranks: Ranks, config: RunConfig, precisions: list[Precision]) -> list[float]:
    torch.set_float32_matmul_precision("highest")
    dataset, aucs = open_dataset(config.data, config.model, config.seed), []
    for precision in precisions:
        pipeline = static_pipeline(changed(config, precision=precision), ranks)
        place = (ranks.rank, ranks.world_size, config.local_batch_size)
        training = iter(dataset.train_batches(*place, pin=True))
        with suppress(StopIteration):
            while True:
                pipeline.train_step(training)
        held_out = list(dataset.eval_batches(*place, pin=True))
        logits = [values for values, _ in pipeline.evaluate(iter(held_out))]
        valid = [
            (scores[: b.num_valid].cpu(), b.labels[: b.num_valid]) for scores, b in zip(logits, held_out, strict=True)
        ]
        aucs.append(exact_auc(*(torch.cat(parts) for parts in zip(*valid, strict=True))))
    return aucs


@pytest.mark.gpu
def test_bf16_reaches_the_auc_of_fp32(run_ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    _, manifest, _ = generate(PlantedConfig(path=tmp_path, samples_per_day=150_000))
    smoke = preset("smoke")
    config = changed(
        smoke,
        "static",
        data=replace(smoke.data, path=tmp_path),
        cuda_graph="iteration",
        overlap=True,
        presort_ids=True,
    )
    ((fp32, bf16),) = run_ranks(1, auc_after_an_epoch, config, ["fp32", "bf16"], gpu=True)
    assert manifest.best_auc > fp32 > 0.82
    assert abs(fp32 - bf16) < 0.003
