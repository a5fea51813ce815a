"""Plans: nothing lost, nothing twice, one width a rank."""

import pytest

from dlrm_bench.dlrm.config import ModelConfig
from dlrm_bench.dlrm.tables.plan.plan import Plan, Shard


def model_of(rows: list[int], hot: list[int], dim: int = 32) -> ModelConfig:
    return ModelConfig(
        num_embeddings=tuple(rows), multi_hot_sizes=tuple(hot), embedding_dim=dim, bottom_mlp=(dim,), top_mlp=(8, 1)
    )


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        ([(0, 0, 0, 32)], r"rank 1 holds shards of widths \[\]"),
        ([(0, 0, 0, 32), (0, 1, 0, 16), (1, 1, 16, 16)], r"rank 0 holds shards of widths \[16, 32\]"),
        ([(0, 0, 0, 32), (1, 1, 16, 16)], "table 1 has a gap or an overlap at column 0"),
        ([(0, 0, 0, 16), (0, 0, 0, 16), (1, 1, 0, 32)], "table 0 has a gap or an overlap in the rows of column 0"),
        ([(0, 0, 0, 32), (1, 1, 0, 16)], "table 1 has 16 of 32 columns"),
        ([(0, 0, 0, 32), (1, 0, 0, 32)], "table 0 has a gap or an overlap in the rows of column 0"),
        ([(0, 0, 0, 32, 0, 2), (1, 1, 0, 32)], "table 0 has a gap or an overlap in the rows of column 0"),
        ([(0, 0, 0, 32, 0, 2), (0, 0, 0, 32, 1, 3), (1, 1, 0, 32)], "an overlap in the rows of column 0"),
    ],
)
def test_bad_plans_are_refused(shards, message):
    with pytest.raises(ValueError, match=message):
        Plan(world_size=2, shards=tuple(Shard(*s) for s in shards)).check(model_of([100, 100], [1, 1]))
