"""Row-wise tables whose ids all ranks are sent: each id is looked up with its weight by the rank that has its row."""

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType

from dlrm_bench.pipeline.five_stage.trimmed.owned_rows import heeds_zeros, owned_rows, why_not_split

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("weighted", [False, True])
def test_each_id_counts_at_the_rank_that_has_its_row(dtype: torch.dtype, weighted: bool) -> None:
    rows, ids_of_tables, ranks = [10, 7], [10, 7], 3
    ids = torch.cat([torch.arange(n, dtype=dtype) for n in rows])
    weights = torch.rand(17) + 0.5 if weighted else None
    tables = [torch.rand(n) for n in rows]
    total = torch.zeros(17)
    for rank in range(ranks):
        local, own = owned_rows(rows, ids_of_tables, rank, ranks, CPU).local(ids, weights)
        assert local.dtype == dtype
        shards = [table[rank * block : (rank + 1) * block] for table, block in zip(tables, (4, 3), strict=True)]
        counts = torch.tensor([len(shards[0])] * 10 + [len(shards[1])] * 7)
        assert ((local >= 0) & (local < counts)).all()
        total += torch.cat([shards[0][local[:10].long()], shards[1][local[10:].long()]]) * own
    expected = torch.cat(tables) * (1 if weights is None else weights)
    assert torch.equal(total, expected)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_beyond_a_table_reach_the_bounds_check_of_the_last_rank(dtype: torch.dtype) -> None:
    """FBGEMM then warns, or raises, as in stock TorchRec: no wrong id becomes a vector of zeros in silence."""
    wrong = torch.tensor([10, 11, 12, 500, -1, -7, torch.iinfo(dtype).max], dtype=dtype)
    for rank, rows in enumerate((4, 4, 2)):
        local, own = owned_rows([10], [len(wrong)], rank, 3, CPU).local(wrong, None)
        assert own.tolist() == [float(rank == 2)] * len(wrong)
        assert bool((local >= rows).all()) == (rank == 2)
        assert bool(((local >= 0) & (local < rows)).all()) == (rank < 2)


def test_weights_that_are_integers_count_for_none() -> None:
    """As in TorchRec's kernels."""
    _, own = owned_rows([10], [4], 0, 2, CPU).local(torch.tensor([1, 7, 8, 2]), torch.tensor([5, 5, 5, 5]))
    assert own.dtype == torch.float32
    assert own.tolist() == [1, 0, 0, 1]


@pytest.mark.parametrize(("rows", "why"), [([10, 7], None), ([10, 4], "a rank has no row of one")])
def test_tables_that_have_no_row_for_some_rank(rows: list[int], why: str | None) -> None:
    assert why_not_split(rows, 3) == why


@pytest.mark.parametrize(
    ("params", "heeds"),
    [
        (None, False),
        ({"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD}, False),
        ({"optimizer": EmbOptimType.ADAM}, True),
        ({"weight_decay": 0.1}, True),
    ],
)
def test_updates_that_change_rows_of_zero_gradients(params: dict | None, heeds: bool) -> None:
    found = heeds_zeros([None, params])
    assert (found is not None) == heeds
    assert not heeds or "changes rows whose gradient is zero" in (found or "")
