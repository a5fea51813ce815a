"""Cross-cutting: tables with a share of their own in device memory train to the same bits as all rows on the device,
and have exactly that share there."""

import math
from collections.abc import Callable
from typing import Any

import pytest

from dlrm_bench.bench.config import RunConfig
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.dlrm.tables.pooled.static_ebc import StaticEBC
from dlrm_bench.dlrm.tables.tiers import tiered_rows
from tests.cases import PLACES
from tests.pipeline.static.test_tiers import CONFIG, MODEL, PEERS, STEPS, Trained, check_equal, train
from tests.pipelines import changed, static_pipeline

WISHES: tuple[tuple[str, dict[int, float]], ...] = (
    ("0.5", {1: 0.3}),
    ("0.6", {0: 0.4, 2: 0.1}),
    ("0.6", {1: 1.0, 2: 0.0}),
    ("1", {0: 0.0, 1: 0.25}),
    ("0.5", {0: 0.2, 1: 0.5, 2: 0.3}),
    ("0.5", {0: 0.0, 1: 0.0, 2: 0.0}),
)
"""--table-memory and the shares of single tables; the last but one leaves no table without a share."""


def wishing(config: RunConfig, memory: str, shares: dict[int, float]) -> RunConfig:
    words = tuple(f"{table}=hbm:{share:g}" for table, share in shares.items())
    return changed(config, table_memory=memory, constraints=words)


def rows_on_device(ebc: StaticEBC) -> list[tuple[int, int, int]]:
    """The table, the rows and the rows on the device of each of a rank's shards."""
    assert ebc._tiers is not None
    placement, start, found = ebc._tiers.placement, 0, []
    for shard in ebc.shards:
        rows = shard.rows(ebc.tables)
        on_device = int((placement.place[start : start + rows] < placement.device_rows).sum())
        found.append((shard.table, rows, on_device))
        start += rows
    return found


def watched(ranks: Ranks, config: RunConfig) -> tuple[Trained, list[list[tuple[int, int, int]]]]:
    """What is trained, and the rows on the device after every batch that is planned."""
    seen, bring = [], StaticEBC.bring_rows

    def brought(ebc: StaticEBC, *given: Any) -> None:
        bring(ebc, *given)
        seen.append(rows_on_device(ebc))

    with pytest.MonkeyPatch.context() as patch:
        if ranks.device.type != "cuda":  # where a graph could not be captured
            patch.setattr(StaticEBC, "bring_rows", brought)
        return train(ranks, config), seen


def all_wishes(ranks: Ranks) -> dict[str, list[Any]]:
    """By way: all rows on the device, and each of the wishes. FBGEMM's lookup, of collectives without tiers, adds rows
    in another order."""
    ways = {"collectives": changed(CONFIG, table_memory="1"), "peers": PEERS}
    if ranks.device.type == "cuda":
        ways = {name: changed(way, cuda_graph="iteration", overlap=True) for name, way in ways.items()}
    return {
        name: [train(ranks, way), *(watched(ranks, wishing(way, *wish)) for wish in WISHES)]
        for name, way in ways.items()
    }


@pytest.mark.parametrize(("world_size", "gpu"), PLACES)
def test_tables_have_their_share_and_train_to_equal_bits(
    run_ranks: Callable[..., list[Any]], world_size: int, gpu: bool
) -> None:
    moved = 0
    for of_rank in run_ranks(world_size, all_wishes, gpu=gpu):
        for whole, *wished in of_rank.values():
            for (_, shares), (trained, seen) in zip(WISHES, wished, strict=True):
                check_equal(trained, whole)
                for table, rows, on_device in (of for batch in seen for of in batch):
                    assert table not in shares or on_device == math.floor(shares[table] * rows)
                assert gpu or len(seen) > STEPS
                for tiers in trained.tiers:
                    moved += tiers["moved"]
                    assert tiers["misses"] == tiers["moved"] + tiers["in_place"]
                    assert bool(tiers["misses"]) == bool(tiers["host_rows"]), "of tables whose rows stay there too"
                    assert tiers["batches"] == STEPS + 1
                fixed = sum(rows for table, rows in enumerate(MODEL.num_embeddings) if shares.get(table) == 0)
                assert sum(tiers["fixed_host_rows"] for tiers in trained.tiers) >= fixed
    assert moved > 0


def refused(ranks: Ranks) -> list[str]:
    said = []
    for memory, shares in (("0.3", {0: 1.0, 1: 1.0, 2: 1.0}), ("0.001", {0: 0.0, 1: 0.3})):
        with pytest.raises(ValueError, match="--table-memory leaves rank") as raised:
            static_pipeline(wishing(PEERS, memory, shares), ranks)
        said.append(str(raised.value))
    return said


def test_shares_above_the_device_memory_are_refused_on_all_ranks(run_ranks: Callable[..., list[Any]]) -> None:
    one, other = run_ranks(2, refused)
    assert one == other
    assert "by --constraints cat_" in one[0]
    assert "or lower those shares" in one[1]
    with pytest.raises(
        ValueError, match=r"cat_0=hbm:0.5: hbm is for tables in two tiers of memory: add --table-memory"
    ):
        changed(PEERS, constraints=("0=hbm:0.5",))


def without_host_memory(ranks: Ranks) -> str:
    """The words to ranks of which each alone, but not both together, has host memory for all of its rows."""
    rows, config = sum(MODEL.num_embeddings), wishing(PEERS, "0.5", {0: 0.0, 1: 0.0, 2: 0.0})
    needed = rows * 2 * 4 * MODEL.embedding_dim
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiered_rows, "free_memory_bytes", lambda: needed)
        static_pipeline(config, ranks).close()
        patch.setattr(tiered_rows, "free_memory_bytes", lambda: needed - 1)
        with pytest.raises(ValueError, match="--table-memory") as caught:
            static_pipeline(config, ranks)
    return str(caught.value)


def test_host_memory_is_that_of_all_ranks_of_a_node(run_ranks: Callable[..., list[Any]]) -> None:
    one, other = run_ranks(2, without_host_memory)
    assert one == other
    assert one.startswith("--table-memory: rank 0: its node's ranks need 0.0 GB of host memory, but 0.0 GB are free")
