"""Memory that all ranks read and write, and the barriers between its users."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dlrm_bench.dlrm.peer_memory import PeerMemory
from dlrm_bench.dlrm.ranks import Ranks
from tests.cases import PLACES

ROUNDS = 50


def pass_on(ranks: Ranks) -> list[list[Tensor]]:
    """Each rank writes its number into a row of everybody's tensor, again and again; what it then finds in its own."""
    memory = PeerMemory(ranks)
    small, large = memory.zeros(ranks.world_size, 3, dtype=torch.bfloat16), memory.zeros(1 << 22, dtype=torch.float32)
    assert not small.own.any()
    assert not large.own.any()
    memory.barrier("read")
    found = []
    for number in range(ROUNDS):
        for tensor in small.tensors:
            tensor[ranks.rank] = 100 * ranks.rank + number
        large.tensors[(ranks.rank + 1) % ranks.world_size].fill_(number + ranks.rank)
        memory.barrier("written")
        found.append([small.own.clone(), large.own[[0, -1]]])
        memory.barrier("read")
    return [[tensor.cpu() for tensor in tensors] for tensors in found]


@pytest.mark.parametrize(("world_size", "gpu"), PLACES)
def test_what_ranks_write_is_seen_after_a_barrier(
    run_ranks: Callable[..., list[Any]], world_size: int, gpu: bool
) -> None:
    for rank, found in enumerate(run_ranks(world_size, pass_on, gpu=gpu)):
        for number, (small, large) in enumerate(found):
            rows = torch.arange(world_size) * 100 + number
            assert torch.equal(small, rows[:, None].expand(-1, 3).to(torch.bfloat16))
            assert large.tolist() == [number + (rank - 1) % world_size] * 2
