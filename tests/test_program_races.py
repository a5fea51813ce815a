"""Races of programs and threads are found in kernels that have them, and in no others."""

import numpy as np
import pytest
import torch

from dlrm_bench.kernels._triton import INTERPRETED, jit, tl, triton
from dlrm_bench.kernels.embedding import plan_moves
from dlrm_bench.kernels.embedding.plan_moves import PlanMoves
from tests.kernels.embedding.test_plan_moves import batch_of, new_moves, new_state
from tests.program_races import Accesses, race_in

pytestmark = pytest.mark.skipif(triton is None or not INTERPRETED, reason="no interpreter here")


@jit
def passes_on_kernel(numbers, offset):
    """Each program reads what the program before it writes, `offset` elements further."""
    at = numbers + tl.program_id(0)
    tl.store(at + offset, tl.load(at) + 1)


@jit
def writes_kernel(out, same: tl.constexpr):
    tl.store(out, tl.program_id(0) * (1 - same))


@jit
def counts_kernel(counter, order, reads: tl.constexpr):
    before = tl.atomic_add(counter, 1)
    tl.store(order + before, tl.program_id(0))
    if reads:
        tl.store(order + before, tl.load(counter))


@jit
def last_adds_kernel(numbers, arrivals, total, late: tl.constexpr):
    """late: whether a number comes after the arrival that announces it."""
    if not late:
        tl.store(numbers + tl.program_id(0), tl.program_id(0).to(tl.float32))
    arrived = tl.atomic_add(arrivals, 1)
    if late:
        tl.store(numbers + tl.program_id(0), tl.program_id(0).to(tl.float32))
    tl.debug_barrier()
    if arrived == 7:
        tl.store(total, tl.sum(tl.load(numbers + tl.arange(0, 8)), 0))
        tl.store(arrivals, 0)


@jit
def swaps_kernel(numbers, waits: tl.constexpr, in_place: tl.constexpr, size: tl.constexpr):
    at = tl.arange(0, size)
    other = at if in_place else size - 1 - at
    number = tl.load(numbers + at)
    if waits:
        tl.debug_barrier()
    tl.store(numbers + other, number)


@jit
def gathers_kernel(numbers, at, size: tl.constexpr):
    """Threads may store equal values to one element, and no others."""
    tl.store(numbers + tl.load(at + tl.arange(0, size)), tl.arange(0, size) // 2)


def test_programs_that_touch_one_element_race_if_one_writes_another_value() -> None:
    numbers = torch.zeros(9, dtype=torch.int32)
    passes_on_kernel[(4,)](numbers, 5)
    passes_on_kernel[(4,)](numbers, 0)
    with pytest.raises(AssertionError, match=r"passes_on_kernel: programs . and . race: (load, store|store, load)"):
        passes_on_kernel[(4,)](numbers, 1)
    writes_kernel[(3,)](numbers, True)
    with pytest.raises(AssertionError, match=r"programs . and . race: store, store"):
        writes_kernel[(3,)](numbers, False)


def test_atomics_meet_atomics_alone_and_programs_run_in_no_order() -> None:
    counter, order = torch.zeros(1, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
    counts_kernel[(2, 2, 2)](counter, order, False)
    assert counter.item() == 8
    counts_kernel[(8,)](counter.zero_(), order, False)
    assert order.sort().values.tolist() == list(range(8)) != order.tolist()
    with pytest.raises(AssertionError, match=r"counts_kernel: programs . and . race: load, atomic"):
        counts_kernel[(8,)](counter.zero_(), order, True)


def test_what_the_last_to_arrive_does_comes_after_all_that_others_did_before() -> None:
    numbers, total = torch.zeros(8), torch.zeros(1)
    arrivals = torch.zeros(1, dtype=torch.int32)
    for _ in range(2):
        last_adds_kernel[(8,)](numbers, arrivals, total, False)
        assert total.item() == 28
        assert arrivals.item() == 0
    with pytest.raises(AssertionError, match=r"last_adds_kernel: programs . and . race"):
        last_adds_kernel[(8,)](numbers, arrivals, total, True)


def test_threads_race_where_no_barrier_lies_between() -> None:
    numbers = torch.arange(8, dtype=torch.int32)
    swaps_kernel[(1,)](numbers, False, True, 8)
    swaps_kernel[(1,)](numbers, True, False, 8)
    assert numbers.tolist() == list(range(7, -1, -1))
    with pytest.raises(AssertionError, match=r"swaps_kernel: threads of program 0 race, .*: load, store"):
        swaps_kernel[(1,)](numbers, False, False, 8)
    gathers_kernel[(1,)](numbers, torch.tensor([3, 3, 5, 5], dtype=torch.int32), 4)
    with pytest.raises(AssertionError, match="gathers_kernel: threads of program 0 race"):
        gathers_kernel[(1,)](numbers, torch.tensor([3, 5, 3, 5], dtype=torch.int32), 4)


def test_no_access_and_reads_alone_are_no_race() -> None:
    assert race_in(None) is None
    columns = np.zeros((7, 2), np.int64)
    columns[1] = 0, 1  # two programs
    assert race_in(Accesses(*columns)) is None  # type: ignore[arg-type]


@jit
def _numbered_too_soon(
    rows, size, place, named, count, number, kind, late_of_block, early_of_block, device_rows, block: tl.constexpr
) -> None:  # fmt: skip
    """Stands for plan_moves' first kernel: it would give the batch its number while other programs read the last."""
    before = tl.load(number).to(tl.int32)
    tl.store(number, (before % 255 + 1).to(tl.uint8), tl.program_id(0) == 0)


def test_a_number_that_a_kernel_writes_too_soon_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_moves, "_mark_kernel", _numbered_too_soon)
    with pytest.raises(AssertionError, match=r"_numbered_too_soon: programs . and . race: (load, store|store, load)"):
        PlanMoves([batch_of(400, 50, 0)], new_state(400, [(400, 150, 50)], 3), new_moves([40])).triton(block=16)
