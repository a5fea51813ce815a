"""Places and moves of rows against a model of dictionaries, and how few rows are missing after a while."""

from dataclasses import replace
from itertools import accumulate, chain, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dlrm_bench.dlrm.tables.tiers.placement import Placement, Pool

CPU = torch.device("cpu")


def pool_of(rows: int, device_rows: int, guests: int, window: int) -> list[Pool]:
    """Returns one pool of all rows, for batches of any size."""
    of_all, ids = (range(rows),), (range(1 << 20),)
    return [Pool(rows=of_all, ids=ids, device_rows=device_rows, guests=guests, window=window)]


def nothing_known(rows: int) -> NDArray[np.float32]:
    """The first rows are on the device, of counts of 0."""
    return np.zeros(rows, np.float32)


@st.composite
def runs(draw: st.DrawFn) -> tuple[list[Pool], int, list[list[int]]]:
    """Returns pools of one table or several, the batches between two halvings, and batches of rows."""
    tables = draw(st.integers(1, 4))
    sizes, hot = (draw(st.lists(st.integers(1, most), min_size=tables, max_size=tables)) for most in (12, 6))
    rows, ids = ([range(*ends) for ends in pairwise(accumulate(of, initial=0))] for of in (sizes, hot))
    of_pools = draw(st.lists(st.integers(0, 2), min_size=tables, max_size=tables))
    pools = []
    for number in sorted(set(of_pools)):
        held = [table for table, of in enumerate(of_pools) if of == number]
        some = draw(st.integers(0, sum(sizes[table] for table in held)))
        pool = Pool.of_batches([rows[table] for table in held], [ids[table] for table in held], some)
        if pool.moves:
            guests = draw(st.integers(1, some - 1))
            pool = replace(pool, guests=guests, window=draw(st.integers(1, guests)))
        pools.append(pool)
    named = (st.lists(st.sampled_from([-1, *of]), min_size=n, max_size=n) for of, n in zip(rows, hot, strict=True))
    batch = st.tuples(*(of_table.map(sorted) for of_table in named)).map(lambda of: list(chain(*of)))
    return pools, draw(st.integers(1, 6)), draw(st.lists(batch, min_size=1, max_size=12))


class Model:
    """Rows by place, and what each batch may do to them, in dictionaries."""

    def __init__(self, placement: Placement) -> None:
        self.device_rows, self.before = placement.device_rows, set[int]()
        self.row_at = {place: row for row, place in enumerate(placement.place.tolist())}

    def exchange(self, pairs: list[tuple[int, int]], may_come: set[int], may_leave: set[int]) -> None:
        for on_device, in_host in pairs:
            place = self.device_rows + in_host
            assert self.row_at[place] in may_come
            assert self.row_at[on_device] in may_leave
            self.row_at[place], self.row_at[on_device] = self.row_at[on_device], self.row_at[place]

    def on_device(self, rows: set[int]) -> set[int]:
        return {row for place, row in self.row_at.items() if place < self.device_rows and row in rows}


@settings(max_examples=200)
@given(runs())
def test_rows_move_as_the_model_allows(run: tuple[list[Pool], int, list[list[int]]]) -> None:
    """Within their pool, each of which has as many rows on the device all the time."""
    pools, halving, batches = run
    rows = sum(pool.count for pool in pools)
    placement = Placement(pools, CPU, nothing_known(rows), halving)
    model = Model(placement)
    assert len(model.row_at) == rows, "each row has a place"
    moving, counted = [pool for pool in pools if pool.moves], [0, 0, 0, 0]
    for batch in batches:
        named = {row for row in batch if row >= 0}
        every_move = placement.plan(torch.tensor(batch, dtype=torch.int32))
        counted[0] += 1
        for pool, moves in zip(moving, every_move, strict=True):
            of_pool = set(chain(*pool.rows))
            missing = (named & of_pool) - model.on_device(of_pool)
            pairs = list(zip(moves.device.tolist(), moves.host.tolist(), strict=True))
            (late_first, late_end), (early_first, early_end) = moves.late.tolist(), moves.early.tolist()
            assert late_first == 0
            assert late_end == early_first <= early_end <= pool.window
            idle = of_pool - named - model.before
            late = missing & model.before
            assert late_end == min(len(late), early_end), "late rows come first"
            # While the batch before trains, none of its rows moves; when it has, those that it names too may come.
            model.exchange(pairs[early_first:early_end], missing - model.before, idle)
            model.exchange(pairs[late_first:late_end], late, idle)
            if pool.window < pool.guests or missing:
                assert early_end <= len(missing)
            for number, count in enumerate((len(missing), early_end, len(missing) - early_end), 1):
                counted[number] += count
        for pool in pools:
            fixed = set() if pool.moves else named & set(chain(*pool.rows))
            in_host = len(fixed - model.on_device(fixed))
            counted[1], counted[3] = counted[1] + in_host, counted[3] + in_host
            assert len(model.on_device(set(chain(*pool.rows)))) == pool.device_rows
        place = {row: place for place, row in model.row_at.items()}
        assert placement.place.tolist() == [place[row] for row in range(rows)]
        occupants = {device: row for device, row in model.row_at.items() if device < model.device_rows}
        held = placement.state.occupant[:-1].tolist()
        assert {device: held[device] for device in occupants} == occupants
        rings = sorted(place for pool in placement.state.pools for place in pool.ring.tolist())
        assert rings == placement.state.guest.nonzero().view(-1).tolist()
        out = torch.empty(len(batch), dtype=torch.int32)
        placement.places(torch.tensor(batch, dtype=torch.int32), out)
        assert out.tolist() == [place[row] if row >= 0 else -1 for row in batch]
        model.before = named
    assert placement.state.counters.tolist() == counted


def test_the_rest_of_the_tables_is_one_pool_around_those_with_a_share_of_their_own() -> None:
    rows, ids = [range(10), range(10, 30), range(30, 40)], [range(4), range(4, 5), range(5, 9)]
    pool = Pool.of_batches([rows[0], rows[2]], [ids[0], ids[2]], 12)
    assert (pool.rows, pool.ids) == ((range(10), range(30, 40)), (range(4), range(5, 9)))
    assert (pool.count, pool.host_rows, pool.guests, pool.window) == (20, 8, 6, 1)
    joined = Pool.of_batches(rows[1:], ids[1:], 12)
    assert (joined.rows, joined.ids) == ((range(10, 40),), (range(4, 9),))
    for device_rows in (0, 1, 20):
        assert not Pool.of_batches([rows[1]], [ids[1]], device_rows).moves


def test_missing_rows_come_as_long_as_others_may_leave() -> None:
    placement = Placement(pool_of(20, 10, guests=6, window=4), CPU, nothing_known(20))
    batches = ([10, 11], [12, 13, 14])
    moved = [int(placement.plan(torch.tensor(batch, dtype=torch.int32))[0].early[1]) for batch in batches]
    assert moved == [2, 3]
    assert int(placement.plan(torch.tensor([15, 16, 17, 18, 19], dtype=torch.int32))[0].early[1]) <= 4


def test_a_row_that_every_batch_names_comes_to_the_device_and_stays_there() -> None:
    placement = Placement(pool_of(400, 40, guests=8, window=4), CPU, nothing_known(400))
    generator = torch.Generator().manual_seed(0)
    for batch in range(200):
        rows = torch.cat([torch.tensor([390, 395]), torch.randint(400, (3,), generator=generator)])
        placement.plan(rows.int().sort().values)
        if batch > 2:
            assert (placement.place[torch.tensor([390, 395])] < 40).all()
    assert not placement.state.guest[placement.place[torch.tensor([390, 395])].long()].any(), "among the residents"


class Zipf:
    """Zipf's ids, numbered at random, and a placement of which the misses of many batches are counted."""

    rows, ids = 20_000, 2_000

    def __init__(self, share: float, knows: bool) -> None:
        """knows: how many ids of a batch name each row."""
        self._generator = torch.Generator().manual_seed(0)
        self._probability = 1 / torch.arange(1, self.rows + 1, dtype=torch.float64) ** 1.05
        self._number = torch.randperm(self.rows, generator=self._generator)
        device_rows = int(share * self.rows)
        self._best = torch.zeros(self.rows, dtype=torch.bool)
        self._best[self._number[:device_rows]] = True
        pools = pool_of(self.rows, device_rows, guests=400, window=200)
        known = (self.ids * self._probability / self._probability.sum())[self._number.argsort()]
        expected = known.float().numpy() if knows else nothing_known(self.rows)
        self._placement = Placement(pools, CPU, expected, halving=1024)

    def misses(self, batches: int) -> float:
        """Returns the missing rows of so many batches over those of the best fixed placement."""
        self._placement.forget()
        least = 0
        for _ in range(batches):
            drawn = torch.multinomial(self._probability, self.ids, replacement=True, generator=self._generator)
            named = self._number[drawn].sort().values
            least += int((~self._best[named.unique()]).sum())
            self._placement.plan(named.int())
        return int(self._placement.state.counters[1]) / least


@pytest.mark.parametrize("share", [0.5, 0.1])
def test_misses_come_near_those_of_the_best_fixed_placement(share: float) -> None:
    """Placement by counts alone has to find the frequent rows."""
    found = Zipf(share, knows=False)
    found.misses(500)
    assert found.misses(100) < 1.2


@pytest.mark.parametrize("share", [0.5, 0.1])
def test_a_known_placement_is_kept(share: float) -> None:
    assert Zipf(share, knows=True).misses(100) < 1.1


@pytest.mark.parametrize("device_rows", [1, 2, 3, 4, 7, 11])
def test_the_rows_expected_most_are_on_the_device_the_first_of_equal_ones(device_rows: int) -> None:
    numbers = np.array([0, 0.3, 0.1, 9, 0.1, 0.1, 0, 0.002, 0, 0.3, 0], np.float32)
    pool = Pool.of_batches([range(11)], [range(5)], device_rows)
    placement = Placement([pool], CPU, numbers, halving=100)
    expected = sorted(range(11), key=lambda row: -numbers[row])[:device_rows]
    assert (placement.place < device_rows).nonzero().view(-1).tolist() == sorted(expected)
    counts = placement.state.counts.view(-1)[:11].tolist()
    of_batches = -np.expm1(-numbers.astype(np.float64)) * 100
    assert all(int(exact) <= count <= int(exact) + 1 for count, exact in zip(counts, of_batches, strict=True))


def test_counts_begin_with_what_is_expected_on_the_average() -> None:
    pools = pool_of(9_000, 10, guests=1, window=1)
    numbers = np.repeat(np.array([0.0, 0.0001, 0.001], np.float32), 3_000)
    counts = Placement(pools, CPU, numbers, halving=800).state.counts.view(-1)[:9_000].view(3, 3_000).double().mean(1)
    assert counts.tolist() == pytest.approx([0, 0.0256, 0.256], abs=0.005)


def test_rows_of_a_table_that_is_named_often_do_not_hold_up_the_others() -> None:
    """Of the device's rows the first 9,000 are named by every tenth batch, and 1,000 by none; 900 in host memory are
    named by every tenth batch too."""
    expected = np.concatenate([np.full(9_000, 0.1), np.full(1_000, 2e-4), np.full(10_000, 1e-4)]).astype(np.float32)
    placement = Placement(pool_of(20_000, 10_000, guests=120, window=120), CPU, expected)
    generator = torch.Generator().manual_seed(0)
    for batch in range(80):
        often = torch.randint(9_900, (990,), generator=generator)
        placement.plan(torch.where(often < 9_000, often, often + 3_000).int().sort().values)
        if batch == 59:
            placement.forget()
    assert int(placement.state.counters[1]) < 0.25 * 20 * 90, "a quarter of the 90 of a batch"


def test_rows_that_few_batches_named_do_not_drive_out_those_expected_more_often() -> None:
    """Of 4,000 rows that as many batches name, few are named in the first ones; a thousand others are named once."""
    expected = np.concatenate([np.full(4_000, 0.02, np.float32), np.full(36_000, 1e-4, np.float32)])
    placement = Placement(pool_of(40_000, 4_200, guests=200, window=100), CPU, expected)
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        rows = torch.cat(
            [torch.randint(4_000, (80,), generator=generator), torch.randint(36_000, (4,), generator=generator) + 4_000]
        )
        placement.plan(rows.int().sort().values)
    assert int(placement.state.counters[1]) <= 4 * 300, "none of the 4,000 was missing"
