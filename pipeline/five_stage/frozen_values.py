"""Values by which Python decides in a model: numbers and strings among its modules' attributes, such as a dropout
probability, lists and dicts of them, and its submodules. A graph keeps what they were at its capture.

What somebody changes between two batches is told apart from what the forward itself changes, by looking before and
after each run: the former takes new captures. The latter is right in a graph where it only depends on the shapes of the
batch, and else, as a count of calls, has no place in one.
"""

from collections.abc import Hashable, Sequence
from enum import Enum
from numbers import Number
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import nn

_PLAIN = (Number, str, type(None), Enum, torch.dtype)
_OF_TORCH = frozenset(vars(nn.Module()))
"""Attributes that every module has; modes and tensors are watched elsewhere."""


class _Place(NamedTuple):
    of: dict[str, Any]
    """A module's attributes or submodules."""
    key: str
    name: str


class FrozenValues:
    """The values at the end of the last run, or when they were last looked at."""

    def __init__(self, named: Sequence[tuple[str, nn.Module]]) -> None:
        """named: modules, with their names."""
        self._places = [
            _Place(of, key, f"{name}.{key}" if name else key)
            for name, module in named
            for of in (vars(module), module._modules)
            for key, value in of.items()
            if of is module._modules or (key not in _OF_TORCH and _is_plain(value))
        ]
        self._lookups = [place.of for place in self._places], [place.key for place in self._places]
        self._left: dict[Hashable, dict[int, Any]] = {}
        """Values of `_own` that runs have left behind, by kind of batch and place."""
        self._own: set[int] = set()
        """Places that a run has changed."""
        self._take(self._now())

    def change(self) -> str | None:
        """Returns what somebody has changed since the last call or run, for a message; None without a change."""
        now = self._now()
        if self._is_same(now):
            return None
        changed = [i for i in self._changed(now) if i not in self._own]  # evaluation runs the forward too
        if changed:
            self._left.clear()  # what runs leave behind may follow from it
        self._take(now)
        return None if not changed else self._told(changed[0])

    def ran(self, kind: Hashable = None) -> None:
        """Takes over what a run has changed. kind: of its batch, by which values may differ; None: any."""
        now = self._now()
        if not self._is_same(now):
            self._own.update(self._changed(now))
            self._take(now)
        if self._own and kind is not None:
            self._left[kind] = {i: _copy(now[i]) for i in self._own}

    def before_capture(self) -> None:
        """Notes the values; `put_back` follows."""
        self._take(self._now())

    def put_back(self, kind: Hashable) -> str | None:
        """Restores the values that a capture has left otherwise than the last run of this kind of batch, and takes over
        what else it has changed. Returns the first one's name; None without any."""
        now, left = self._now(), self._left.get(kind, {})
        others = [i for i in self._changed(now) if i in left and not _same(_copy(now[i]), left[i])]
        self._restore(others)
        return self._places[others[0]].name if others else None

    def undo(self) -> None:
        """Restores the values as they were when they were last looked at."""
        self._restore(self._changed(self._now()))

    def _restore(self, places: Sequence[int]) -> None:
        for i in places:
            of, key, _ = self._places[i]
            of[key] = self._values[i]
            if (items := self._copies.get(i)) is not None:
                _refill(of[key], items)
        self._take(self._now())

    def _now(self) -> list[Any]:
        return [*map(dict.get, *self._lookups)]

    def _take(self, now: list[Any]) -> None:
        self._values = now
        self._held = [(i, value) for i, value in enumerate(now) if isinstance(value, list | dict)]
        self._copies = {i: _copy(value) for i, value in self._held}

    def _is_same(self, now: list[Any]) -> bool:
        return all(map(is_, now, self._values)) and all(_same(_copy(of), self._copies[i]) for i, of in self._held)

    def _changed(self, now: list[Any]) -> list[int]:
        """Returns the places of other values."""
        before = [self._copies.get(i, was) for i, was in enumerate(self._values)]
        return [i for i, pair in enumerate(zip(map(_copy, now), before, strict=True)) if not _same(*pair)]

    def _told(self, place: int) -> str:
        of, key, name = self._places[place]
        return f"another {'module' if isinstance(of.get(key), nn.Module) else 'value'} is {name}"


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, tuple | list | dict) and _copy(value) is not None)


def _copy(value: Any) -> Any:
    """Returns a value that can be compared later: of a list or dict its items, and None where they are not all plain,
    such as tensors that the forward collects."""
    if not isinstance(value, list | dict | tuple):
        return value
    items = (*value, *value.values()) if isinstance(value, dict) else tuple(value)
    return items if all(isinstance(item, _PLAIN) for item in items) else None


def _refill(of: list[Any] | dict[Any, Any], items: tuple[Any, ...]) -> None:
    """Gives a list or dict the items that `_copy` has returned."""
    if isinstance(of, list):
        of[:] = items
    else:
        count = len(items) // 2
        of.clear()
        of.update(zip(items[:count], items[count:], strict=True))


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return type(one) is type(other) and isinstance(one, _PLAIN) and one == other
