"""Cross-cutting: pooled tables whose rows are made when they are first named train what tables in full train, to the
bit, and any number of ranks resumes their checkpoints."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dlrm_bench.bench.config import RunConfig
from dlrm_bench.dlrm.data.batch import Batch
from dlrm_bench.dlrm.dcnv2 import static_schedule
from dlrm_bench.dlrm.dcnv2.config import OptimizerConfig
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.dlrm.tables.dynamic.dynamic_rows import NO_TABLE
from dlrm_bench.dlrm.tables.dynamic.memory import bytes_of
from dlrm_bench.dlrm.tables.initial_weights import fill_initial_weights
from dlrm_bench.dlrm.tables.table_memory import HEADROOM
from dlrm_bench.pipeline.checkpoint import own_pieces, read_state, write_state
from dlrm_bench.pipeline.checkpoint_index import CheckpointError
from dlrm_bench.pipeline.dynamic_state import IDS, ROWS
from dlrm_bench.pipeline.static import pipeline as static
from dlrm_bench.pipeline.static.pipeline import StaticPipeline
from tests.cases import GPU_PLACES, WAYS
from tests.pipeline.cpu_graphs import capture_on_cpu
from tests.pipeline.static.test_tiers import CONFIG, MODEL, STEPS, batches_of
from tests.pipeline.whole_state import whole_state
from tests.pipelines import changed, static_pipeline

PLACES = 6000
"""Of 13,000 rows."""
PLAIN = changed(CONFIG, presort_ids=False)


@dataclass(frozen=True, slots=True)
class Trained:
    """What is compared, of one rank."""

    losses: Tensor
    logits: Tensor
    """Of two evaluations, each in the midst of the training."""
    state: dict[str, Tensor]
    """Weights and optimizer state, tables in full, on rank 0."""
    rows: list[dict[str, int]]
    """What the record says of each rank's rows."""


def in_full(pipeline: StaticPipeline, config: RunConfig) -> dict[str, Tensor]:
    """Returns weights and optimizer state on rank 0, where rows that were not made are as they would be. Collective."""
    state = whole_state(pipeline)
    kinds = {"weights": state.weights, "optimizer": state.optimizer}
    of_all = {f"{kind} {key}": value for kind, tensors in kinds.items() for key, value in tensors.items()}
    if f"weights {IDS}" not in of_all:
        return of_all
    entries = of_all.pop(f"weights {IDS}").view(torch.int32)
    rows = {kind: of_all.pop(f"{kind} {ROWS}", None) for kind in kinds}
    for table, (key, count) in enumerate(zip(pipeline.dense.table_keys, MODEL.num_embeddings, strict=True)):
        named = entries[:, 2] == table
        ids = entries[named, 0].long()
        assert len(ids.unique()) == len(ids), "a row has one place"
        full = torch.empty(count, MODEL.embedding_dim)
        fill_initial_weights(full, seed=config.seed, table=table, num_embeddings=count)
        full[ids] = rows["weights"][named]
        of_all[f"weights {key}"] = full
        if rows["optimizer"] is not None:
            of_all[f"optimizer {key}"] = torch.zeros(count, rows["optimizer"].shape[1])
            of_all[f"optimizer {key}"][ids] = rows["optimizer"][named]
    return of_all


def train(ranks: Ranks, config: RunConfig) -> Trained:
    torch.set_float32_matmul_precision("highest")
    pipeline = static_pipeline(config, ranks)
    pipeline.warm_up(evaluates=True)
    batches = batches_of(config, ranks, hot=0)
    training, losses, logits = iter(batches[:STEPS]), [], []
    for step in range(STEPS):
        losses.append(pipeline.train_step(training).clone())
        if step in (3, 8):
            logits += [values for values, _ in pipeline.evaluate(iter(batches[STEPS:]))]
    state = in_full(pipeline, config)
    described = pipeline.describe().get("dynamic_rows", [])
    same = in_full(pipeline, config)
    assert all(torch.equal(value, same[key]) for key, value in state.items()), "describing changes nothing"
    pipeline.close()
    return Trained(torch.stack(losses).cpu(), torch.cat(logits).cpu(), state, described)


def check_equal(a: Trained, b: Trained) -> None:
    assert torch.equal(a.losses, b.losses)
    assert torch.equal(a.logits, b.logits)
    assert a.state.keys() == b.state.keys()
    for key, value in a.state.items():
        assert torch.equal(value, b.state[key]), key


def beside_full(ranks: Ranks) -> dict[str, tuple[Trained, Trained]]:
    """Returns trainings of tables in full and of dynamic rows, by way."""
    found = {}
    for name, options in WAYS.items():
        config = changed(PLAIN, **options)
        found[name] = train(ranks, config), train(ranks, changed(config, dynamic_rows=PLACES))
    return found


@pytest.mark.parametrize(("world_size", "nodes"), [(1, 1), (2, 1), (2, 2)])
def test_trains_what_tables_in_full_train(run_ranks: Callable[..., list[Any]], world_size: int, nodes: int) -> None:
    for of_rank in run_ranks(world_size, beside_full, nodes=nodes):
        assert of_rank.keys() == WAYS.keys()
        for full, dynamic in of_rank.values():
            check_equal(dynamic, full)
            assert len(dynamic.rows) == world_size
            for rows in dynamic.rows:
                assert 300 < rows["used"] == rows["made"] < PLACES, rows
                assert rows["evicted"] == 0


def beside_full_in_order(ranks: Ranks) -> dict[str, tuple[Trained, Trained]]:
    """Returns the same of other cases: by SGD, and with graphs, streams and batches in two halves."""
    capture_on_cpu()
    cases = {"sgd": changed(PLAIN, optimizer=OptimizerConfig(learning_rate=0.01, embedding="sgd"))}
    cases["halves"] = changed(PLAIN, presort_ids=True, cuda_graph="iteration", overlap=True)
    cases["halves of peers"] = changed(cases["halves"], peer_memory=True)
    found = {}
    for name, config in cases.items():
        static_schedule._FILLING_BATCH = 1 if "halves" in name else 2048
        found[name] = train(ranks, config), train(ranks, changed(config, dynamic_rows=PLACES))
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_so_do_halves_in_graphs_and_sgd(run_ranks: Callable[..., list[Any]], world_size: int) -> None:
    for of_rank in run_ranks(world_size, beside_full_in_order):
        for full, dynamic in of_rank.values():
            check_equal(dynamic, full)
            assert all(rows["used"] == rows["made"] > 300 for rows in dynamic.rows)


def update_order(ranks: Ranks, options: dict[str, Any]) -> list[tuple[Tensor, Tensor]]:
    """Returns the rows, or their places, and the bags of two steps, in the order of the update."""
    pipeline, ordered = static_pipeline(changed(PLAIN, presort_ids=True, **options), ranks), []
    training = iter(batches_of(CONFIG, ranks, hot=0)[:3])
    for _ in range(2):
        pipeline.train_step(training)
        for ids in (slot.ids for slot in pipeline._slots):
            assert ids.sorted is not None
            ordered.append((ids.sorted.ids.clone(), ids.sorted.bags.clone()))
            if ids.placed is not None:
                assert torch.equal(ids.sorted.ids, ids.placed.lookup.sort().values)
    pipeline.close()
    return ordered


def orders(ranks: Ranks) -> tuple[Any, Any]:
    return update_order(ranks, {}), update_order(ranks, {"dynamic_rows": PLACES})


def bags_of_rows(ids: Tensor, bags: Tensor) -> list[tuple[int, ...]]:
    counts = ids.unique_consecutive(return_counts=True)[1]
    return [tuple(of_row.tolist()) for of_row in bags.split(counts.tolist())]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_rows_update_adds_its_gradients_in_the_same_order(
    run_ranks: Callable[..., list[Any]], world_size: int
) -> None:
    """Rows have another order, that of their places."""
    for full, dynamic in run_ranks(world_size, orders):
        assert len(full) == len(dynamic) == 4
        for by_row, by_place in zip(full, dynamic, strict=True):
            of_rows, of_places = bags_of_rows(*by_row), bags_of_rows(*by_place)
            assert of_rows != of_places
            assert sorted(of_rows) == sorted(of_places)


def beside_full_on_gpus(ranks: Ranks) -> list[tuple[Trained, Trained]]:
    """Returns the same with graphs, of tables that lie on the same ranks; at last, of rows that lose their places,
    trainings without graphs and with them."""
    graphs = changed(CONFIG, cuda_graph="iteration", overlap=True, constraints=("0-2=table-wise",))
    configs = [graphs, changed(graphs, peer_memory=True)]
    found = [(train(ranks, config), train(ranks, changed(config, dynamic_rows=PLACES))) for config in configs]
    evicting = changed(CONFIG, **EVICTING)
    return [*found, (train(ranks, evicting), train(ranks, changed(evicting, cuda_graph="iteration", overlap=True)))]


@pytest.mark.parametrize(("world_size", "gpu"), GPU_PLACES)
def test_so_do_graphs_on_gpus(run_ranks: Callable[..., list[Any]], world_size: int, gpu: bool) -> None:
    for of_rank in run_ranks(world_size, beside_full_on_gpus, gpu=gpu):
        for full, dynamic in of_rank:
            check_equal(dynamic, full)
        assert max(rows["evicted"] for rows in of_rank[-1][1].rows) > 100


# Places that are taken


def until_refused(ranks: Ranks, options: dict[str, Any]) -> tuple[int, bool, str]:
    """Returns how many iterations train, whether the refusal of the next leaves weights and states, and its words."""
    pipeline = static_pipeline(changed(PLAIN, dynamic_rows=900, **options), ranks)
    pipeline.warm_up(evaluates=False)
    batches, said, trained = iter(batches_of(PLAIN, ranks, hot=0)), "", 0
    while not said:
        before = in_full(pipeline, PLAIN)
        try:
            pipeline.train_step(batches)
            trained += 1
        except ValueError as error:
            said = str(error)
    after = in_full(pipeline, PLAIN)
    pipeline.close()
    return trained, all(torch.equal(value, after[key]) for key, value in before.items()), said


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_batch_without_places_is_refused_on_every_rank(
    run_ranks: Callable[..., list[Any]], world_size: int, way: str
) -> None:
    found = run_ranks(world_size, until_refused, WAYS[way])
    assert 0 < found[0][0] < STEPS - 1
    assert all(of_rank[0] == found[0][0] for of_rank in found)
    assert all(unchanged for _, unchanged, _ in found)
    (said,) = {text for _, _, text in found}
    assert said.startswith("--dynamic-rows 900: a batch names new rows")


def without_memory(ranks: Ranks) -> str:
    """Returns the refusal where one rank has no room for the rows of an evaluation beside its places."""
    config = changed(PLAIN, dynamic_rows=PLACES)
    enough = int(bytes_of(PLACES, MODEL.embedding_dim, MODEL.embedding_dim) / HEADROOM) + 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(static, "device_memory_bytes", lambda of: enough if of.rank == 0 else 1 << 40)
        with pytest.raises(ValueError, match="does not fit") as caught:
            static_pipeline(config, ranks)
    return str(caught.value)


def test_memory_for_an_evaluation_is_checked_on_every_rank(run_ranks: Callable[..., list[Any]]) -> None:
    one, other = run_ranks(2, without_memory)
    assert one == other
    assert one.startswith(f"--dynamic-rows {PLACES} does not fit: rows, state and map need")


EVICTING = {"presort_ids": True, "dynamic_rows": 1100, "evict_rows": True}


def begins_anew(ranks: Ranks) -> tuple[bool, bool, dict[str, int]]:
    """Trains tables in full beside those whose rows lose their places; sets the same rows back by hand."""
    config = changed(PLAIN, presort_ids=True)
    full, evicting = static_pipeline(config, ranks), static_pipeline(changed(config, **EVICTING), ranks)
    dynamic, losses, held = evicting.ebc.dynamic, [], set()
    assert dynamic is not None
    initial = {of.shard: of.weights.clone() for of in full.ebc.table_shards()}
    ours, theirs = (iter(batches_of(config, ranks, hot=0)[:STEPS]) for _ in range(2))
    for _ in range(STEPS):
        losses.append(torch.equal(full.train_step(ours), evicting.train_step(theirs)))
        now = {(table, row) for row, _, table, _ in dynamic.entries().tolist() if table != NO_TABLE}
        for of in full.ebc.table_shards():
            gone = [row for table, row in held - now if table == of.shard.table]
            of.weights[gone], of.state[gone] = initial[of.shard][gone], 0
        held = now
    rows = in_full(full, config), in_full(evicting, config)
    return all(losses), all(torch.equal(value, rows[1][key]) for key, value in rows[0].items()), dynamic.map.describe()


@pytest.mark.parametrize("world_size", [1, 2])
def test_rows_that_lost_their_places_begin_anew(run_ranks: Callable[..., list[Any]], world_size: int) -> None:
    found = run_ranks(world_size, begins_anew)
    for losses, rows, described in found:
        assert losses
        assert rows
        assert described["used"] <= EVICTING["dynamic_rows"]
    assert max(described["evicted"] for *_, described in found) > 100


# Checkpoints

BEFORE = STEPS // 2
Found = tuple[Tensor, dict[str, Tensor], dict[str, int]]
"""Losses of the second half, the state before it, and the record's facts after it."""


def second_half(pipeline: StaticPipeline, batches: Iterator[Batch]) -> tuple[Tensor, dict[str, int]]:
    losses = torch.stack([pipeline.train_step(batches).clone() for _ in range(STEPS - BEFORE)]).cpu()
    described = pipeline.describe()["dynamic_rows"][dist.get_rank()]
    pipeline.close()
    return losses, described


def saves(ranks: Ranks, folder: Path, options: dict[str, Any], count: int = STEPS) -> Found:
    """Trains, saves and trains on; count: of its batches, after which it ends where it saves."""
    pipeline = static_pipeline(changed(PLAIN, **options), ranks)
    batches = iter(batches_of(PLAIN, ranks, hot=0)[:count])
    for _ in range(BEFORE):
        pipeline.train_step(batches)
    state = in_full(pipeline, PLAIN)
    group = dist.new_group(backend="gloo")
    write_state(folder, own_pieces(pipeline.state_blocks(), ranks.rank), ranks.rank, group, lambda: None)
    if count == BEFORE:
        pipeline.close()
        return torch.empty(0), state, {}
    losses, described = second_half(pipeline, batches)
    return losses, state, described


def resumes(ranks: Ranks, folder: Path, options: dict[str, Any]) -> Found:
    pipeline = static_pipeline(changed(PLAIN, **options), ranks)
    blocks = pipeline.state_blocks()
    read_state(folder, blocks, dist.new_group(backend="gloo"))
    pipeline.take_blocks(blocks)
    pipeline.go_on_after(BEFORE, {})
    state = in_full(pipeline, PLAIN)
    pipeline.warm_up(evaluates=False)
    losses, described = second_half(pipeline, iter(batches_of(PLAIN, ranks, hot=0)[BEFORE:STEPS]))
    return losses, state, described


def saves_and_resumes(ranks: Ranks, folder: Path, options: dict[str, Any]) -> tuple[Found, Found]:
    return saves(ranks, folder, options), resumes(ranks, folder, options)


FITTING = {"dynamic_rows": 4000}


GOES_ON = [
    *((2, False, options) for options in (FITTING, FITTING | {"presort_ids": True, "peer_memory": True}, EVICTING)),
    *(pytest.param(*place.values, EVICTING, marks=place.marks) for place in GPU_PLACES),
]


@pytest.mark.parametrize(("world_size", "gpu", "options"), GOES_ON)
def test_goes_on_to_the_bit(
    run_ranks: Callable[..., list[Any]], tmp_path: Path, world_size: int, gpu: bool, options: dict[str, Any]
) -> None:
    """While rows lose their places too, and where all places are taken when it warms up."""
    of_ranks = run_ranks(world_size, saves_and_resumes, tmp_path, options, gpu=gpu)
    for saved, read in of_ranks:
        assert torch.equal(saved[0], read[0])
        assert all(torch.equal(value, read[1][key]) for key, value in saved[1].items())
        assert saved[2]["used"] == read[2]["used"]
        assert saved[2]["evicted"] >= read[2]["evicted"]
    evicted = max(read[2]["evicted"] for _, read in of_ranks)
    assert evicted > 100 if "evict_rows" in options else evicted == 0


def ends_and_resumes(ranks: Ranks, folder: Path) -> tuple[Found, Found]:
    undisturbed = saves(ranks, folder / "midway", EVICTING)
    saves(ranks, folder / "end", EVICTING, BEFORE)
    return undisturbed, resumes(ranks, folder / "end", EVICTING)


def test_goes_on_to_the_bit_after_the_last_batch(run_ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    """Beside which no other one came: its input dist places an old one again."""
    for name in ("midway", "end"):
        (tmp_path / name).mkdir()
    of_ranks = run_ranks(2, ends_and_resumes, tmp_path)
    for undisturbed, read in of_ranks:
        assert torch.equal(undisturbed[0], read[0])
    assert max(read[2]["evicted"] for _, read in of_ranks) > 100


def resumes_or_refuses(ranks: Ranks, folder: Path) -> tuple[Found, list[str]]:
    """Returns what a run with places for all rows goes on with, and the refusals of others."""
    errors = []
    for options in ({"dynamic_rows": 50}, {}):
        with pytest.raises(CheckpointError) as caught:
            resumes(ranks, folder, options)
        errors.append(str(caught.value))
    return resumes(ranks, folder, FITTING), errors


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 3)])
def test_goes_on_with_another_number_of_ranks(
    run_ranks: Callable[..., list[Any]], tmp_path: Path, before: int, after: int
) -> None:
    saved = run_ranks(before, saves, tmp_path, FITTING)
    read = run_ranks(after, resumes_or_refuses, tmp_path)
    expected, got = saved[0][1], read[0][0][1]
    assert expected.keys() == got.keys()
    assert all(torch.equal(value, got[key]) for key, value in expected.items())
    for (losses, _, described), (few, all_rows) in read:
        assert all(math.isfinite(loss) for loss in losses)
        assert described["used"] > 100
        assert "--dynamic-rows is 50, and this rank owns" in few
        assert "--dynamic-rows or no --dynamic-rows" in all_rows
