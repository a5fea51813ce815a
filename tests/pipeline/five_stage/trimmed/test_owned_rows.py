"""Row-wise tables whose ids all ranks are sent: each id is looked up with its weight by the rank that has its row."""

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType

from dlrm_bench.pipeline.five_stage.trimmed.owned_rows import owned_rows, why_not_all

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


@pytest.mark.parametrize(
    ("rows", "params", "why"),
    [
        ([10, 7], None, None),
        ([10, 7], {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD}, None),
        ([10, 4], {"optimizer": EmbOptimType.EXACT_ADAGRAD}, "a rank has no row of one"),
        ([10, 7], {"optimizer": EmbOptimType.ADAM}, "changes rows whose gradient is zero"),
        ([10, 7], {"weight_decay": 0.1}, "changes rows whose gradient is zero"),
    ],
)
def test_tables_that_cannot_be_looked_up_so(rows: list[int], params: dict | None, why: str | None) -> None:
    found = why_not_all(rows, 3, [params])
    assert found is None if why is None else why in (found or "")
