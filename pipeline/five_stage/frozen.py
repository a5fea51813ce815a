"""The model's state that graphs of the dense part rely on: its tensors and their addresses, the trained tensors among
them, the modes of its modules, and their values (frozen_values.py). Checked before every batch, because no hook reports
a user's change.

A graph reads and writes the addresses of its capture. `parameter.data = ...`, as in Module.to or when averages are
swapped in, and a replaced parameter or buffer, leave it with memory that the model no longer uses.
"""

from collections.abc import Hashable, Iterable, Sequence
from operator import attrgetter, is_, itemgetter
from typing import Any, NamedTuple

from torch import Tensor, nn

from .frozen_values import FrozenValues

_MODE, _TRAINED = itemgetter("training"), attrgetter("requires_grad")


class _Place(NamedTuple):
    of: dict[str, Any]
    """A module's parameters or buffers."""
    key: str
    name: str


class FrozenModel:
    """The state of the model at the last batch."""

    def __init__(self, model: nn.Module, sharded: Iterable[nn.Module]) -> None:
        """sharded: modules whose tensors no graph holds, except those of their feature processors."""
        outside = {id(module) for one in sharded for module in one.modules()}
        for one in sharded:
            if isinstance(processors := getattr(one, "_feature_processors", None), nn.Module):
                outside -= {id(module) for module in processors.modules()}
        self._model, self._outside = model, outside
        self._find()

    def _find(self) -> None:
        """Finds what is to be watched; again where a module has come in the place of another."""
        named = [(name, module) for name, module in self._model.named_modules() if id(module) not in self._outside]
        self._modules = [module.__dict__ for _, module in named]
        self._module_names = [f"module {name}" if name else "the model" for name, _ in named]
        self._places = [
            _Place(of, key, f"{name}.{key}" if name else key)
            for name, module in named
            for of in (module._parameters, module._buffers)
            for key in of
        ]
        self._named, self._registered = named, len(self._places)
        self._before: dict[int, dict[str, Any]] = {}
        """The modules' attributes before a capture; empty outside of one."""
        self._values = FrozenValues(named)
        self._watch(self._places)

    def change(self) -> str | None:
        """Returns the change of the model since the last call, for a message; None without one."""
        if (value := self._values.change()) is not None:
            self._find()
            return value
        tensors, modes = self._now()
        same = all(map(is_, tensors, self._tensors)) and modes == self._modes
        if same and self._layouts == _layouts(self._held):
            return None
        what = self._what(tensors, modes)
        self._watch(self._places[: self._registered])
        return what

    def ran(self, kind: Hashable = None) -> None:
        """Takes over the values that a run of the forward has changed; of a capture, `put_back` does."""
        if not self._before:
            self._values.ran(kind)

    def watch_attributes(self) -> None:
        """Watches the tensors that modules have as plain attributes, from a capture to the next change. To be called
        before each capture."""
        self._values.before_capture()
        self._watch([*self._places[: self._registered], *self._attributes()])
        self._before = {id(module.__dict__): dict(module.__dict__) for _, module in self._named}

    def put_back(self, kind: Hashable = None) -> str | None:
        """Restores parameters, buffers and watched attributes that a capture has replaced, and takes away attributes
        that it has made. Returns what it did in the place of the first one, for a message; None where all are as they
        were. kind: of the batch, as for `ran`."""
        replaced = self._restore_tensors()
        made = [place for place in self._attributes() if place.key in self._made_in(place.of)]
        for place in made:
            if place.key in (before := self._before[id(place.of)]):
                place.of[place.key] = before[place.key]
            else:
                del place.of[place.key]
        self._before = {}
        value = self._values.put_back(kind)
        name = next((place.name for place in (*replaced, *made)), None)
        if name is not None:
            return f"puts another tensor in the place of {name}"
        return None if value is None else f"changes the value of {value}"

    def undo(self) -> None:
        """Restores parameters, buffers and values that a run of the forward has replaced since the last look."""
        self._restore_tensors()
        self._values.undo()

    def _restore_tensors(self) -> list[_Place]:
        """Restores the watched tensors that have been replaced; returns their places."""
        pairs = zip(self._places, self._tensors, strict=True)
        replaced = [(place, was) for place, was in pairs if place.of.get(place.key) is not was]
        for place, was in replaced:
            place.of[place.key] = was
        return [place for place, _ in replaced]

    def _made_in(self, attributes: dict[str, Any]) -> set[str]:
        """Returns the names of a module's attributes that have been set since watch_attributes."""
        before = self._before.get(id(attributes), attributes)
        return {key for key, value in attributes.items() if value is not before.get(key)}

    def _attributes(self) -> list[_Place]:
        return [
            _Place(module.__dict__, key, f"{name}.{key}" if name else key)
            for name, module in self._named
            for key, value in module.__dict__.items()
            if isinstance(value, Tensor)
        ]

    def _watch(self, places: list[_Place]) -> None:
        self._places = places
        self._lookups = [place.of for place in places], [place.key for place in places]
        self._remember(*self._now())

    def _now(self) -> tuple[list[Any], list[bool]]:
        return [*map(dict.get, *self._lookups)], [*map(_MODE, self._modules)]

    def _remember(self, tensors: list[Any], modes: list[bool]) -> None:
        self._tensors, self._modes = tensors, modes
        self._held = [tensor for tensor in tensors if tensor is not None]
        self._layouts = _layouts(self._held)

    def _what(self, tensors: Sequence[Any], modes: Sequence[bool]) -> str:
        for place, now, was in zip(self._places, tensors, self._tensors, strict=True):
            if now is not was:
                return f"another tensor is {place.name}"
        for name, now, was in zip(self._module_names, modes, self._modes, strict=True):
            if now != was:
                return f"{name} is in {'training' if now else 'eval'} mode"
        names = [place.name for place, tensor in zip(self._places, tensors, strict=True) if tensor is not None]
        moved = zip(2 * names, _layouts(self._held), self._layouts, strict=True)
        return f"{next(name for name, now, was in moved if now != was)} lies in other memory"


def _layouts(tensors: Sequence[Tensor]) -> list[Any]:
    """Returns the tensors' addresses, then their strides."""
    return [*map(Tensor.data_ptr, tensors), *map(Tensor.stride, tensors)]


class TrainedParameters:
    """The set of trained parameters, which DistributedDataParallel too fixes at its first batch."""

    def __init__(self, dense: Iterable[tuple[str, nn.Parameter]], processors: Sequence[nn.Parameter]) -> None:
        """dense: with their names, including frozen ones. processors: trained parameters within sharded modules."""
        named = dict(dense)
        names = [*named, *(f"a sharded module's parameter of shape {tuple(p.shape)}" for p in processors)]
        self._names, self._parameters = names, [*named.values(), *processors]
        self._flags = [parameter.requires_grad for parameter in self._parameters]
        self._may_freeze = [True] * len(named) + [False] * len(processors)
        self._begun = False

    def check(self) -> None:
        """Raises ValueError, naming a parameter that has been frozen or unfrozen since the first batch; before that
        batch, a parameter of the dense part may still be frozen."""
        flags = [*map(_TRAINED, self._parameters)]
        if flags == self._flags and self._begun:
            return
        for name, now, was, may_freeze in zip(self._names, flags, self._flags, self._may_freeze, strict=True):
            if now != was and not (may_freeze and was and not self._begun):
                since = "the first batch" if self._begun else "this pipeline was made"
                raise ValueError(
                    f"{name} was {'unfrozen' if now else 'frozen'} (requires_grad) after {since}, which "
                    "graphs do not support: make a new pipeline after the change"
                )
        self._flags, self._begun = flags, True
