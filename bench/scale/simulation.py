"""Event simulation of tasks that share resources: when each starts, and how long an iteration takes.

A resource runs one task at a time. Of ready tasks, those of earlier iterations go first; within an iteration they go in
the order of the list, in which they are launched.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A task of one iteration."""

    name: str
    resource: str
    us: float
    stage: str | None = None
    after: tuple[str, ...] = ()
    """Tasks of the same iteration that end before it starts."""
    after_last: tuple[str, ...] = ()
    """Tasks of the previous iteration that end before it starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Steady:
    """An iteration in the steady state."""

    iteration_us: float
    busy_us: dict[str, float]
    """Microseconds of tasks of each resource in an iteration."""

    @property
    def bound_by(self) -> str:
        """The resource with the longest busy time, if that is nearly the whole iteration; otherwise 'dependencies', as
        tasks wait for one another."""
        name = max(self.busy_us, key=lambda resource: self.busy_us[resource])
        return name if self.busy_us[name] > 0.9 * self.iteration_us else "dependencies"


def simulate(tasks: Sequence[Task], iterations: int = 12) -> Steady:
    """Returns the mean iteration of the second half of `iterations`, when the schedule no longer changes."""
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
