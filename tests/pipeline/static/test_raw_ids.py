"""Cross-cutting: ids of any int64, without a table size, train what their row numbers train in tables in full, to the
bit, and any number of ranks resumes their checkpoints."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dlrm_bench.bench.config import RunConfig
from dlrm_bench.dlrm.data.batch import Batch, feature_blocks
from dlrm_bench.dlrm.dcnv2 import static_schedule
from dlrm_bench.dlrm.dcnv2.config import OptimizerConfig
from dlrm_bench.dlrm.dcnv2.data.random_batches import RandomDataset
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.dlrm.tables.initial_weights import distribution, table_key
from dlrm_bench.kernels.embedding.id_map import Keys
from dlrm_bench.kernels.embedding.initial_rows import RowsOfTables, plain_initial_rows
from dlrm_bench.pipeline.checkpoint import own_pieces, read_state, write_state
from dlrm_bench.pipeline.checkpoint_index import CheckpointError
from dlrm_bench.pipeline.dynamic_state import IDS, ROWS
from dlrm_bench.pipeline.static.pipeline import StaticPipeline
from tests.cases import GPU_PLACES, WAYS
from tests.pipeline.cpu_graphs import capture_on_cpu
from tests.pipeline.static.test_tiers import CONFIG, MODEL, STEPS, batches_of
from tests.pipeline.whole_state import whole_state
from tests.pipelines import changed, static_pipeline

PLACES = 6000
NUMBERED = changed(CONFIG, presort_ids=False, constraints=("0-2=table-wise",))
RAW = changed(NUMBERED, model=replace(MODEL, raw_ids=True), dynamic_rows=PLACES)
TABLES = range(MODEL.num_features)


def some_ids(rows: Tensor) -> Tensor:
    """Ids of row numbers, int64: small ones, others with the same lower word, and negative ones to the end of int64;
    the same of every table."""
    four, which = rows.long() // 4, rows.long() % 4
    ids = torch.stack([four, four + (1 << 32), -1 - four, four - (1 << 63)])
    return ids.gather(0, which[None])[0]


def with_ids(batches: list[Batch], ids_of: Callable[[Tensor], Tensor]) -> list[Batch]:
    """The batches with these ids of their row numbers, int64."""
    found = []
    for batch in batches:
        of = Batch.empty(len(batch.labels), RAW.model, pin=batch.storage.is_pinned())
        of.dense.copy_(batch.dense)
        of.labels.copy_(batch.labels)
        of.ids.copy_(ids_of(batch.ids))
        found.append(of)
    return found


def renumbered(batches: list[Batch]) -> tuple[list[Batch], list[Tensor]]:
    """The batches with a row number in place of each raw id, in the order of a table's ids; and these ids."""
    found = [Batch.empty(len(batch.labels), MODEL, pin=batch.storage.is_pinned()) for batch in batches]
    for batch, of in zip(batches, found, strict=True):
        of.dense.copy_(batch.dense)
        of.labels.copy_(batch.labels)
    known = []
    for table in TABLES:
        blocks = [[feature_blocks(b.ids, MODEL.multi_hot_sizes)[table] for b in of] for of in (batches, found)]
        # Of all ranks, so that all number alike: every row number of the generator has its id.
        ids = some_ids(torch.arange(MODEL.num_embeddings[table])).sort().values
        for block, out in zip(*blocks, strict=True):
            out.copy_(torch.searchsorted(ids, block))
            assert torch.equal(ids[out.long()], block)
        known.append(ids)
    return found, known


def initial(table: int, ids: Tensor, seed: int) -> Tensor:
    """The weights with which rows of raw ids begin."""
    scale, bound = (torch.tensor([of]) for of in distribution(MODEL.num_embeddings[table]))
    start, nowhere = torch.tensor([table_key(seed, table)]), torch.zeros(1, dtype=torch.int64)
    of_table = RowsOfTables(nowhere, start, scale.float(), bound.float(), 0, 1)
    out, places = torch.empty(len(ids), MODEL.embedding_dim), torch.arange(len(ids), dtype=torch.int32)
    plain_initial_rows(out, places, Keys(ids, torch.zeros_like(places)), of_table)
    return out


@dataclass(frozen=True, slots=True)
class Trained:
    """What is compared, of one rank."""

    losses: Tensor
    logits: Tensor
    """Of two evaluations, each in the midst of the training."""
    rows: dict[tuple[int, int], Tensor]
    """Weights and state of each row that is not as it began, by table and id, on rank 0."""
    dense: dict[str, Tensor]
    """On rank 0."""
    described: list[dict[str, int]]


def rows_of(pipeline: StaticPipeline, known: list[Tensor] | None, seed: int) -> tuple[Any, dict[str, Tensor]]:
    """Rows by table and id, and the dense state, on rank 0. known: the id of each row; None: rows are dynamic."""
    state = whole_state(pipeline)
    kinds, found = (state.weights, state.optimizer), {}
    if known is None and IDS in state.weights:
        entries = state.weights.pop(IDS).view(torch.int32)
        weights, optimizer = (of.pop(ROWS, torch.empty(len(entries), 0)) for of in kinds)
        ids = entries[:, :2].contiguous().view(torch.int64).flatten()
        of_all = [(ids[named], weights[named], optimizer[named]) for named in (entries[:, 2] == t for t in TABLES)]
    elif known is not None and state.weights:
        keys = pipeline.dense.table_keys
        none = torch.empty(max(MODEL.num_embeddings), 0)
        of_all = [
            (known[t], state.weights.pop(keys[t]), state.optimizer.pop(keys[t], none[: len(known[t])])) for t in TABLES
        ]
    else:
        return {}, {}
    for table, (ids, weights, optimizer) in enumerate(of_all):
        assert len(ids.unique()) == len(ids), "an id has one row"
        moved = (weights != initial(table, ids, seed)).any(1).nonzero().flatten().tolist()
        for row in moved:
            found[table, int(ids[row])] = torch.cat([weights[row], optimizer[row]])
    return found, {f"{n} {key}": value for n, of in enumerate(kinds) for key, value in of.items()}


def train(ranks: Ranks, config: RunConfig, batches: list[Batch], known: list[Tensor] | None = None) -> Trained:
    """known: the id of each row of tables in full, which begin as rows of these ids do."""
    torch.set_float32_matmul_precision("highest")
    pipeline = static_pipeline(config, ranks)
    for of in pipeline.ebc.table_shards() if known is not None else ():
        of.weights.copy_(initial(of.shard.table, known[of.shard.table], config.seed))
    pipeline.warm_up(evaluates=True)
    training, losses, logits = iter(batches[:STEPS]), [], []
    for step in range(STEPS):
        losses.append(pipeline.train_step(training).clone())
        if step in (3, 8):
            logits += [values for values, _ in pipeline.evaluate(iter(batches[STEPS:]))]
    rows, dense = rows_of(pipeline, known, config.seed)
    described = pipeline.describe().get("dynamic_rows", [])
    pipeline.close()
    return Trained(torch.stack(losses).cpu(), torch.cat(logits).cpu(), rows, dense, described)


def beside_full(ranks: Ranks, **options: Any) -> tuple[Trained, Trained]:
    """Returns trainings of tables in full and of raw ids."""
    raw = with_ids(batches_of(NUMBERED, ranks, hot=0), some_ids)
    numbered, known = renumbered(raw)
    return train(ranks, changed(NUMBERED, **options), numbered, known), train(ranks, changed(RAW, **options), raw)


def check_equal(full: Trained, raw: Trained, rank: int) -> None:
    assert torch.equal(full.losses, raw.losses)
    assert torch.equal(full.logits, raw.logits)
    for of_full, of_raw in ((full.rows, raw.rows), (full.dense, raw.dense)):
        assert of_full.keys() == of_raw.keys()
        assert bool(of_full) == (rank == 0)
        for key, value in of_full.items():
            assert torch.equal(value, of_raw[key]), key  # type: ignore[index]
    for rows in raw.described:
        assert 300 < rows["used"] == rows["made"] < PLACES
        assert rows["evicted"] == 0
    if rank == 0:
        ids = torch.tensor([named for table, named in raw.rows if table == 1])
        assert min((ids < 0).sum(), (ids > 1 << 31).sum(), (ids < -(1 << 62)).sum()) > 50
        assert len(ids) - len((ids & 0xFFFFFFFF).unique()) > 50, "ids that differ in their upper words only"


def every_way(ranks: Ranks) -> dict[str, tuple[Trained, Trained]]:
    return {name: beside_full(ranks, **options) for name, options in WAYS.items()}


@pytest.mark.parametrize(("world_size", "nodes"), [(1, 1), (2, 1), (2, 2)])
def test_trains_what_row_numbers_train(run_ranks: Callable[..., list[Any]], world_size: int, nodes: int) -> None:
    for rank, of_rank in enumerate(run_ranks(world_size, every_way, nodes=nodes)):
        assert of_rank.keys() == WAYS.keys()
        for full, raw in of_rank.values():
            check_equal(full, raw, rank)


def in_order(ranks: Ranks) -> list[tuple[Trained, Trained]]:
    """By SGD; with graphs, streams and batches in two halves, through collectives and peer memory."""
    capture_on_cpu()
    found = [beside_full(ranks, optimizer=OptimizerConfig(learning_rate=0.01, embedding="sgd"))]
    static_schedule._FILLING_BATCH = 1
    for peers in (False, True):
        found.append(beside_full(ranks, presort_ids=True, cuda_graph="iteration", overlap=True, peer_memory=peers))
    return found


def test_so_do_halves_in_graphs_and_sgd(run_ranks: Callable[..., list[Any]]) -> None:
    for rank, of_rank in enumerate(run_ranks(2, in_order)):
        for full, raw in of_rank:
            check_equal(full, raw, rank)


def on_gpus(ranks: Ranks) -> list[tuple[Trained, Trained]]:
    graphs = {"presort_ids": True, "cuda_graph": "iteration", "overlap": True}
    return [beside_full(ranks, **graphs), beside_full(ranks, **graphs, peer_memory=True), beside_numbers(ranks, graphs)]


@pytest.mark.parametrize(("world_size", "gpu"), GPU_PLACES)
def test_so_do_graphs_on_gpus(run_ranks: Callable[..., list[Any]], world_size: int, gpu: bool) -> None:
    for rank, of_rank in enumerate(run_ranks(world_size, on_gpus, gpu=gpu)):
        for full, raw in of_rank[:-1]:
            check_equal(full, raw, rank)
        check_equal_while_evicting(*of_rank[-1])


def test_generated_ids_are_those_of_the_same_rows() -> None:
    """Of random batches: one raw id for each row number, which may be any int64."""
    raw, numbered = (
        next(iter(RandomDataset(of.data, of.model, of.seed).train_batches(0, 1, 64))) for of in (RAW, NUMBERED)
    )
    assert torch.equal(raw.dense, numbered.dense)
    assert raw.ids.dtype == torch.int64
    table = torch.cat([torch.full((64 * hot,), table) for table, hot in enumerate(MODEL.multi_hot_sizes)])
    pairs = torch.stack([raw.ids, table * 10_000 + numbered.ids], 1).unique(dim=0)
    assert len(pairs) == len(pairs[:, 0].unique()) == len(pairs[:, 1].unique()) > 100
    assert raw.ids.min() < -(1 << 62)
    assert raw.ids.max() > 1 << 62


# Rows that lose their places, and places that are taken

EVICTING = {"dynamic_rows": 1100, "evict_rows": True, "presort_ids": True}


def beside_numbers(ranks: Ranks, options: dict[str, Any]) -> tuple[Trained, Trained]:
    """Returns trainings of row numbers, and of the same numbers as raw ids, whose rows lose their places."""
    numbered = batches_of(NUMBERED, ranks, hot=0)
    raw = with_ids(numbered, Tensor.long)
    found = []
    for config, batches in ((changed(NUMBERED, **EVICTING), numbered), (RAW, raw)):
        found.append(train(ranks, changed(config, **EVICTING | options), batches))
    return found[0], found[1]


def check_equal_while_evicting(numbered: Trained, raw: Trained) -> None:
    assert torch.equal(numbered.losses, raw.losses)
    assert torch.equal(numbered.logits, raw.logits)
    assert numbered.rows.keys() == raw.rows.keys()
    assert all(torch.equal(value, raw.rows[key]) for key, value in numbered.rows.items())
    for of_both in zip(numbered.described, raw.described, strict=True):
        assert len({tuple(of[name] for name in ("used", "made", "evicted")) for of in of_both}) == 1
    assert max(of["evicted"] for of in raw.described) > 100


@pytest.mark.parametrize("world_size", [1, 2])
def test_row_numbers_as_raw_ids_lose_the_same_places(run_ranks: Callable[..., list[Any]], world_size: int) -> None:
    for found in run_ranks(world_size, beside_numbers, {}):
        check_equal_while_evicting(*found)


def until_refused(ranks: Ranks) -> tuple[int, str]:
    pipeline = static_pipeline(changed(RAW, dynamic_rows=900), ranks)
    training = iter(with_ids(batches_of(NUMBERED, ranks, hot=0), some_ids))
    with pytest.raises(ValueError, match="names new rows") as caught:
        list(map(pipeline.train_step, repeat(training, STEPS)))
    return pipeline._step, str(caught.value)


def test_a_batch_without_places_is_refused_on_every_rank(run_ranks: Callable[..., list[Any]]) -> None:
    one, other = run_ranks(2, until_refused)
    assert one == other
    assert 0 < one[0] < STEPS
    assert one[1].startswith("--dynamic-rows 900: a batch names new rows")


# Checkpoints

BEFORE, SAMPLES = STEPS // 2, 24
Found = tuple[Tensor, Any]
"""Losses after a checkpoint, and the rows at it."""


def opened(ranks: Ranks, **options: Any) -> tuple[StaticPipeline, list[Batch]]:
    """A pipeline, and its share of batches that are the same for any number of ranks."""
    config = changed(RAW, local_batch_size=SAMPLES // ranks.world_size, **options)
    whole = batches_of(changed(NUMBERED, local_batch_size=SAMPLES), replace(ranks, rank=0, world_size=1), hot=0)
    share = slice(ranks.rank * config.local_batch_size, (ranks.rank + 1) * config.local_batch_size)
    batches = []
    for batch in whole:
        of = Batch.empty(config.local_batch_size, MODEL)
        of.dense.copy_(batch.dense[share])
        of.labels.copy_(batch.labels[share])
        for block, own in zip(*(feature_blocks(b.ids, MODEL.multi_hot_sizes) for b in (batch, of)), strict=True):
            own.copy_(block[share])
        batches.append(of)
    return static_pipeline(config, ranks), with_ids(batches, some_ids)[:STEPS]


def saves(ranks: Ranks, folder: Path) -> Found:
    pipeline, batches = opened(ranks)
    training = iter(batches)
    for _ in range(BEFORE):
        pipeline.train_step(training)
    rows, _ = rows_of(pipeline, None, RAW.seed)
    group = dist.new_group(backend="gloo")
    write_state(folder, own_pieces(pipeline.state_blocks(), ranks.rank), ranks.rank, group, lambda: None)
    losses = torch.stack([pipeline.train_step(training).clone() for _ in range(BEFORE, STEPS)])
    pipeline.close()
    return losses, rows


def resumes(ranks: Ranks, folder: Path, **options: Any) -> Found:
    pipeline, batches = opened(ranks, **options)
    blocks = pipeline.state_blocks()
    read_state(folder, blocks, dist.new_group(backend="gloo"))
    pipeline.take_blocks(blocks)
    pipeline.go_on_after(BEFORE, {})
    rows, _ = rows_of(pipeline, None, RAW.seed)
    pipeline.warm_up(evaluates=False)
    training = iter(batches[BEFORE:])
    losses = torch.stack([pipeline.train_step(training).clone() for _ in range(BEFORE, STEPS)])
    pipeline.close()
    return losses, rows


def saves_and_resumes(ranks: Ranks, folder: Path) -> tuple[Found, Found]:
    return saves(ranks, folder), resumes(ranks, folder)


def refuses(ranks: Ranks, folder: Path) -> str:
    """The words to a run whose ids are row numbers."""
    with pytest.raises(CheckpointError) as caught:
        resumes(ranks, folder, model=MODEL)
    return str(caught.value)


def test_resumes_on_another_number_of_ranks(run_ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    same = run_ranks(2, saves_and_resumes, tmp_path)
    for saved, read in same:
        assert torch.equal(saved[0], read[0])
        assert saved[1].keys() == read[1].keys()
    saved = same[0][0]
    assert len(saved[1]) > 500
    for world_size in (1, 3):
        losses, rows = zip(*run_ranks(world_size, resumes, tmp_path), strict=True)
        assert rows[0].keys() == saved[1].keys()
        assert all(torch.equal(value, rows[0][key]) for key, value in saved[1].items())
        means = [torch.stack(of).mean(0) for of in (losses, [of[0][0] for of in same])]
        torch.testing.assert_close(means[0], means[1], rtol=1e-4, atol=1e-5)
    for said in run_ranks(2, refuses, tmp_path):
        assert "is outside its table: ids of the saved run were raw; resume with --model.raw-ids" in said


def of_many_rows(ranks: Ranks) -> float:
    """Returns the loss of a model whose tables are expected to have more rows on one rank than 31 bits count."""
    model = replace(RAW.model, num_embeddings=(10**9,) * MODEL.num_features)
    pipeline = static_pipeline(changed(RAW, model=model), ranks)
    pipeline.warm_up(evaluates=True)
    loss = pipeline.train_step(iter(with_ids(batches_of(NUMBERED, ranks, hot=0)[:2], some_ids))).item()
    pipeline.close()
    return loss


def test_expected_rows_bound_nothing(run_ranks: Callable[..., list[Any]]) -> None:
    (loss,) = run_ranks(1, of_many_rows)
    assert 0 < loss < 2
