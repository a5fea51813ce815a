"""DLRMv4 on rows that are made when they are first named: what tables in full train, to the bit, and checkpoints that
go on with any number of ranks."""

from collections.abc import Callable
from dataclasses import replace
from itertools import islice
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
from dlrm_bench.pipeline.checkpoint import read_state, write_state
from dlrm_bench.pipeline.checkpoint_index import CheckpointError
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


def both(ranks: Ranks, folder: Path, tight: bool) -> dict[str, Any]:
    if tight:
        without_room()
    else:
        capture_on_cpu()
    options = {} if tight else {"cuda_graph": "iteration", "overlap": True}
    static, dynamic = (
        trained(ranks, small(folder, "static", **options, **more)) for more in ({}, {"dynamic_rows": PLACES})
    )
    return {
        "losses": static[0] == dynamic[0] and len(set(static[0])) > STEPS // 2,
        "logits": all(torch.equal(*of) for of in zip(static[1], dynamic[1], strict=True)),
        "rows": all(torch.equal(*of) for of in zip(static[2], dynamic[2], strict=True)),
    } | dynamic[3]["dynamic_rows"][ranks.rank]


@pytest.mark.parametrize(("world_size", "tight"), [(1, False), (2, False), (2, True)])
def test_trains_what_tables_in_full_train(
    run_ranks: Callable[..., list[Any]], folder: Path, world_size: int, tight: bool
) -> None:
    for rank in run_ranks(world_size, both, folder, tight):
        assert rank["losses"]
        assert rank["logits"]
        assert rank["rows"]
        assert rank["used"] == rank["made"] > 500
        assert rank["evicted"] == 0
