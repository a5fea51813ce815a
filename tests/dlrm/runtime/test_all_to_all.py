"""All-to-alls over nodes bring what flat ones bring."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dlrm_bench.dlrm.runtime.all_to_all import AllToAlls
from dlrm_bench.dlrm.runtime.peer_memory import Barrier, PeerMemory
from dlrm_bench.dlrm.runtime.ranks import Ranks

ROUNDS = 3

BETWEEN = Barrier("between exchanges", "the reads of one before the writes of the next")


def splits(source: int, destination: int) -> int:
    return 4 * ((3 * source + 5 * destination) % 7)


def exchange(ranks: Ranks) -> bool:
    memory, everyone = PeerMemory(ranks), range(ranks.world_size)
    assert (ranks.nodes, ranks.local_world_size) == (2, ranks.world_size // 2)
    for dtype in (torch.int32, torch.float32, torch.bfloat16):
        flat = AllToAlls(ranks, None).make(None, splits, dtype)
        nodes = AllToAlls(ranks, memory).make(Barrier(f"staged {dtype}", "chunks"), splits, dtype)
        to = sum(splits(ranks.rank, other) for other in everyone)
        of = sum(splits(other, ranks.rank) for other in everyone)
        for turn in range(ROUNDS):
            sent = (torch.arange(to, device=ranks.device) % 50 + 10 * ranks.rank + turn).to(dtype)
            got, expected = (torch.zeros(of, dtype=dtype, device=ranks.device) for _ in range(2))
            memory.barrier(BETWEEN)
            nodes.exchange(got, sent)
            flat.exchange(expected, sent)
            assert torch.equal(got, expected), f"{dtype} in turn {turn} on rank {ranks.rank}"
    return True


@pytest.mark.parametrize(("world_size", "gpu"), [(4, False), pytest.param(4, True, marks=pytest.mark.multi_gpu)])
def test_two_nodes_bring_what_one_collective_does(
    run_ranks: Callable[..., list[Any]], world_size: int, gpu: bool
) -> None:
    assert all(run_ranks(world_size, exchange, gpu=gpu, nodes=2))
