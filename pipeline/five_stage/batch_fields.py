"""The fields of a user's batch: the paths of its KJTs, and its other tensors.

A TorchRec user's batch has any type that the model accepts: a dataclass, a tuple, a single KJT. Instead of tracing the
model like TorchRec, this package calls it once (sharded_modules.py), and searches the batch for the inputs of its
sharded modules.
"""

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor
from torchrec.streamable import Multistreamable

Path = tuple[tuple[str, Any], ...]
"""("attribute", name) or ("item", key), from the outside in; empty for the batch itself."""

_DEPTH = 4
_NONE: Mapping[int, Any] = {}
_LEAF, _KJT, _MAPPING, _SEQUENCE, _FIELDS = "leaf", "KJT", "mapping", "sequence", "fields"
"""Kinds of values; a KJT has fields too."""


@contextmanager
def forward_replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Makes `module(...)` run `forward` within the block, including its hooks."""
    before = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before


@contextmanager
def forwards_replaced(forwards: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Applies forward_replaced to several modules."""
    with ExitStack() as stack:
        for module, forward in forwards.items():
            stack.enter_context(forward_replaced(module, forward))
        yield


def find_path(batch: Any, value: Any) -> Path | None:
    """Returns the path of the object `value` in `batch`; None if it is not in the batch."""
    return next((path for path, found in _walk(batch, (), _DEPTH) if found is value), None)


def kjts_of(batch: Any) -> list[KeyedJaggedTensor]:
    """Returns all KJTs in `batch`."""
    return [found for _, found in _walk(batch, (), _DEPTH) if isinstance(found, KeyedJaggedTensor)]


def parts_of(batch: Any) -> tuple[list[KeyedJaggedTensor], list[Any]]:
    """Returns the KJTs of a batch, each once, and all other leaves, in one pass."""
    kjts: dict[int, KeyedJaggedTensor] = {}
    rest: list[Any] = []
    _sort_parts((batch,), kjts, rest)
    return list(kjts.values()), rest


# A function within another one that calls itself would be a reference cycle, which keeps what it has seen, batches in
# GPU memory, until Python collects cycles; the training loop switches that off.
def _sort_parts(values: Iterable[Any], kjts: dict[int, KeyedJaggedTensor], rest: list[Any]) -> None:
    for value in values:
        kind = _kind(value.__class__)
        if kind is _LEAF:
            rest.append(value)
        elif kind is _KJT:
            kjts[id(value)] = value
        elif kind is _MAPPING:
            _sort_parts(value.values(), kjts, rest)
        elif kind is _SEQUENCE:
            _sort_parts(value, kjts, rest)
        else:
            _sort_parts([item for _, item in _attributes(value)], kjts, rest)


def follow(batch: Any, path: Path) -> Any:
    """Returns the value at `path`."""
    for kind, name in path:
        batch = getattr(batch, name) if kind == "attribute" else batch[name]
    return batch


def map_fields(batch: Any, function: Callable[[Any], Any], replaced: Mapping[int, Any] = _NONE) -> Any:
    """Returns a copy of the batch with function(leaf) for every leaf; a leaf is a tensor or has no known fields.

    replaced: replacements, by id, for objects that are not searched.
    """
    if id(batch) in replaced:
        return replaced[id(batch)]
    kind = _kind(batch.__class__)
    if kind is _LEAF:
        return function(batch)
    if kind is _SEQUENCE:
        items = [map_fields(item, function, replaced) for item in batch]
        return type(batch)(*items) if _is_named(batch) else type(batch)(items)
    if isinstance(batch, dict | UserDict):  # a copy of other mappings may share the items
        duplicate = copy.copy(batch)
        for key, item in batch.items():
            duplicate[key] = map_fields(item, function, replaced)
        return duplicate
    if kind is _MAPPING:
        return {key: map_fields(item, function, replaced) for key, item in batch.items()}
    duplicate = copy.copy(batch)
    for name, item in _attributes(batch):
        object.__setattr__(duplicate, name, map_fields(item, function, replaced))
    return duplicate


def copy_of(batch: Any, kept: Mapping[int, Any] = _NONE) -> Any:
    """Returns the batch over copies of its tensors, also of those in KJTs, for a call that may change them in place.

    kept: by id, KJTs that stay themselves.
    """
    copies: dict[int, Tensor] = {}

    def copied(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return copies.setdefault(id(leaf), leaf.clone())

    with torch.no_grad():
        return map_fields(batch, copied, kept)


def over_same_memory(batch: Any) -> Any:
    """Returns the batch in new containers and new tensors over its tensors' memory, in which a forward may set fields
    and change shapes without a trace in `batch`."""
    return map_fields(batch, lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf)


def leaves(batch: Any, skipped: Container[int] = _NONE) -> Iterator[Any]:
    """Yields the leaves that map_fields passes to its function, in the same order, without a copy."""
    if id(batch) in skipped:
        return
    if _is_leaf(batch):
        yield batch
        return
    for _, item in _steps(batch):
        yield from leaves(item, skipped)


def leaf_names(batch: Any, skipped: Container[int] = _NONE, name: str = "batch") -> Iterator[str]:
    """Yields a readable name of each leaf, such as batch.dense or batch["ids"][3]."""
    if id(batch) in skipped:
        return
    if _is_leaf(batch):
        yield name
        return
    for (kind, key), item in _steps(batch):
        yield from leaf_names(item, skipped, f"{name}.{key}" if kind == "attribute" else f"{name}[{key!r}]")


def buffers_outside(model: nn.Module, sharded: Iterable[nn.Module]) -> list[Tensor]:
    """Returns the model's buffers apart from those of `sharded`."""
    tables = {id(buffer) for module in sharded for buffer in module.buffers()}
    return [buffer for buffer in model.buffers() if id(buffer) not in tables]


def snapshot(model: nn.Module, sharded: Iterable[nn.Module], device: torch.device) -> Callable[[], None]:
    """Returns a function that restores the state changed by a call of the model: random numbers, and buffers outside
    `sharded`."""
    before = [(buffer, buffer.clone()) for buffer in buffers_outside(model, sharded)]
    random = torch.get_rng_state()
    on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def put_back() -> None:
        torch.set_rng_state(random)
        if on_device is not None:
            torch.cuda.set_rng_state(on_device, device)
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)

    return put_back


def _walk(value: Any, path: Path, depth: int) -> Iterator[tuple[Path, Any]]:
    yield path, value
    if depth > 0 and not isinstance(value, KeyedJaggedTensor):
        for step, item in _steps(value):
            yield from _walk(item, (*path, step), depth - 1)


def _steps(value: Any) -> Iterator[tuple[tuple[str, Any], Any]]:
    kind = _kind(value.__class__)
    if kind is _MAPPING:
        yield from ((("item", key), item) for key, item in value.items())
    elif kind is _SEQUENCE:
        yield from ((("item", i), item) for i, item in enumerate(value))
    elif kind is not _LEAF:
        yield from ((("attribute", name), item) for name, item in _attributes(value))


def _is_named(value: Any) -> bool:
    """Whether a tuple or list is a named tuple."""
    return isinstance(value, tuple) and hasattr(value, "_fields")


def _is_leaf(value: Any) -> bool:
    return _kind(value.__class__) is _LEAF


@cache
def _kind(of: type) -> str:
    """Returns how values of a type are searched. Cached, because abstract classes take long to ask."""
    if issubclass(of, Tensor):
        return _LEAF
    if issubclass(of, KeyedJaggedTensor):
        return _KJT
    if issubclass(of, Mapping):
        return _MAPPING
    if issubclass(of, (tuple, list)):
        return _SEQUENCE
    has_fields = issubclass(of, (Multistreamable, SimpleNamespace)) or dataclasses.is_dataclass(of)
    return _FIELDS if has_fields and not issubclass(of, type) else _LEAF


def _attributes(value: Any) -> Iterable[tuple[str, Any]]:
    kind: Any = type(value)
    own = getattr(value, "__dict__", None) or {}
    if not (slots := _slots(kind)):
        return own.items()
    of_slots = [(name, getattr(value, name)) for name in slots if name not in own and hasattr(value, name)]
    return [*of_slots, *own.items()]


@cache
def _slots(kind: type) -> tuple[str, ...]:
    """Returns the names of a type's slots."""
    names = (name for base in kind.__mro__ for name in getattr(base, "__slots__", ()))
    return tuple(name for name in dict.fromkeys(names) if name not in ("__dict__", "__weakref__"))
