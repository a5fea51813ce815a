"""The fastest plan of tables in two tiers of memory: for each assignment of widths to ranks, improves the best
placement by moving shards between ranks of the same width, or swapping two of them.

There are two things to balance, embedding work and exchanges with host memory. When they are balanced one after the
other, MLPerf's shards on two ranks at 6,912 samples a GPU take 1.4 times as long.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from dlrm_bench.dlrm.tables.plan.plan import Shard, shards_by_rank
from dlrm_bench.dlrm.tables.plan.work import Work, beside

_MOST_STARTS = 24
_MOST_ROUNDS = 100
_LEAST_GAIN = 1e-6
# The total work of all ranks counts a little, so that one of several equally busy ranks can be relieved first.
_MEAN = 0.01

BytesOf = Callable[[Sequence[Shard]], int]
_Change = tuple[tuple[int, list[Shard]], tuple[int, list[Shard]]]
"""Two ranks, each with its shards after the change."""


def fastest(
    placed: Iterable[Sequence[Shard]], work: Work, bytes_of: BytesOf, memory_bytes: int | None
) -> tuple[tuple[float, tuple[Shard, ...]] | None, float]:
    """Returns time and shards of the fastest plan that fits, and the minimum over plans of the fullest rank's memory.

    placed: the shards of each candidate. bytes_of: bytes of weights and state of a rank with these shards.
    memory_bytes: limit for them; None is no limit.
    """
    costs, starts = _Costs(work, bytes_of, memory_bytes), dict[tuple[int, ...], _Ranks]()
    for shards in placed:
        ranks = _Ranks(shards_by_rank(shards, work.world_size), costs)
        if ranks.widths not in starts or ranks.cost < starts[ranks.widths].cost:
            starts[ranks.widths] = ranks
    # If all ranks have one width, every shard can go to every rank: even badly placed, these improve most.
    chosen = sorted(starts.values(), key=lambda ranks: (len(set(ranks.widths)) > 1, ranks.cost))[:_MOST_STARTS]
    for ranks in chosen:
        ranks.improve()
    fitting = [ranks for ranks in chosen if memory_bytes is None or ranks.most_bytes <= memory_bytes]
    least_bytes = min((ranks.most_bytes for ranks in chosen), default=math.inf)
    if not fitting:
        return None, least_bytes
    shards = sorted(min(fitting, key=lambda ranks: ranks.cost).shards())
    return (work.iteration_us(shards), tuple(shards)), least_bytes


class _RankCost(NamedTuple):
    tables_us: float
    exchanges_us: float
    columns: int
    held_bytes: int


class _Costs:
    """The costs of ranks, cached by tables and width, because the same ones recur many times."""

    def __init__(self, work: Work, bytes_of: BytesOf, memory_bytes: int | None) -> None:
        self._work, self._bytes_of, self._memory_bytes = work, bytes_of, memory_bytes
        self._of_rank: dict[tuple[int, ...], _RankCost] = {}

    def of_rank(self, own: Sequence[Shard]) -> _RankCost:
        """Returns the costs of a rank with these shards."""
        key = (own[0].columns, *sorted([shard.table for shard in own]))
        if key not in self._of_rank:
            assert self._work.exchanges is not None
            columns = sum(shard.columns for shard in own)
            times = (self._work.rank_us(own), self._work.exchanges.us(own))
            self._of_rank[key] = _RankCost(*times, columns, self._bytes_of(own))
        return self._of_rank[key]

    def of_plan(self, ranks: Sequence[_RankCost]) -> float:
        """Returns Work.iteration_us plus a little of the mean work, or much more if a rank's memory is too small."""
        tables, exchanges, columns, held = zip(*ranks, strict=True)
        time = beside(max(tables) + self._work.exchange_us(max(columns)), max(exchanges))
        time += _MEAN * (sum(tables) + sum(exchanges)) / len(ranks)
        if self._memory_bytes is None or max(held) <= self._memory_bytes:
            return time
        return time * (1 + max(held) / self._memory_bytes) ** 2


class _Ranks:
    """The shards of each rank, and their costs."""

    def __init__(self, held: list[list[Shard]], costs: _Costs) -> None:
        self._held, self._costs = held, costs
        self._of_rank = [costs.of_rank(own) for own in held]
        self.widths = tuple(own[0].columns for own in held)
        self.cost = costs.of_plan(self._of_rank)

    @property
    def most_bytes(self) -> int:
        """The bytes of the fullest rank."""
        return max(cost.held_bytes for cost in self._of_rank)

    def shards(self) -> list[Shard]:
        """Returns all shards on their ranks."""
        return [Shard(rank, one.table, one.column, one.columns) for rank, own in enumerate(self._held) for one in own]

    def improve(self) -> None:
        """Moves and swaps shards until no single move or swap makes the plan cheaper."""
        for _ in range(_MOST_ROUNDS):
            better = next((c for c in self._changes() if self._with(c) < self.cost * (1 - _LEAST_GAIN)), None)
            if better is None:
                break
            for rank, own in better:
                self._held[rank], self._of_rank[rank] = own, self._costs.of_rank(own)
            self.cost = self._costs.of_plan(self._of_rank)

    def _changes(self) -> Iterator[_Change]:
        """Yields the moves and swaps of each shard of the ranks with the most work or memory of any kind, with ranks of
        the same width."""
        most = {max(range(len(self._held)), key=lambda rank: self._of_rank[rank][i]) for i in range(4)}
        for busy in sorted(most):
            mine, alike = self._held[busy], set[tuple[int, ...]]()
            for other, theirs in enumerate(self._held):
                tables = tuple(sorted(shard.table for shard in theirs))
                if busy != other and mine[0].columns == theirs[0].columns and tables not in alike:
                    alike.add(tables)
                    yield from (((busy, rest), (other, full)) for rest, full in _exchanged(mine, theirs))

    def _with(self, change: _Change) -> float:
        """Returns the cost after a change."""
        of_rank = list(self._of_rank)
        for rank, own in change:
            of_rank[rank] = self._costs.of_rank(own)
        return self._costs.of_plan(of_rank)


def _exchanged(mine: Sequence[Shard], theirs: Sequence[Shard]) -> Iterator[tuple[list[Shard], list[Shard]]]:
    """Yields the shards of two ranks after moving one of the first, unless it is its last, or after swapping two."""
    for i, one in enumerate(mine):
        rest = [*mine[:i], *mine[i + 1 :]]
        if rest:
            yield rest, [*theirs, one]
        for k, two in enumerate(theirs):
            if one.table != two.table:
                yield [*rest, two], [*theirs[:k], *theirs[k + 1 :], one]
