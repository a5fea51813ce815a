"""Matrices of rows on two tiers read and write what one matrix would."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.distributed as dist

from dlrm_bench.dlrm.tables.tiers import tiered_rows
from dlrm_bench.dlrm.tables.tiers.placement import Pool
from dlrm_bench.dlrm.tables.tiers.tiered_rows import TieredRows

CPU = torch.device("cpu")
POOLS = [Pool(rows=(range(50),), ids=(range(5),), device_rows=20, guests=8, window=4)]
NONE = np.zeros(50, np.float32)


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_matrices_are_read_and_written_in_the_order_of_rows_while_rows_move() -> None:
    rows = TieredRows(POOLS, 16, CPU, NONE)
    values = torch.rand(40, 2, 16)
    weights, state = rows.of_table(10, 40)
    weights.copy_(values[:, 0])
    state.copy_(values[:, 1])
    for batch in ([30, 40, 45], [31, 40, 45], [32, 33, 34, 45, 49]):
        rows.bring(torch.tensor(batch, dtype=torch.int32))
        rows.bring_late()
        assert torch.equal(weights.clone(), values[:, 0])
        assert torch.equal(state[3:38:5, 4:12].clone(), values[3:38:5, 1, 4:12])
    assert not rows.of_table(0, 10)[0].clone().any(), "another table's"
    part = weights[5:30][2:9, 3:5]
    assert (part.shape, part.numel(), part.device) == ((7, 2), 14, CPU)
    part.copy_(torch.full((7, 2), 9.0))
    values[7:14, 0, 3:5] = 9
    assert torch.equal(weights.clone(), values[:, 0])
    assert torch.equal(torch.cat([piece.clone() for _, piece in state.pieces(100)]), values[:, 1])
    assert rows.describe()["moved"] == 8


def test_memory_that_cannot_be_had_is_an_error_of_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: object) -> None:
        raise OSError("30 GB of host memory are needed, 2.0 GB are free")

    monkeypatch.setattr(tiered_rows, "host_zeros", no_memory)
    with pytest.raises(ValueError, match=r"--table-memory: rank 0: 30 GB of host memory are needed"):
        TieredRows(POOLS, 16, CPU, NONE)
