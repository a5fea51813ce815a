import random

import pytest

from dlrm_bench.bench.doctor.findings import Seen
from dlrm_bench.bench.doctor.judge import Place
from dlrm_bench.bench.doctor.outside import add_straggler
from dlrm_bench.bench.doctor.picture import ranks_figure
from dlrm_bench.bench.doctor.rank_file import RankFile
from dlrm_bench.bench.doctor.stragglers import Together, more_gpu_work, together
from dlrm_bench.bench.doctor.trace import ITERATION
from tests.bench.doctor.made import USER, rank_file, sampled
from tests.bench.profile.gpu_traces import ALL_REDUCE, NVJET, SEND_RECV, call, event, on_gpu

GLOO = 300
"""Thread of the host's collectives."""


def host_rank(late_us: float, iterations: int = 4) -> list[dict]:
    """Iterations of 20 ms with two all-reduces that end at 15 and 18 ms on all ranks."""
    events = []
    for i in range(iterations):
        t = 20_000.0 * i
        events += [
            event("user_annotation", ITERATION, t, 20_000),
            event("user_annotation", "gloo:all_reduce", t + 1000 + late_us, 14_000 - late_us, GLOO),
            event("user_annotation", "gloo:all_reduce", t + 16_000, 2000, GLOO),
        ]
    return events


def gpu_rank(busy_us: float) -> list[dict]:
    """Iterations of 10 ms: a kernel, and then an all-to-all and an all-reduce that end together at 9 ms."""
    events = []
    for i in range(3):
        t, c = 10_000.0 * i, 10 * i
        events += [
            event("user_annotation", ITERATION, t, 1000),
            call("cudaLaunchKernel", t + 10, 5, c + 1),
            call("cudaLaunchKernel", t + 20, 5, c + 2),
            call("cudaLaunchKernel", t + 30, 5, c + 3),
            on_gpu(NVJET, t + 100, busy_us, c + 1),
            on_gpu(SEND_RECV, t + 100 + busy_us, 7000 - busy_us, c + 2),
            on_gpu(ALL_REDUCE, t + 8000, 1000, c + 3),
        ]
    return events


def test_waiting_and_transfer_of_the_hosts_collectives():
    result = together({0: host_rank(0.0), 1: host_rank(12_000.0)})
    assert result.waits_ms == {0: pytest.approx(12.0), 1: pytest.approx(0.0)}
    assert result.transfers_ms == {0: pytest.approx(4.0), 1: pytest.approx(4.0)}
    assert result.late[1].ms == pytest.approx(12.0)
    assert result.last[1] >= 0.5
    assert result.straggler(20.0) == 1


def test_a_gpu_that_has_more_to_compute():
    events = {0: gpu_rank(500.0), 1: gpu_rank(500.0), 2: gpu_rank(3500.0)}
    result = together(events)
    assert result.straggler(10.0) == 2
    assert result.late[2].ms == pytest.approx(3.0)
    assert result.waits_ms[0] == pytest.approx(3.0)
    assert more_gpu_work(events, 2) == (pytest.approx(3.0), NVJET, pytest.approx(3.0))
    assert ranks_figure(result) is not None


def test_ranks_that_come_together_have_no_straggler():
    assert together({0: host_rank(0.0), 1: host_rank(100.0)}).straggler(20.0) is None  # below 3 % of an iteration


def test_ranks_that_come_last_in_turn_have_no_straggler():
    first, second = host_rank(0.0), host_rank(0.0)
    for i in range(4):
        late = first if i % 2 else second
        late[3 * i + 1]["ts"] += 5000
        late[3 * i + 1]["dur"] -= 5000
    assert together({0: first, 1: second}).straggler(20.0) is None


@pytest.mark.parametrize("collectives", [1, 4])
def test_equal_ranks_seldom_have_a_straggler(collectives):
    """Each comes to each collective at a time of chance."""
    draw = random.Random(5)
    found = 0
    for _ in range(500):
        late = {0: [0.0] * 5, 1: [0.0] * 5}
        for i in range(5):
            for _ in range(collectives):
                first, second = draw.expovariate(1.0), draw.expovariate(1.0)
                late[int(second > first)][i] += abs(second - first)
        found += Together(late_ms=late).straggler(1.0) is not None
    assert found < 0.08 * 500


def test_ranks_whose_collectives_differ_are_not_compared():
    other = host_rank(0.0)
    other[1]["name"] = "gloo:broadcast"
    result = together({0: host_rank(0.0), 1: other})
    assert (result.late, result.straggler(20.0), ranks_figure(result)) == ({}, None, None)
    assert together({0: host_rank(0.0)}).late == {}


def detail_of_straggler(more_us: float) -> tuple[int, str]:
    """(line, detail) of a rank that is 12 ms late, one line of which takes this much longer, in us."""
    events = {0: host_rank(0.0), 1: host_rank(12_000.0)}
    seen: list[tuple[RankFile, dict[Place, Seen]]] = []
    for rank in events:
        made = rank_file([], [], rank=rank, device="cpu")
        made["sampled"] = sampled([[USER]], [(1000.0 * i + 500, 0, 100.0 + rank * more_us, 0.0) for i in range(50)])
        seen.append((made, {}))
    assert add_straggler(seen, events, together(events), 20.0) == 1
    ((place, found),) = seen[0][1].items()
    return place.user.line, found.detail


def test_the_line_of_a_straggler_explains_its_delay():
    assert detail_of_straggler(11_000.0)[0] == USER["line"]
    line, detail = detail_of_straggler(200.0)
    assert (line, "none of its lines takes that much longer" in detail) == (0, True)
