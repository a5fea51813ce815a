"""The rows of one rank: every row of every table has one owner, and the weights of the whole table."""

import pytest
import torch

from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.dlrm.tables.initial_weights import fill_initial_weights
from dlrm_bench.dlrm.tables.sequence.owned_rows import OwnedRows
from dlrm_bench.dlrm.tables.tables import Tables

TABLES = Tables(names=("item", "artist", "user"), rows=(50, 2, 9), columns=16, hot=(1, 1, 1))


def ranks_of(rank: int, world_size: int) -> Ranks:
    device = torch.device("cpu")
    return Ranks(rank=rank, local_rank=rank, world_size=world_size, local_world_size=world_size, device=device)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_parts_make_up_the_tables(world_size: int) -> None:
    whole = [torch.full((rows, 16), float("nan")) for rows in TABLES.rows]
    for rank in range(world_size):
        owned = OwnedRows(TABLES, ranks_of(rank, world_size), seed=5)
        assert owned.numbers.count == sum(-(-rows // world_size) for rows in TABLES.rows)
        for shard in owned.shards():
            whole[shard.table][shard.row_part :: shard.row_parts] = shard.weights
            assert shard.state.shape == (len(shard.weights), 1)
            first = owned.numbers.first_rows[shard.table]
            assert torch.equal(owned.weights[first : first + len(shard.weights)], shard.weights)
    for table, weights in enumerate(whole):
        expected = torch.empty_like(weights)
        fill_initial_weights(expected, seed=5, table=table, num_embeddings=len(weights))
        assert torch.equal(weights, expected)


def test_more_rows_than_31_bits_number_are_refused() -> None:
    tables = Tables(names=("a", "b"), rows=(2**30, 2**30), columns=1, hot=(1, 1))
    with pytest.raises(ValueError, match=r"2147483648 rows in all.* 31 bits: choose tables of fewer rows"):
        OwnedRows(tables, ranks_of(0, 4), seed=1)
