"""Memory that all ranks read and write, and the barriers between its users."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dlrm_bench.dlrm.runtime.peer_memory import Barrier, PeerMemory, _register_nothing
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.five_stage.cuda_graph import record
from tests.cases import PLACES

ROUNDS = 50
READ = Barrier("read", "reads before the next writes")
WRITTEN = Barrier("written", "writes before reads")


def pass_on(ranks: Ranks) -> list[list[Tensor]]:
    """Each rank writes its number into a row of everybody's tensor, again and again; returns the rank's own tensors."""
    memory = PeerMemory(ranks)
    small, large = memory.zeros(ranks.world_size, 3, dtype=torch.bfloat16), memory.zeros(1 << 22, dtype=torch.float32)
    assert not small.own.any()
    assert not large.own.any()
    memory.barrier(READ)
    found = []
    for number in range(ROUNDS):
        for tensor in small.tensors:
            tensor[ranks.rank] = 100 * ranks.rank + number
        large.tensors[(ranks.rank + 1) % ranks.world_size].fill_(number + ranks.rank)
        memory.barrier(WRITTEN)
        found.append([small.own.clone(), large.own[[0, -1]]])
        memory.barrier(READ)
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


def exchange_in_a_graph(ranks: Ranks) -> bool:
    """An all-to-all from peer memory to memory of PyTorch's, of messages so long that NCCL would register them."""
    _register_nothing()
    memory, group, size = PeerMemory(ranks), ranks.new_group(), 1 << 20
    sent = memory.zeros(ranks.world_size * size, dtype=torch.int32).own
    received = torch.zeros_like(sent)

    def exchange() -> None:
        dist.all_to_all_single(received, sent, group=group)

    exchange()
    graph = record(exchange, stream=torch.cuda.Stream())
    for turn in range(3):
        sent.copy_(torch.arange(len(sent)) + ranks.rank * len(sent) + turn)
        graph.replay()
        torch.cuda.synchronize()
        for source, chunk in enumerate(received.view(ranks.world_size, size)):
            first = source * len(sent) + ranks.rank * size + turn
            assert torch.equal(chunk.cpu(), torch.arange(first, first + size, dtype=torch.int32))
        dist.barrier()
    return True


@pytest.mark.multi_gpu
def test_a_graph_sends_from_peer_memory(run_ranks: Callable[..., list[Any]]) -> None:
    assert all(run_ranks(2, exchange_in_a_graph, gpu=True))


def test_what_would_hang_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", "0")  # what it was comes back after the test
    monkeypatch.delenv("NCCL_GRAPH_REGISTER")
    _register_nothing()
    assert os.environ["NCCL_GRAPH_REGISTER"] == "0"
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", "1")
    with pytest.raises(ValueError, match="NCCL_GRAPH_REGISTER=1 graphs of exchanges can hang"):
        _register_nothing()
