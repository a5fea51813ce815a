"""Exchanges through peer memory: what collectives give, bit by bit, launch after launch, in graphs too."""

import random
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.five_stage import reasons
from dlrm_bench.pipeline.five_stage.cuda_graph import record
from dlrm_bench.pipeline.five_stage.peers.exchanges import Peers
from dlrm_bench.pipeline.five_stage.trimmed.static_dist import AllToAll
from tests.cases import GPU_PLACES
from tests.pipeline.cpu_graphs import Checked
from tests.pipeline.five_stage.peers.memory_on_cpu import module_of, peers_of

LAUNCHES, REPLAYS, LARGE = 6, 300, 1 << 19
PLACES = [(2, False), (3, False), GPU_PLACES[1]]


def splits_of(ranks: Ranks, rows: Callable[[int, int], int]) -> tuple[list[int], list[int]]:
    """What this rank sends and receives. rows: from one rank to another."""
    everyone = range(ranks.world_size)
    return [rows(ranks.rank, other) for other in everyone], [rows(other, ranks.rank) for other in everyone]


def sources(ranks: Ranks, rows: int, seed: int) -> Iterator[Tensor]:
    """Ids, ids with the bits of their weights, and words of messages."""
    draw = torch.Generator().manual_seed(100 * seed + ranks.rank)
    yield torch.randint(0, 1 << 40, (rows,), generator=draw)
    yield torch.randint(0, 1 << 40, (rows, 3), generator=draw)
    yield torch.randint(0, 255, (rows, 10), generator=draw, dtype=torch.uint8)
    yield torch.randint(0, 1 << 30, (rows,), generator=draw, dtype=torch.int32)


ROWS: list[Callable[[int, int], int]] = [
    lambda source, to: 8 * (to + 1),  # as of declared sizes: alike from all ranks
    lambda source, to: 3 * source + 2 * to,  # none within rank 0
    lambda source, to: 5 if to == 0 else 0,
]


def all_to_alls(ranks: Ranks) -> dict[str, Any]:
    """Several in a launch, of every kind of rows; some are alike in all but what they send."""
    one, other = module_of(ranks), module_of(ranks)
    peers = peers_of(ranks, one=one, other=other)
    for launch in range(LAUNCHES):
        for rows in ROWS:
            sent, received = splits_of(ranks, rows)
            made = [*sources(ranks, sum(sent), launch), *sources(ranks, sum(sent), launch + 50)]
            made = [source.to(ranks.device) for source in made]
            of_modules = [one, other, one, one, one, other, one, one]
            by_collective = [AllToAll.start(of, sent, received, one.rank_group).wait() for of in made]
            with peers.at(launch % 2):
                started = [
                    AllToAll.start(of, sent, received, module.rank_group)
                    for of, module in zip(made, of_modules, strict=True)
                ]
                for ours, theirs in zip(started, by_collective, strict=True):
                    assert torch.equal(ours.wait(), theirs)
            assert one.rank_group.start is None
    assert peers.nbytes > 0
    return peers.describe()


@pytest.mark.parametrize(("world_size", "gpu"), PLACES)
def test_all_to_alls_give_what_the_collective_gives(run_ranks: Callable[..., Any], world_size: int, gpu: bool) -> None:
    for described in run_ranks(world_size, all_to_alls, gpu=gpu):
        assert described == {"through": ["ids of one", "ids of other"], "by_nccl": {}}


def means(ranks: Ranks) -> dict[str, Any]:
    peers, described = peers_of(ranks), {}
    for launch in range(LAUNCHES):
        draw = torch.Generator().manual_seed(100 * launch + ranks.rank)
        flats = [
            torch.randn(count, generator=draw).to(ranks.device, dtype)
            for count, dtype in ((96, torch.float32), (4096, torch.bfloat16), (64, torch.float64), (1, torch.float32))
        ]
        before = [flat.clone() for flat in flats]
        with peers.at(launch % 2):
            left = peers.mean(flats)
        assert [id(flat) for flat in left] == [id(flats[2])]
        assert torch.equal(left[0], before[2])
        for ours, flat in zip(flats, before, strict=True):
            if ours is left[0]:
                continue
            everyone = [torch.empty_like(flat) for _ in range(ranks.world_size)]
            dist.all_gather(everyone, flat)
            assert torch.equal(ours, mean_of(everyone))
            if ranks.world_size == 2:
                if ranks.device.type == "cuda":
                    dist.all_reduce(flat, dist.ReduceOp.AVG)
                else:
                    dist.all_reduce(flat.div_(2))
                assert torch.equal(ours, flat)
        described = peers.describe()
    return described


def mean_of(everyone: list[Tensor]) -> Tensor:
    """In rank order, in fp32, rounded once."""
    first, *others = (flat.float() * (1 / len(everyone)) for flat in everyone)
    for other in others:
        first = first + other
    return first.to(everyone[0].dtype)


@pytest.mark.parametrize(("world_size", "gpu"), PLACES)
def test_means_are_in_rank_order(run_ranks: Callable[..., Any], world_size: int, gpu: bool) -> None:
    """Of two ranks they are the collective's, bit by bit."""
    for described in run_ranks(world_size, means, gpu=gpu):
        assert described["through"] == ["dense gradients"]
        assert described["by_nccl"] == {"dense gradients, torch.float64": reasons.PEERS_DTYPE(dtype=torch.float64)}


def large(ranks: Ranks) -> dict[str, Any]:
    peers, flat = peers_of(ranks), torch.ones(LARGE // 4)
    with peers.at(0):
        assert peers.mean([flat]) == ([flat] if ranks.world_size > 2 else [])
    return peers.describe()["by_nccl"]


def test_large_gradients_of_many_ranks_are_left_to_nccl(run_ranks: Callable[..., Any]) -> None:
    assert run_ranks(2, large) == [{}] * 2
    why = reasons.PEERS_LARGE(bytes=LARGE, most=LARGE, ranks=3)
    assert run_ranks(3, large) == [{"dense gradients, torch.float32": why}] * 3


def meetings(ranks: Ranks) -> list[list[str]]:
    """The lanes that meet, in a launch each: of several exchanges before a wait, and of waits in between."""
    module = module_of(ranks)
    peers, found = peers_of(ranks, module=module), []
    sent = torch.arange(4, device=ranks.device)
    for several in (True, False):
        met: list[str] = []
        with patch.object(peers._memory, "meet", met.append), peers.at(0):
            pair = [AllToAll.start(sent, [2, 2], [2, 2], module.rank_group) for _ in range(2 if several else 1)]
            for one in pair:
                one.wait()
                one.wait()
            if not several:
                AllToAll.start(sent, [2, 2], [2, 2], module.rank_group).wait()
            peers.mean([torch.ones(4, device=ranks.device)])
        found.append(met)
    with pytest.raises(AssertionError, match="what was sent was waited for"), peers.at(0):
        AllToAll.start(sent, [2, 2], [2, 2], module.rank_group)
    return found


def test_a_lane_meets_once_for_all_that_it_has_written(run_ranks: Callable[..., Any]) -> None:
    assert run_ranks(2, meetings) == [[["ids", "gradients"], ["ids", "ids", "gradients"]]] * 2


class Launch:
    """One launch: an all-to-all of what changes with every launch, and a mean; counts on the device what is wrong."""

    def __init__(self, ranks: Ranks, rows: int) -> None:
        self._module = module_of(ranks)
        self.peers: Peers = peers_of(ranks, module=self._module)
        self._splits = [rows] * ranks.world_size
        everyone, device = torch.arange(ranks.world_size), ranks.device
        self._number = torch.zeros((), dtype=torch.int64, device=device)
        # Rank s sends rank t: 1000 * launch + 10 * s + t.
        self._to = (10 * ranks.rank + everyone).repeat_interleave(rows).to(device)
        self._from = (10 * everyone + ranks.rank).repeat_interleave(rows).to(device)
        self._flat = torch.zeros(rows, device=device)
        self._mine, self._mean = float(ranks.rank), sum(range(ranks.world_size)) / ranks.world_size
        self.wrong = torch.zeros((), dtype=torch.int64, device=device)

    def __call__(self, turn: int) -> None:
        self._number += 1
        with self.peers.at(turn):
            sent = self._to + 1000 * self._number
            on_the_way = AllToAll.start(sent, self._splits, self._splits, self._module.rank_group)
            self._flat.fill_(self._mine).add_(self._number)
            assert self.peers.mean([self._flat]) == []
            self.wrong += (on_the_way.wait() != self._from + 1000 * self._number).sum()
            self.wrong += (self._flat != self._mean + self._number).sum()


def replays(ranks: Ranks, rows: int) -> tuple[int, int]:
    """How much was wrong, and the number of launches. Ranks are late in turn, before a launch and after it."""
    launch, turns = Launch(ranks, rows), (0, 1)
    for turn in turns:  # the rehearsals
        launch(turn)
    graphs = [record(lambda turn=turn: launch(turn)) for turn in turns]
    late = random.Random(ranks.rank)
    for number in range(REPLAYS):
        if late.random() < 0.3:
            torch.cuda._sleep(late.randrange(1, 400_000))
        graphs[number % 2].replay()
    torch.cuda.synchronize()
    wrong, launches = int(launch.wrong), int(launch._number)
    dist.barrier()
    return wrong, launches


@pytest.mark.multi_gpu
@pytest.mark.parametrize("rows", [1, 64, 200_000])
def test_replays_of_late_ranks_read_what_was_sent_in_theirs(run_ranks: Callable[..., Any], rows: int) -> None:
    assert run_ranks(2, replays, rows, gpu=True) == [(0, REPLAYS + 2)] * 2


def capture(work: Callable[[], None], ranks: Ranks) -> None:
    """On a CPU by running, as a replay does there."""
    record(work) if ranks.device.type == "cuda" else Checked(work).replay()


def captures_first(ranks: Ranks) -> str:
    launch = Launch(ranks, 8)
    with pytest.raises(RuntimeError) as error:
        capture(lambda: launch(0), ranks)
    launch(0)
    capture(lambda: launch(0), ranks)
    return str(error.value)


@pytest.mark.parametrize("gpu", [False, pytest.param(True, marks=pytest.mark.multi_gpu)])
def test_a_capture_needs_a_rehearsal(run_ranks: Callable[..., Any], gpu: bool) -> None:
    for said in run_ranks(2, captures_first, gpu=gpu):
        assert said == "ids of module: peer memory has to be allocated before a capture"
