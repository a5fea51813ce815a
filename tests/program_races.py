"""Races within a launch of a Triton kernel, found in the interpreter.

On a GPU the programs of a launch run at the same time, in any order, and so do the threads of a program between two
barriers. The interpreter runs program after program and operator after operator: a program that reads what another one
writes finds there what it hopes for. So every launch of a test notes who touches which element, and is an error where
the result could depend on an order:

- Two programs touch an element, and one of them writes it. They may write the same value: a flag that any raises.
  Atomics may meet. Of two programs that change one element by atomics, which acquire and release unless told not to,
  what the first did before comes before what the second does afterwards.
- Two threads of a program touch an element, one of them writes it, and no barrier lies between. Elements at one place
  of tensors of one shape are taken for one thread's, and others for another's.

Programs run in an order that is none, too: what atomics leave may depend on it, and no test may.
"""

import random
from collections import defaultdict
from collections.abc import Callable
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

_LOAD, _STORE, _ATOMIC = range(3)
_NAMES = ("load", "store", "atomic")
_BY_OPERATOR = {
    "create_masked_load": (_LOAD, 0, None, 1),
    "create_masked_store": (_STORE, 0, 1, 2),
    "create_atomic_cas": (_ATOMIC, 0, None, None),
    "create_atomic_rmw": (_ATOMIC, 1, None, 3),
}
"""The interpreter's operators on memory, and the places of addresses, values and mask among their arguments."""


class Accesses(NamedTuple):
    """Accesses of a launch, each of one element; arrays of one length."""

    address: NDArray[np.uint64]
    program: NDArray[np.int64]
    kind: NDArray[np.int64]
    """_LOAD, _STORE or _ATOMIC."""
    period: NDArray[np.int64]
    """Number of barriers before it, of all programs so far."""
    thread: NDArray[np.int64]
    value: NDArray[np.uint64]
    """Bits of what is stored; else 0."""
    time: NDArray[np.int64]
    """Number of operators before it."""


def watch_programs(interpreter: Any) -> None:
    """Has every launch in this process checked, and its programs run in another order than by their numbers."""
    builder, recorder = interpreter.InterpreterBuilder, _Recorder()
    for name, (kind, *places) in _BY_OPERATOR.items():
        setattr(builder, name, recorder.noting(getattr(builder, name), kind, *places))
    builder.create_barrier = lambda self: recorder.barrier()
    launch = interpreter.GridExecutor.__call__

    def watched(self: Any, *arguments: Any, **named: Any) -> None:
        recorder.begin()
        launch(self, *arguments, **named)
        found = race_in(recorder.end())
        assert found is None, f"{self.fn.__name__}: {found}"

    interpreter.GridExecutor.__call__ = watched
    _shuffle(builder)


def race_in(accesses: Accesses | None) -> str | None:
    """Returns what is wrong with the first element whose accesses race; None where none does."""
    if accesses is None:
        return None
    touched = np.isin(accesses.address, accesses.address[accesses.kind != _LOAD])
    order = np.lexsort((accesses.time[touched], accesses.program[touched], accesses.address[touched]))
    of = Accesses(*(column[touched][order] for column in accesses))
    return _between_programs(of) or _within_programs(of)


def _between_programs(of: Accesses) -> str | None:
    atomics: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for at in np.flatnonzero(of.kind == _ATOMIC).tolist():
        atomics[int(of.program[at])].append((int(of.address[at]), int(of.time[at])))
    for first, end in _uneven(_starts(of.address), of.program):
        here = Accesses(*(column[first:end] for column in of))
        if (here.kind == _STORE).all() and len(set(here.value.tolist())) == 1:
            continue
        of_element = sorted(zip(here.time.tolist(), here.program.tolist(), here.kind.tolist(), strict=True))
        for (time, program, kind), (later, other, of_other) in combinations(of_element, 2):
            if program == other or kind == of_other != _STORE:
                continue
            given = {address for address, at in atomics[program] if at >= time}
            if not any(address in given and at <= later for address, at in atomics[other]):
                return f"programs {program} and {other} race: {_NAMES[kind]}, {_NAMES[of_other]}"
    return None


def _within_programs(of: Accesses) -> str | None:
    for first, end in _uneven(_starts(of.address, of.program, of.period), of.thread):
        here = Accesses(*(column[first:end] for column in of))
        kinds = set(here.kind.tolist())
        if _STORE in kinds and (len(kinds) > 1 or len(set(here.value.tolist())) > 1):
            words = ", ".join(_NAMES[kind] for kind in here.kind.tolist()[:2])
            return f"threads of program {here.program[0]} race, without a barrier in between: {words}"
    return None


def _starts(*columns: NDArray[Any]) -> NDArray[np.int64]:
    """Returns where the columns, [n], which are sorted, change; at last n."""
    changes = np.logical_or.reduce([column[1:] != column[:-1] for column in columns])
    return np.flatnonzero(np.concatenate([[True], changes, [True]]))


def _uneven(starts: NDArray[np.int64], values: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Returns the ranges from one start to the next in which not all values are equal."""
    if not len(values):
        return []
    differ = np.minimum.reduceat(values, starts[:-1]) != np.maximum.reduceat(values, starts[:-1])
    return list(zip(starts[:-1][differ].tolist(), starts[1:][differ].tolist(), strict=True))


class _Recorder:
    """The accesses of the launch that is under way."""

    def __init__(self) -> None:
        self._noted: list[Accesses] = []
        self._shapes: dict[tuple[int, ...], int] = {}
        self._barriers = 0

    def begin(self) -> None:
        self._noted.clear()
        self._barriers = 0

    def end(self) -> Accesses | None:
        """Returns all accesses; None where there are none."""
        return Accesses(*map(np.concatenate, zip(*self._noted, strict=True))) if self._noted else None

    def barrier(self) -> None:
        self._barriers += 1

    def noting(
        self, access: Callable[..., Any], kind: int, addresses: int, values: int | None, mask: int | None
    ) -> Callable[..., Any]:
        """Returns the operator, whose accesses are noted. The others: places among its arguments."""

        def noted(builder: Any, *arguments: Any) -> Any:
            of = [None if place is None else arguments[place].data for place in (addresses, values, mask)]
            self._note(builder, kind, *of)
            return access(builder, *arguments)

        return noted

    def _note(self, builder: Any, kind: int, addresses: Any, values: Any, mask: Any) -> None:
        shape = addresses.shape
        at = np.arange(addresses.size) if mask is None else np.flatnonzero(np.broadcast_to(mask, shape))
        if not len(at):
            return
        (x, y, z), (_, of_y, of_z) = builder.grid_idx, builder.grid_dim
        program, thread = (x * of_y + y) * of_z + z, at + (self._shapes.setdefault(shape, len(self._shapes)) << 40)
        stored = np.zeros(len(at), np.uint64)
        if values is not None:
            stored = np.broadcast_to(values, shape).ravel()[at]
            stored = stored.view(f"u{stored.itemsize}").astype(np.uint64)
        numbers = [np.full(len(at), number) for number in (program, kind, self._barriers, len(self._noted))]
        self._noted.append(Accesses(addresses.ravel()[at].astype(np.uint64), *numbers[:3], thread, stored, numbers[3]))


def _shuffle(builder: Any) -> None:
    """Lets programs run in an order that depends on nothing but their number."""
    set_sizes, set_place, order = builder.set_grid_dim, builder.set_grid_idx, list[int]()

    def set_grid_dim(self: Any, *sizes: int) -> None:
        order[:] = range(sizes[0] * sizes[1] * sizes[2])
        random.Random(len(order)).shuffle(order)
        set_sizes(self, *sizes)

    def set_grid_idx(self: Any, x: int, y: int, z: int) -> None:
        _, of_y, of_z = self.grid_dim
        nth = order[(x * of_y + y) * of_z + z]
        set_place(self, nth // (of_y * of_z), nth // of_z % of_y, nth % of_z)

    builder.set_grid_dim, builder.set_grid_idx = set_grid_dim, set_grid_idx
