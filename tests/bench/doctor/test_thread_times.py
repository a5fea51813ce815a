"""CPU time by thread: what others spend shows under their names, what the caller spends does not."""

import threading
import time
from pathlib import Path

import pytest

from dlrm_bench.bench.doctor.thread_times import spent_ms, thread_times_ms

SPUN_MS = 60


def spin(ms: float) -> None:
    end = time.thread_time() + ms / 1000
    while time.thread_time() < end:
        pass


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this kernel keeps no scheduler statistics")
def test_each_thread_has_its_time() -> None:
    go, leave = threading.Event(), threading.Event()
    spun = threading.Barrier(3)

    def work() -> None:
        go.wait()
        spin(SPUN_MS)
        spun.wait()
        leave.wait()

    busy = [threading.Thread(target=work, name="busy") for _ in range(2)]
    idle = threading.Thread(target=leave.wait, name="idle")
    for thread in (*busy, idle):
        thread.start()
    before = thread_times_ms()
    go.set()
    spin(SPUN_MS)
    spun.wait()
    after = thread_times_ms()
    leave.set()
    assert threading.get_native_id() not in after
    spent = spent_ms(before, after)
    assert next(iter(spent)) == "busy"
    assert spent["busy"] == pytest.approx(2 * SPUN_MS, rel=0.3)
    assert spent.get("idle", 0.0) < 5


def test_threads_that_begin_and_end_in_between() -> None:
    before = {1: ("ended", 5.0), 2: ("went on", 1.0), 3: ("idle", 7.0)}
    after = {2: ("went on", 4.0), 3: ("idle", 7.0), 4: ("began", 2.0), 5: ("went on", 8.0)}
    assert list(spent_ms(before, after).items()) == [("went on", 11.0), ("began", 2.0)]
