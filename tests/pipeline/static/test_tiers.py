"""Cross-cutting: rows on two tiers of memory train to the same bits as all of them on the device."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dlrm_bench.bench.config import RunConfig
from dlrm_bench.dlrm.data.batch import Batch, feature_blocks
from dlrm_bench.dlrm.dcnv2.config import DataConfig, ModelConfig, OptimizerConfig
from dlrm_bench.dlrm.dcnv2.data.random_batches import RandomDataset
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.dlrm.tables.tiers import placement, tiered_rows
from dlrm_bench.dlrm.tables.tiers.tiered_rows import StoredRows, TieredRows
from dlrm_bench.pipeline.checkpoint import own_pieces, read_state, write_state
from dlrm_bench.pipeline.static.pipeline import StaticPipeline
from tests.cases import GPU_PLACES, PLACES
from tests.pipeline.whole_state import whole_state
from tests.pipelines import changed, run_config, static_pipeline

STEPS, EVALUATED = 12, 2
MODEL = ModelConfig(
    num_embeddings=(4500, 4300, 4200),
    multi_hot_sizes=(3, 12, 1),
    embedding_dim=16,
    dense_in_features=5,
    bottom_mlp=(16,),
    cross_layers=1,
    cross_rank=4,
    top_mlp=(8, 1),
)
"""No table to replicate."""
CONFIG = run_config(
    "static",
    preset="test",
    model=MODEL,
    data=DataConfig(source="random", random_batches=STEPS + EVALUATED),
    optimizer=OptimizerConfig(learning_rate=0.01),
    iterations=STEPS,
    warmup_iterations=0,
    precision="fp32",
    local_batch_size=16,
    presort_ids=True,
)
PEERS = changed(CONFIG, peer_memory=True)
SHARES = ("0.05", "0.5", "0.95")


@dataclass(frozen=True, slots=True)
class Trained:
    """What is compared, of one rank."""

    losses: Tensor
    logits: Tensor
    """Of two evaluations, each in the midst of the training."""
    state: dict[str, Tensor]
    """Weights and optimizer state, on rank 0."""
    tiers: list[dict[str, Any]]


def batches_of(config: RunConfig, ranks: Ranks, hot: int) -> list[Batch]:
    """Returns the batches to train on, and to evaluate. hot: all ids are below it, so that consecutive batches name the
    same rows; 0 leaves them."""
    data = RandomDataset(config.data, config.model, config.seed)
    batches = list(
        islice(
            data.train_batches(ranks.rank, ranks.world_size, config.local_batch_size, pin=ranks.device.type == "cuda"),
            config.data.random_batches,
        )
    )
    for batch in batches if hot else ():
        for number, block in enumerate(feature_blocks(batch.ids, MODEL.multi_hot_sizes)):
            block.copy_(MODEL.num_embeddings[number] - 1 - block % hot)  # which begin in host memory
    return batches


def train(ranks: Ranks, config: RunConfig, hot: int = 0, bad: int | None = None) -> Trained:
    """bad: the number of a batch with a dense feature that is not finite, on the last rank."""
    torch.set_float32_matmul_precision("highest")
    pipeline = static_pipeline(config, ranks)
    pipeline.warm_up(evaluates=True)
    batches = batches_of(config, ranks, hot)
    if bad is not None and ranks.rank == ranks.world_size - 1:
        batches[bad].dense[0, 0] = math.nan
    training, losses, logits = iter(batches[:STEPS]), [], []
    for step in range(STEPS):
        losses.append(pipeline.train_step(training).clone())
        if step in (3, 8):
            logits += [values for values, _ in pipeline.evaluate(iter(batches[STEPS:]))]
    state = whole_state(pipeline)
    described = pipeline.describe()
    same = whole_state(pipeline)
    kinds = {"weights": state.weights, "optimizer": state.optimizer}
    for kind, tensors in kinds.items():
        for key, value in tensors.items():
            assert torch.equal(getattr(same, kind)[key], value), "describing changes nothing"
    pipeline.close()
    of_all = {f"{kind} {key}": value for kind, tensors in kinds.items() for key, value in tensors.items()}
    return Trained(torch.stack(losses).cpu(), torch.cat(logits).cpu(), of_all, described.get("table_tiers", []))


def check_equal(a: Trained, b: Trained) -> None:
    assert torch.equal(a.losses.nan_to_num(7), b.losses.nan_to_num(7))
    assert torch.equal(a.logits, b.logits)
    assert a.state.keys() == b.state.keys()
    for key, value in a.state.items():
        assert torch.equal(value, b.state[key]), key


def shares(ranks: Ranks) -> dict[str, dict[str, Trained]]:
    """Returns what each share trains, by way and share; "all" and "1" have all rows on the device."""
    collectives, peers = CONFIG, PEERS
    if ranks.device.type == "cuda":
        collectives, peers = (changed(way, cuda_graph="iteration", overlap=True) for way in (CONFIG, PEERS))
    few = ("1", *SHARES) if ranks.world_size == 1 else ("1", "0.5")
    many = SHARES if ranks.world_size > 1 else ()
    return {
        "collectives": {share: train(ranks, changed(collectives, table_memory=share)) for share in few},
        "peers": {share: train(ranks, changed(peers, table_memory=share)) for share in many}
        | {"all": train(ranks, peers)},
    }


@pytest.mark.parametrize(("world_size", "gpu"), PLACES)
def test_every_share_trains_to_equal_bits(run_ranks: Callable[..., list[Any]], world_size: int, gpu: bool) -> None:
    for of_rank in run_ranks(world_size, shares, gpu=gpu):
        for of_way, all_rows in ((of_rank["collectives"], "1"), (of_rank["peers"], "all")):
            for share in of_way.keys() - {all_rows}:
                check_equal(of_way[share], of_way[all_rows])
                for tiers in of_way[share].tiers:
                    rows = tiers["device_rows"] + tiers["host_rows"]
                    assert tiers["device_rows"] == int(float(share) * rows)
                    assert tiers["misses"] == tiers["moved"] + tiers["in_place"] > 0
                    assert tiers["batches"] == STEPS + 1
        if world_size == 1 and not gpu:  # where both exchange dense gradients alike
            check_equal(of_rank["collectives"]["1"], of_rank["peers"]["all"])


def hazards(ranks: Ranks) -> dict[str, list[Trained]]:
    """Returns trainings with rows that consecutive batches repeat, and with windows of one row or two, and of all."""
    results: dict[str, list[Trained]] = {}
    of_batches, peers = placement.Pool.of_batches, PEERS
    if ranks.device.type == "cuda":
        peers = changed(PEERS, cuda_graph="iteration", overlap=True)
    for name, hot, share in (("repeated", 40, "0.5"), ("few", 150, "0.02"), ("uniform", 0, "0.3")):
        results[name] = [train(ranks, peers, hot)]
        for window in (1, 2, 10_000):

            def of_window(*args: Any, most: int = window) -> placement.Pool:
                usual = of_batches(*args)
                guests = min(usual.device_rows - 1, 2 * most)
                return replace(usual, guests=guests, window=min(guests, most))

            placement.Pool.of_batches = of_window  # type: ignore[assignment, method-assign]
            results[name].append(train(ranks, changed(peers, table_memory=share), hot))
    return results


@pytest.mark.parametrize(("world_size", "gpu"), [(2, False), *GPU_PLACES])
def test_repeated_rows_and_windows_that_overflow_train_to_equal_bits(
    run_ranks: Callable[..., list[Any]], world_size: int, gpu: bool
) -> None:
    """On GPUs rows move while the batch before them trains."""
    for of_rank in run_ranks(world_size, hazards, gpu=gpu):
        for name, (whole, *tiered) in of_rank.items():
            for trained in tiered:
                check_equal(trained, whole)
            small, _, large = (trained.tiers[0] for trained in tiered)
            assert small["in_place"] > large["in_place"], name
            assert small["moved"] <= STEPS + 1, "one row a batch"
        assert of_rank["repeated"][-1].tiers[0]["misses"] < of_rank["repeated"][1].tiers[0]["misses"], "rows stay"


def stopped_and_deferred(ranks: Ranks) -> dict[str, list[Trained]]:
    """Returns trainings that a loss stops, and some whose rows all come as late as they may."""
    tiered = changed(PEERS, table_memory="0.3")
    results = {
        "stopped": [train(ranks, PEERS, bad=5), train(ranks, tiered, bad=5)],
        "deferred": [train(ranks, PEERS)],
    }
    bring, bring_late = TieredRows.bring, TieredRows.bring_late
    exchange = tiered_rows.exchange_rows
    waiting: list[tuple[Any, ...]] = []

    def plan_only(rows: TieredRows, sorted_rows: Tensor) -> None:
        tiered_rows.exchange_rows = lambda *call: waiting.append(call)
        bring(rows, sorted_rows)
        tiered_rows.exchange_rows = exchange

    def bring_all(rows: TieredRows) -> None:
        for call in waiting:
            exchange(*call)
        waiting.clear()
        bring_late(rows)

    TieredRows.bring, TieredRows.bring_late = plan_only, bring_all  # type: ignore[method-assign]
    results["deferred"].append(train(ranks, tiered))
    return results


def test_a_loss_stops_rows_on_both_tiers_and_moves_may_come_late(run_ranks: Callable[..., list[Any]]) -> None:
    results = run_ranks(2, stopped_and_deferred)
    assert results[1]["stopped"][1].losses.isnan().any()
    for of_rank in results:
        for whole, tiered in of_rank.values():
            check_equal(tiered, whole)
        stopped = of_rank["stopped"][1]
        assert stopped.tiers[0]["moved"] > 0
        assert all(value.isfinite().all() for value in stopped.state.values())


def resumed(ranks: Ranks, folder: Path) -> tuple[Tensor, list[Tensor], list[dict[str, Tensor]]]:
    """Trains, saves half-way, and resumes in other shares, of single tables too; returns losses of the second half and
    states."""
    torch.set_float32_matmul_precision("highest")
    batches, half, group = batches_of(PEERS, ranks, 0), STEPS // 2, dist.new_group(backend="gloo")

    def second_half(pipeline: StaticPipeline, training: Iterator[Batch]) -> tuple[Tensor, dict[str, Tensor]]:
        losses = torch.stack([pipeline.train_step(training).clone() for _ in range(half)]).cpu()
        state = whole_state(pipeline)
        pipeline.close()
        return losses, state.weights | {f"state of {key}": value for key, value in state.optimizer.items()}

    saved = static_pipeline(changed(PEERS, table_memory="0.3"), ranks)
    training = iter(batches[:STEPS])
    for _ in range(half):
        saved.train_step(training)
    write_state(folder, own_pieces(saved.state_blocks(), ranks.rank), ranks.rank, group, lambda: None)
    results = [second_half(saved, training)]
    for share, own in (("0.8", ()), (None, ()), ("0.6", ("0=hbm:0", "1=hbm:0.3"))):
        pipeline = static_pipeline(changed(PEERS, table_memory=share, constraints=own), ranks)
        blocks = pipeline.state_blocks()
        read_state(folder, blocks, group)
        pipeline.take_blocks(blocks)
        results.append(second_half(pipeline, iter(batches[half:STEPS])))
    first, *others = results
    return first[0], [losses for losses, _ in others], [state for _, state in results]


@pytest.mark.parametrize(("world_size", "gpu"), [(2, False), *GPU_PLACES])
def test_checkpoints_hold_both_tiers_and_resume_in_another_share(
    run_ranks: Callable[..., list[Any]], tmp_path: Path, world_size: int, gpu: bool
) -> None:
    """Threads copy rows of both tiers, on GPUs by kernels on streams of their own."""
    for losses, others, states in run_ranks(world_size, resumed, tmp_path, gpu=gpu):
        assert all(torch.equal(losses, other) for other in others)
        for state in states[1:]:
            assert state.keys() == states[0].keys()
            assert all(torch.equal(value, states[0][key]) for key, value in state.items())


def refusals(ranks: Ranks) -> list[str]:
    """Returns the errors of configurations that cannot train."""
    said = []
    for config in (changed(PEERS, table_memory="0.0001"), changed(PEERS, table_memory="0.000000001GB")):
        with pytest.raises(ValueError, match="--table-memory") as raised:
            static_pipeline(config, ranks)
        said.append(str(raised.value))
    return said


def test_too_small_a_share_is_refused_on_all_ranks(run_ranks: Callable[..., list[Any]]) -> None:
    one, other = run_ranks(2, refusals)
    assert one == other
    assert "rank 0 0 of" in one[0]
    with pytest.raises(ValueError, match="--table-memory needs --presort-ids"):
        changed(CONFIG, presort_ids=False, table_memory="0.5")
    with pytest.raises(ValueError, match="--table-memory 2 is neither a share"):
        changed(CONFIG, table_memory="2")


def filled(ranks: Ranks) -> list[dict[str, Tensor]]:
    """Returns the initial weights of tables, those in tiers filled in several pieces, and of tables without tiers."""
    pieces, weights = StoredRows.pieces, []
    with patch.object(StoredRows, "pieces", lambda rows: pieces(rows, 100)):
        for share in ("0.3", None):
            pipeline = static_pipeline(changed(PEERS, table_memory=share), ranks)
            weights.append(whole_state(pipeline).weights)
            pipeline.close()
    return weights


def test_every_piece_of_a_table_has_the_weights_of_its_rows(run_ranks: Callable[..., list[Any]]) -> None:
    for tiered, whole in run_ranks(2, filled):
        assert tiered.keys() == whole.keys()
        assert all(torch.equal(value, whole[key]) for key, value in tiered.items())
