"""DLRMv4 on rows that are made when they are first named: what tables in full train, to the bit, and checkpoints that
go on with any number of ranks."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dlrm_bench.bench.config import RunConfig
from dlrm_bench.dlrm.dlrmv4.data.generate import generate, smoke_config
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.dlrm.tables.initial_weights import fill_initial_weights
from dlrm_bench.pipeline.build import build_pipeline
from dlrm_bench.pipeline.checkpoint import own_pieces, read_state, write_state
from dlrm_bench.pipeline.checkpoint_index import CheckpointError
from dlrm_bench.pipeline.dynamic_state import of_all_places
from tests.pipeline.cpu_graphs import capture_on_cpu
from tests.pipeline.static_sequences.test_pipeline import drawn, evaluated, small, without_room

STEPS = 30
PLACES = 20_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("days")
    generate(replace(smoke_config(folder), users=300, days=5))
    return folder


def rows_of(pipeline: Any, config: RunConfig) -> list[Tensor]:
    """This rank's part of each table with its state as a last column, all rows of it."""
    dynamic, parts = pipeline.tables.dynamic, []
    if dynamic is None:
        return [torch.cat([of.weights, of.state], 1) for of in pipeline.tables.table_shards()]
    entries, rank, ranks = dynamic.entries(), pipeline._ranks.rank, pipeline._ranks.world_size
    for table, rows in enumerate(config.model.tables.rows):
        part = torch.zeros(len(range(rank, rows, ranks)), config.model.tables.columns + 1)
        fill_initial_weights(
            part[:, :-1], seed=config.seed, table=table, num_embeddings=rows, row_offset=rank, row_step=ranks
        )
        held = (entries[:, 2] == table).nonzero().flatten()
        part[entries[held, 0].long() // ranks] = torch.cat([dynamic.weights[held], dynamic.state[held]], 1)
        parts.append(part)
    return parts


def trained(ranks: Ranks, config: RunConfig) -> tuple[list[float], list[Tensor], list[Tensor], dict[str, Any]]:
    """Losses of each iteration, logits of an evaluation between, the rows, and the record's facts."""
    torch.set_float32_matmul_precision("highest")
    pipeline: Any = build_pipeline(config, config.pipeline, ranks)
    pipeline.warm_up(evaluates=True)
    batches = map(pipeline.prepare, drawn(config, ranks)[:STEPS])
    losses = []
    for iteration in range(STEPS):
        pipeline.set_learning_rate(config.optimizer.rate(iteration + 1))
        losses.append(pipeline.train_step(batches).item())
        if iteration == STEPS // 2:
            logits = [of for of, _ in pipeline.evaluate(map(pipeline.prepare, evaluated(config, ranks)))]
    rows, described = rows_of(pipeline, config), pipeline.describe()
    pipeline.close()
    return losses, logits, rows, described


def alike(ranks: Ranks, folder: Path, **options: Any) -> dict[str, Any]:
    static, dynamic = (
        trained(ranks, small(folder, "static", **options, **more)) for more in ({}, {"dynamic_rows": PLACES})
    )
    return {
        "losses": static[0] == dynamic[0] and len(set(static[0])) > STEPS // 2,
        "logits": all(torch.equal(*of) for of in zip(static[1], dynamic[1], strict=True)),
        "rows": all(torch.equal(*of) for of in zip(static[2], dynamic[2], strict=True)),
    } | dynamic[3]["dynamic_rows"][ranks.rank]


def all_alike(ranks: Ranks, folder: Path) -> list[dict[str, Any]]:
    """With graphs, and with lists that overflow."""
    capture_on_cpu()
    found = [alike(ranks, folder, cuda_graph="iteration", overlap=True)]
    if ranks.world_size > 1:
        without_room()
        found.append(alike(ranks, folder))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_trains_what_tables_in_full_train(run_ranks: Callable[..., list[Any]], folder: Path, world_size: int) -> None:
    for rank in run_ranks(world_size, all_alike, folder):
        for found in rank:
            assert found["losses"]
            assert found["logits"]
            assert found["rows"]
            assert found["used"] == found["made"] > 500
            assert found["evicted"] == 0


# Checkpoints

BEFORE, AFTER = 5, 4
SAMPLES = 24
"""Of a global batch, on any number of ranks."""
EVICTING = {"dynamic_rows": 400, "evict_rows": True}
Found = tuple[list[float], list[Tensor], dict[str, int]]
"""Losses of the last iterations, the rows before them, and the record's facts."""


def opened(ranks: Ranks, folder: Path, options: dict[str, Any], first: int) -> tuple[Any, RunConfig, Any]:
    """A pipeline, its configuration, and its batches from the first on."""
    config = small(folder, "static", SAMPLES // ranks.world_size, **options)
    pipeline: Any = build_pipeline(config, config.pipeline, ranks)
    return pipeline, config, map(pipeline.prepare, drawn(config, ranks)[first : BEFORE + AFTER])


def steps(pipeline: Any, batches: Any, first: int, count: int) -> list[float]:
    losses = []
    for iteration in range(first, first + count):
        pipeline.set_learning_rate(1e-3 * (iteration + 1))
        losses.append(pipeline.train_step(batches).item())
    return losses


def saves(ranks: Ranks, folder: Path, to: Path, options: dict[str, Any], in_memory: bool = False) -> Found:
    """Trains, saves and trains on. in_memory: in the form of a snapshot in memory, with all places."""
    pipeline, config, batches = opened(ranks, folder, options, 0)
    steps(pipeline, batches, 0, BEFORE)
    rows = rows_of(pipeline, config)
    blocks = pipeline.state_blocks()
    state = own_pieces(of_all_places(blocks, ranks) if in_memory else blocks, ranks.rank)
    write_state(to, state, ranks.rank, dist.new_group(backend="gloo"), lambda: None)
    later = steps(pipeline, batches, BEFORE, AFTER)
    return later, rows, pipeline.describe()["dynamic_rows"][ranks.rank]


def resumes(ranks: Ranks, folder: Path, of: Path, options: dict[str, Any]) -> Found:
    pipeline, config, batches = opened(ranks, folder, options, BEFORE)
    blocks = pipeline.state_blocks()
    read_state(of, blocks, dist.new_group(backend="gloo"))
    pipeline.take_blocks(blocks)
    pipeline.go_on_after(BEFORE, {})
    rows = rows_of(pipeline, config)
    pipeline.warm_up(evaluates=False)
    return steps(pipeline, batches, BEFORE, AFTER), rows, pipeline.describe()["dynamic_rows"][ranks.rank]


def whole(of_ranks: list[Any]) -> list[Tensor]:
    """All rows of each table, of every rank's."""
    tables = []
    for table in range(len(of_ranks[0][1])):
        parts = [rank[1][table] for rank in of_ranks]
        full = torch.zeros(sum(map(len, parts)), parts[0].shape[1])
        for rank, part in enumerate(parts):
            full[rank :: len(parts)] = part
        tables.append(full)
    return tables


def resumes_or_refuses(ranks: Ranks, folder: Path, of: Path) -> tuple[Found, list[str]]:
    """What a run with places for all rows goes on with, and the refusals of others."""
    errors = []
    for options in ({"dynamic_rows": 50}, {}):
        with pytest.raises(CheckpointError) as caught:
            resumes(ranks, folder, of, options)
        errors.append(str(caught.value))
    return resumes(ranks, folder, of, {"dynamic_rows": PLACES}), errors


def test_goes_on_with_another_number_of_ranks(
    run_ranks: Callable[..., list[Any]], folder: Path, tmp_path: Path
) -> None:
    saved = run_ranks(2, saves, folder, tmp_path, {"dynamic_rows": PLACES})
    read = run_ranks(3, resumes_or_refuses, folder, tmp_path)
    for expected, got in zip(whole(saved), whole([rank[0] for rank in read]), strict=True):
        assert expected[:, -1].any()
        assert torch.equal(expected, got)
    for _, (few, all_rows) in read:
        assert "--dynamic-rows is 50, and this rank owns" in few
        assert "is of another model" in all_rows
        assert "--dynamic-rows or no --dynamic-rows" in all_rows


def saves_and_resumes(ranks: Ranks, folder: Path, to: Path, in_memory: bool) -> tuple[Found, Found]:
    return saves(ranks, folder, to, EVICTING, in_memory), resumes(ranks, folder, to, EVICTING)


@pytest.mark.parametrize("in_memory", [False, True])
def test_goes_on_to_the_bit_while_rows_lose_their_places(
    run_ranks: Callable[..., list[Any]], folder: Path, tmp_path: Path, in_memory: bool
) -> None:
    for saved, read in run_ranks(2, saves_and_resumes, folder, tmp_path, in_memory):
        assert all(torch.equal(*of) for of in zip(saved[1], read[1], strict=True))
        assert saved[0] == read[0]
        assert saved[2]["evicted"] > read[2]["evicted"] > 20
        assert saved[2]["used"] == read[2]["used"] == EVICTING["dynamic_rows"]
