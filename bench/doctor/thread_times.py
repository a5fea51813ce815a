"""CPU time of each thread of this process, by name: what each costs beside the launching thread."""

import threading
from collections import defaultdict
from pathlib import Path

_TASKS = Path("/proc/self/task")


def thread_times_ms() -> dict[int, tuple[str, float]]:
    """Name and CPU milliseconds so far of all threads but the calling one, by native id.

    Empty where the kernel has no such statistics.

    From the scheduler's statistics (Linux, Documentation/scheduler/sched-stats.rst). A thread of Python's has the name
    that Python knows, another one that of the library which made it.
    """
    known = {thread.native_id: thread.name for thread in threading.enumerate()}
    times = {}
    for task in _TASKS.glob("*"):
        number = int(task.name)
        try:
            ns = int((task / "schedstat").read_text().split()[0])
            name = known.get(number) or (task / "comm").read_text().strip()
        except (OSError, ValueError, IndexError):  # the thread has just ended, or there are no statistics
            continue
        if number != threading.get_native_id():
            times[number] = (name, ns / 1e6)
    return times


def spent_ms(before: dict[int, tuple[str, float]], after: dict[int, tuple[str, float]]) -> dict[str, float]:
    """CPU milliseconds between two readings of thread_times_ms, by name, largest first.

    Threads of one name are added up; idle ones are left out.
    """
    spent: defaultdict[str, float] = defaultdict(float)
    for number, (name, ms) in after.items():
        spent[name] += ms - before.get(number, ("", 0.0))[1]
    return dict(sorted(((name, ms) for name, ms in spent.items() if ms > 0), key=lambda each: -each[1]))
