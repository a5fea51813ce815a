"""Event simulation of work that shares resources: what starts when, and how long all of it takes.

A resource does one piece of work at a time. Where several are ready, those of earlier iterations go first, and within
an iteration in the order of the list of tasks, which is that of their launches.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A piece of work of one iteration."""

    name: str
    resource: str
    us: float
    stage: str | None = None
    after: tuple[str, ...] = ()
    """Tasks of the same iteration that end before it starts."""
    after_last: tuple[str, ...] = ()
    """Tasks of the iteration before that end before it starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Steady:
    """An iteration among equal ones."""

    iteration_us: float
    busy_us: dict[str, float]
    """What each resource has to do in an iteration."""

    @property
    def bound_by(self) -> str:
        """The resource that has most to do, where that is nearly the iteration; otherwise its tasks wait for one
        another: 'dependencies'."""
        name = max(self.busy_us, key=lambda resource: self.busy_us[resource])
        return name if self.busy_us[name] > 0.9 * self.iteration_us else "dependencies"


def simulate(tasks: Sequence[Task], iterations: int = 12) -> Steady:
    """Returns an iteration of the second half of so many: by then each waits for the ones before as all later do."""
    names = [task.name for task in tasks]
    assert len(set(names)) == len(names), "names are keys"
    number = {name: i for i, name in enumerate(names)}
    count = len(tasks)
    waits = [0] * (count * iterations)
    then: list[list[int]] = [[] for _ in waits]
    for iteration in range(iterations):
        for i, task in enumerate(tasks):
            key = iteration * count + i
            before = [iteration * count + number[name] for name in task.after]
            if iteration > 0:
                before += [(iteration - 1) * count + number[name] for name in task.after_last]
            waits[key] = len(before)
            for other in before:
                then[other].append(key)
    ready: dict[str, list[int]] = {task.resource: [] for task in tasks}
    free = set(ready)
    for key, left in enumerate(waits):
        if left == 0:
            heapq.heappush(ready[tasks[key % count].resource], key)
    running: list[tuple[float, int]] = []
    ends, now = [0.0] * iterations, 0.0
    while True:
        for resource in list(free):
            if ready[resource]:
                key = heapq.heappop(ready[resource])
                free.remove(resource)
                heapq.heappush(running, (now + tasks[key % count].us, key))
        if not running:
            break
        now, key = heapq.heappop(running)
        ends[key // count] = max(ends[key // count], now)
        free.add(tasks[key % count].resource)
        for other in then[key]:
            waits[other] -= 1
            if waits[other] == 0:
                heapq.heappush(ready[tasks[other % count].resource], other)
    assert not any(waits), "a task waits for itself"
    half = iterations // 2
    busy: dict[str, float] = {}
    for task in tasks:
        busy[task.resource] = busy.get(task.resource, 0.0) + task.us
    return Steady(iteration_us=(ends[-1] - ends[half - 1]) / (iterations - half), busy_us=busy)
