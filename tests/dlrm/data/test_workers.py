from threading import Barrier, Event

import pytest

from dlrm_bench.dlrm.data.steps import Advance
from dlrm_bench.dlrm.data.workers import run_all


@pytest.mark.parametrize("workers", [1, 3])
def test_all_is_done_and_counted(workers: int) -> None:
    done: list[int] = []
    counted: list[float] = []

    def work(item: int, advance: Advance) -> None:
        advance(item)
        done.append(item)

    run_all(work, range(20), counted.append, workers)
    assert sorted(done) == [*range(20)]
    assert sum(counted) == sum(range(20))


def test_several_work_at_a_time() -> None:
    together = Barrier(3, timeout=60)
    run_all(lambda item, advance: together.wait() and None, range(3), lambda pieces: None, 3)


def test_an_error_ends_the_others() -> None:
    """The second piece would go on without end; later ones are not begun."""
    begun: list[int] = []
    failing = Event()

    def work(item: int, advance: Advance) -> None:
        begun.append(item)
        if item == 0:
            assert failing.wait(60)
            raise ValueError("day 0 is bad")
        while True:
            advance(1)
            failing.set()

    with pytest.raises(ValueError, match="day 0 is bad"):
        run_all(work, range(9), lambda pieces: None, 2)
    assert sorted(begun) in ([0, 1], [0, 1, 2])
