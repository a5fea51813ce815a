"""The capacities ("rooms") of batches: one of few sizes, so that few graphs suffice, and the same on all ranks."""

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist

from dlrm_bench.dlrm.dense.static_sequences import BatchRoom, Needs
from dlrm_bench.dlrm.runtime.ranks import Ranks

_TOKENS_STEP = 1.05
"""Ratio of one room for tokens to the next: padding is at most a twentieth of the tokens, and a fortieth on average."""
_TOKENS_MULTIPLE = 64
_IDS_SLACK = 1.5
"""Ratio of new capacities for events, items and rows to the largest needs of known batches. Padding costs time in the
embedding stages and in per-item computation; growing requires capturing every graph again.

Needs increase: the first windows have samples of the most active users alone, 212 a user; from window 200 on a user
has 55, and a batch four times as many users. In 36 series of 1,000 batches of generated data (2,000, 4,000 and 8,000
users, two seeds; one and two ranks; 16, 128, 1,024 samples) the largest batch has 1.1 to 2.6 times the events of the
largest of the first 64. Growths after the first ten iterations, the most in one series, and the mean unused capacity
for events as a share of the need: 29, 2 and 1.68 with a ratio of 1.4; 24, 1 and 1.72 with 1.5; 22, 1 and 1.90 with
1.6. If only the exceeded capacity grows, 36, 2 and 1.72 with 1.5. Capacities for the largest of all 1,000 batches, if
they were known, would leave 1.55 unused."""
_IDS_MULTIPLE = 1024


def rooms_down(most: int, least: int) -> list[int]:
    """Returns all token capacities from `most`, itself a capacity, down to `least`."""
    rooms, power = {most}, math.ceil(math.log(most, _TOKENS_STEP))
    while (room := _multiple(_TOKENS_STEP**power, _TOKENS_MULTIPLE)) >= least and power > 0:
        rooms |= {room} if room <= most else set()
        power -= 1
    return sorted(rooms, reverse=True)


def room_for_tokens(tokens: int) -> int:
    """Returns the least of the rooms that takes `tokens`: powers of 1.05, rounded up to a multiple of 64."""
    power = math.floor(math.log(max(tokens, 1), _TOKENS_STEP)) - 1
    while (room := _multiple(_TOKENS_STEP**power, _TOKENS_MULTIPLE)) < tokens:
        power += 1
    return room


@dataclass(frozen=True, slots=True)
class IdRoom:
    """Room for the ids of a batch."""

    events: int
    """Distinct events."""
    items: int
    """Items whose rows are looked up."""
    rows: int
    """Distinct rows, which ranks exchange."""

    @property
    def batch(self) -> BatchRoom:
        """The room of a batch itself."""
        return BatchRoom(self.events, self.items)

    def takes(self, needs: Needs) -> bool:
        """Whether a batch fits."""
        return needs.events <= self.events and needs.items <= self.items and needs.rows <= self.rows

    def grown(self, needs: Needs) -> "IdRoom":
        """Returns the larger room after a batch that did not fit: each capacity is at least `_IDS_SLACK` times its
        need, also one that was large enough, as events, items and rows increase together. needs: the largest of all
        known batches."""
        pairs = (self.events, needs.events), (self.items, needs.items), (self.rows, needs.rows)
        return IdRoom(*(max(room, _multiple(need * _IDS_SLACK, _IDS_MULTIPLE)) for room, need in pairs))


def _multiple(number: float, of: int) -> int:
    return math.ceil(number / of) * of


class Asked:
    """A pending all-reduce: the largest needs of any rank for one batch."""

    def __init__(self, needs: Needs, group: dist.ProcessGroup | None) -> None:
        self._most = torch.tensor(needs, dtype=torch.int64)
        self._work = None
        if group is not None:
            self._work = dist.all_reduce(self._most, dist.ReduceOp.MAX, group=group, async_op=True)

    def needs(self) -> Needs:
        """Returns the largest needs; waits for ranks whose hosts have not asked yet."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return Needs(*self._most.tolist())


class Agreement:
    """The agreement of all ranks' hosts, without a read of the device."""

    def __init__(self, ranks: Ranks) -> None:
        """Collective: makes a process group of gloo."""
        self._group = dist.new_group(backend="gloo") if ranks.world_size > 1 else None

    def ask(self, needs: Needs) -> Asked:
        """Asks all ranks for the room that their part of the same batch needs. Collective."""
        return Asked(needs, self._group)
