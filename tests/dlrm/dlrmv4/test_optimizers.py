"""DLRMv4 under TorchRec's pipeline on two ranks trains as a plain loop over both ranks' samples does in one process."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torchrec.distributed import DistributedModelParallel, TrainPipelineSparseDist
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.sharding_plan import (
    ParameterShardingGenerator,
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardedTensor, ShardingPlan

from dlrm_bench.dlrm.dlrmv4.batch import Batch, batch_of
from dlrm_bench.dlrm.dlrmv4.config import Dlrmv4Training, ModelConfig, OptimizerConfig, tables
from dlrm_bench.dlrm.dlrmv4.model import build_model, fill_tables, seed_dropout
from dlrm_bench.dlrm.dlrmv4.optimizers import RampedOptimizer, fuse_table_optimizer
from dlrm_bench.dlrm.runtime.ranks import Ranks
from tests.cases import PLACES
from tests.dlrm.dlrmv4.cases import SMALL, made_training, make_samples

STEPS = 20
MODEL = replace(SMALL, embedding_dim=8, head_hidden=24)
TRAINING = made_training(
    model=MODEL,
    optimizer=OptimizerConfig(learning_rate=0.02, ramp_steps=8, clip_norm=0.2),
    local_batch_size=4,
    precision="fp32",
    seed=5,
)
LENGTHS = ((3, 0, 9, 1), (5, 17, 0, 2))
"""Of each rank's batches; the longest differ, and so what attention is divided by."""


def batches(rank: int, model: ModelConfig = MODEL) -> list[Batch]:
    return [batch_of(make_samples(model, LENGTHS[rank], seed=100 * rank + step), model) for step in range(STEPS)]


def shard(
    config: Dlrmv4Training, ranks: Ranks, way: ParameterShardingGenerator | None = None
) -> DistributedModelParallel:
    """Tables in turn by rows, and whole on the first rank and on the last one; or all in one way."""
    model = build_model(config, ranks.device)
    fuse_table_optimizer(model, config.optimizer)
    sharder = EmbeddingCollectionSharder(use_index_dedup=ranks.device.type == "cuda")  # FBGEMM has it for GPUs alone
    ways = [row_wise(), table_wise(rank=0), table_wise(rank=ranks.world_size - 1)]
    ways = [way] if way else ways
    plan = construct_module_sharding_plan(
        model.model.embeddings,
        {table.name: ways[i % len(ways)] for i, table in enumerate(tables(config.model))},
        sharder=sharder,
        world_size=ranks.world_size,
        local_size=ranks.local_world_size,
        device_type=ranks.device.type,
    )
    sharded = DistributedModelParallel(
        model, device=ranks.device, plan=ShardingPlan({"model.embeddings": plan}), sharders=[sharder]
    )
    fill_tables(sharded, config.model, config.seed)
    return sharded


def train_by_torchrec(ranks: Ranks, config: Dlrmv4Training) -> tuple[list[float], dict[str, Tensor]]:
    """Returns this rank's loss of each step, and its dense weights and its rows of tables at the end."""
    torch.backends.cuda.matmul.allow_tf32 = False
    sharded = shard(config, ranks)
    optimizer = RampedOptimizer(sharded, config.optimizer)
    pipeline = TrainPipelineSparseDist(sharded, optimizer, ranks.device)  # type: ignore[arg-type]
    seed_dropout(config, ranks.rank)
    stream = iter(batches(ranks.rank, config.model))
    losses = [float(pipeline.progress(stream)[0]) for _ in range(STEPS)]
    assert optimizer.step_count == STEPS
    assert pipeline._pipelined_modules == [sharded.module.model.embeddings], "the input dist must run ahead"
    return losses, {name: whole(value) for name, value in sharded.state_dict().items()}


def whole(value: Tensor | ShardedTensor) -> Tensor:
    """A weight's memory; of a sharded table all of it, zero where another rank has it."""
    if not isinstance(value, ShardedTensor):
        return value.detach().cpu().clone()
    table = torch.zeros(*value.size())
    for local in value.local_shards():
        (row, column), (rows, columns) = local.metadata.shard_offsets, local.metadata.shard_sizes
        table[row : row + rows, column : column + columns] = local.tensor.detach().cpu()
    return table


def train_plainly(
    config: Dlrmv4Training, world_size: int
) -> tuple[dict[str, Tensor], list[list[float]], dict[str, Tensor], int]:
    """The whole training in one process, every update written out: initial weights, losses of each rank, weights at the
    end, and how many steps were clipped."""
    cpu = torch.device("cpu")
    model, optimizer = build_model(config, cpu, cpu), config.optimizer
    fill_tables(model, config.model, config.seed)
    weights = dict(model.named_parameters())
    initial = {name: weight.detach().clone() for name, weight in weights.items()}
    dense = [weight for name, weight in weights.items() if "embeddings." not in name]
    rows = [weight for name, weight in weights.items() if "embeddings." in name]
    sums = [torch.zeros(len(weight)) for weight in rows]
    means, squares = ([torch.zeros_like(weight) for weight in dense] for _ in range(2))
    masks, stream = [], [batches(rank, config.model) for rank in range(world_size)]
    for rank in range(world_size):
        seed_dropout(config, rank)
        masks.append(torch.get_rng_state())
    losses: list[list[float]] = [[] for _ in range(world_size)]
    clipped = 0
    for step in range(STEPS):
        model.zero_grad()
        for rank in range(world_size):
            torch.set_rng_state(masks[rank])
            loss, _ = model(stream[rank][step])
            masks[rank] = torch.get_rng_state()
            (loss / world_size).backward()
            losses[rank].append(loss.item())
        rate = optimizer.learning_rate * min(1, step / optimizer.ramp_steps)
        with torch.no_grad():
            for weight, total in zip(rows, sums, strict=True):
                assert weight.grad is not None
                total += weight.grad.square().mean(dim=1)
                weight -= rate * weight.grad / (total.sqrt() + optimizer.adagrad_eps)[:, None]
            norm = torch.stack([weight.grad.square().sum() for weight in dense]).sum().sqrt()  # type: ignore[union-attr]
            clipped += int(norm > optimizer.clip_norm)
            for weight, mean, square in zip(dense, means, squares, strict=True):
                assert weight.grad is not None
                gradient = weight.grad * min(1.0, optimizer.clip_norm / (float(norm) + 1e-6))
                first, second = optimizer.adam_betas
                mean.lerp_(gradient, 1 - first)
                square.lerp_(gradient.square(), 1 - second)
                unbiased = square / (1 - second ** (step + 1))
                weight -= rate / (1 - first ** (step + 1)) * mean / (unbiased.sqrt() + optimizer.adam_eps)
    return initial, losses, {name: weight.detach() for name, weight in weights.items()}, clipped


@pytest.mark.parametrize(("world_size", "gpu"), PLACES)
def test_the_stock_pipeline_trains_as_a_plain_loop(run_ranks: Any, world_size: int, gpu: bool) -> None:
    """On GPUs without dropout, whose masks are other ones there."""
    still = replace(MODEL, input_dropout=0.0, layer_dropout=0.0)
    config = replace(TRAINING, model=still) if gpu else TRAINING
    initial, losses, weights, clipped = train_plainly(config, world_size)
    assert 0 < clipped < STEPS, "some steps must be clipped and some not"
    results = run_ranks(world_size, train_by_torchrec, config, gpu=gpu)
    for rank, (of_rank, _) in enumerate(results):
        torch.testing.assert_close(torch.tensor(of_rank), torch.tensor(losses[rank]), rtol=1e-5, atol=1e-7)
    for name, weight in weights.items():
        of_ranks = [state[name] for _, state in results]
        got = sum(of_ranks) if "embeddings." in name else of_ranks[0]
        # Adam divides by the size of a gradient: where that is mere rounding, single elements differ.
        apart, way = (got - weight).norm(), (weight - initial[name]).norm()
        assert way > 0, name
        assert apart < (1e-3 if gpu else 1e-4) * way, (name, float(apart / way))
        assert "embeddings." in name or all(torch.equal(of, of_ranks[0]) for of in of_ranks), name


def test_the_first_step_of_a_ramp_changes_nothing(run_ranks: Any) -> None:
    """Its rate is 0: the second step's loss is that of the initial weights."""
    one = run_ranks(1, losses_on_one_batch, TRAINING)[0]
    assert one[0] == one[1]
    assert one[1] != one[2]


def losses_on_one_batch(ranks: Ranks, config: Dlrmv4Training) -> list[float]:
    config = replace(config, model=replace(config.model, input_dropout=0.0, layer_dropout=0.0))
    sharded = shard(config, ranks)
    pipeline = TrainPipelineSparseDist(sharded, RampedOptimizer(sharded, config.optimizer), ranks.device)  # type: ignore[arg-type]
    stream = iter([batches(0, config.model)[0] for _ in range(4)])
    return [float(pipeline.progress(stream)[0]) for _ in range(4)]


def rates(ranks: Ranks, config: Dlrmv4Training) -> list[set[float]]:
    optimizer = RampedOptimizer(shard(config, ranks), config.optimizer, step=3)
    found = [{group["lr"] for group in optimizer.states.param_groups}]
    optimizer.go_to(100)
    return [*found, {group["lr"] for group in optimizer.states.param_groups}]


def test_a_run_that_goes_on_has_the_rates_of_its_step(run_ranks: Any) -> None:
    assert run_ranks(1, rates, TRAINING)[0] == [{0.02 * 3 / 8}, {0.02}]


def refusals(ranks: Ranks, config: Dlrmv4Training) -> list[str]:
    errors = []
    for way in (column_wise(ranks=list(range(ranks.world_size))), data_parallel()):
        try:
            RampedOptimizer(shard(config, ranks, way), config.optimizer)
        except ValueError as error:
            errors.append(str(error))
    return errors


def test_tables_sharded_by_columns_or_replicated_are_refused_on_every_rank(run_ranks: Any) -> None:
    """Each part of a row would have a state of its own: another optimizer than the benchmark's. And TorchRec gives
    replicated tables no rate."""
    model = replace(MODEL, embedding_dim=16)
    for by_columns, replicated in run_ranks(2, refusals, replace(TRAINING, model=model)):
        assert by_columns.startswith("table album_id is sharded by columns")
        assert "is replicated" in replicated
