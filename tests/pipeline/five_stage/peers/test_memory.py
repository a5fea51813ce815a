"""Peer memory: who has it, and that what a rank writes is seen by its owner after they have met."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.five_stage import reasons
from dlrm_bench.pipeline.five_stage.peers import memory
from dlrm_bench.pipeline.five_stage.peers.memory import Lane, PeerMemory, why_no_peers
from tests.pipeline.five_stage.peers.memory_on_cpu import MappedFiles

Seen = tuple[str, int, list[str], bool]
ROUNDS = 50
BOTH = ["gpu-a", "gpu-b"]
FINE: list[Seen] = [("host", 0, BOTH, True), ("host", 1, BOTH, True)]


@pytest.mark.parametrize(
    ("everyone", "access", "why"),
    [
        (FINE, True, None),
        (FINE[::-1], True, None),
        (FINE, False, reasons.PEERS_NO_ACCESS(one=0, other=1)),
        ([FINE[0], ("another", 0, BOTH, True)], True, reasons.PEERS_APART(hosts=2)),
        ([FINE[0], ("host", 1, BOTH, False)], True, reasons.PEERS_NO_TRITON(rank=1)),
        ([("host", 0, ["gpu-a"], True), ("host", 0, ["gpu-b"], True)], True, reasons.PEERS_UNSEEN()),
        ([FINE[0], FINE[0]], True, reasons.PEERS_UNSEEN()),
    ],
)
def test_gpus_of_one_machine_that_reach_each_other_have_it(
    monkeypatch: pytest.MonkeyPatch, everyone: list[Seen], access: bool, why: str | None
) -> None:
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: access)
    assert memory._why_not(everyone) == why


def on_two_machines(ranks: Ranks) -> list[str | None]:
    """What ranks with GPUs are told: on one machine, on two, alone."""
    torch.cuda.device_count = lambda: 2
    torch.cuda.get_device_properties = lambda index: SimpleNamespace(uuid=BOTH[index])  # type: ignore[assignment]
    torch.cuda.can_device_access_peer = lambda one, other: True
    world: Any = dist.group.WORLD
    device, own = torch.device("cuda", ranks.rank), dist.new_group([ranks.rank], use_local_synchronization=True)
    found = [why_no_peers(world, device)]
    memory._host = lambda: f"machine {ranks.rank}"
    return [*found, why_no_peers(world, device), why_no_peers(own, device)]


def test_all_ranks_are_told_the_same(run_ranks: Callable[..., Any]) -> None:
    assert run_ranks(2, on_two_machines) == [[None, reasons.PEERS_APART(hosts=2), reasons.PEERS_ALONE()]] * 2


def test_a_machine_has_a_name() -> None:
    assert memory._host() == memory._host() != ""


def pass_on(ranks: Ranks) -> list[list[int]]:
    """Each rank writes its number into everybody's buffers, again and again, in two lanes; returns what its own held,
    and what was wrong on the way."""
    kind = PeerMemory if ranks.device.type == "cuda" else MappedFiles
    world: Any = dist.group.WORLD
    if ranks.device.type == "cuda":
        assert why_no_peers(world, ranks.device) is None
    of, found = kind(world, ranks.device), []
    lanes: tuple[Lane, ...] = ("ids", "gradients")
    buffers = {lane: of.allocate(1 << 21) for lane in lanes}
    assert of.nbytes >= 2 << 21
    for number in range(ROUNDS):
        for lane in lanes:
            for buffer in buffers[lane]:
                buffer[ranks.rank :: ranks.world_size].fill_((number + 10 * ranks.rank) % 256)
            of.meet(lane)
            own = buffers[lane][ranks.rank].view(-1, ranks.world_size)
            found.append([*own[-1].tolist(), int((own != own[0]).sum())])
            of.meet(lane)
    of.close()
    return found


@pytest.mark.parametrize(("world_size", "gpu"), [(2, False), pytest.param(2, True, marks=pytest.mark.multi_gpu)])
def test_what_is_written_is_seen_after_a_meeting(run_ranks: Callable[..., Any], world_size: int, gpu: bool) -> None:
    for found in run_ranks(world_size, pass_on, gpu=gpu):
        expected = [[number % 256, (number + 10) % 256, 0] for number in range(ROUNDS) for _ in range(2)]
        assert found == expected
