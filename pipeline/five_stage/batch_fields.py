"""The fields of a batch that is no class of ours: where its KJT is, and which tensors stand beside it.

A TorchRec user's batch is whatever the model takes: a dataclass, a tuple, the KJT alone. Instead of tracing the model
as TorchRec does, the model is called once, up to its embedding collection, and what arrives there is looked for.
"""

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor
from torchrec.streamable import Multistreamable

Path = tuple[tuple[str, Any], ...]
"""("attribute", name) or ("item", key), from the batch inwards; empty for the batch itself."""

_DEPTH = 4


@contextmanager
def forward_replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Within it `module(...)` runs `forward`, its hooks included."""
    before = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before


def find_features(model: nn.Module, collection: nn.Module, batch: Any, device: torch.device) -> Path:
    """Finds where in `batch`, on `device`, the KJT is that `model(batch)` gives to `collection`.

    Calls the model, without gradients, up to there; random numbers and buffers are put back afterwards. ValueError
    where the collection is not called, or with a KJT that the batch does not hold as it is.
    """
    put_back = snapshot(model, collection, device)
    try:
        with forward_replaced(collection, _arrive), torch.no_grad():
            model(batch)
    except _ArrivedError as arrived:
        features = arrived.features
    else:
        raise ValueError("the model's forward does not call its ShardedEmbeddingBagCollection: nothing to pipeline")
    finally:
        put_back()
    path = next((path for path, value in _walk(batch, (), _DEPTH) if value is features), None)
    if path is None or not isinstance(features, KeyedJaggedTensor):
        raise ValueError(
            f"the model gives its ShardedEmbeddingBagCollection a {type(features).__name__} that is no field of the "
            f"batch ({type(batch).__name__}): compute it before the batch comes to the pipeline, whose input dist "
            "of the next batch runs before the model sees it"
        )
    return path


def follow(batch: Any, path: Path) -> Any:
    """The value at `path`."""
    for kind, name in path:
        batch = getattr(batch, name) if kind == "attribute" else batch[name]
    return batch


def map_fields(batch: Any, function: Callable[[Any], Any], features: Any = None, replacement: Any = None) -> Any:
    """A copy of the batch with function(leaf) for every leaf, which is a tensor or anything without known fields.

    The object `features`, where given, becomes `replacement` and is not looked into.
    """

    def rebuild(value: Any) -> Any:
        if features is not None and value is features:
            return replacement
        if _is_leaf(value):
            return function(value)
        if isinstance(value, dict | UserDict):  # of others a copy may share the items
            duplicate = copy.copy(value)
            for key, item in value.items():
                duplicate[key] = rebuild(item)
            return duplicate
        if isinstance(value, Mapping):
            return {key: rebuild(item) for key, item in value.items()}
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(rebuild, value))
        if isinstance(value, (tuple, list)):
            return type(value)(map(rebuild, value))
        duplicate = copy.copy(value)
        for name, item in _attributes(value):
            object.__setattr__(duplicate, name, rebuild(item))
        return duplicate

    return rebuild(batch)


def leaves(batch: Any, features: Any = None) -> Iterator[Any]:
    """Returns the leaves that map_fields gives its function, in the same order, without a copy."""
    if features is not None and batch is features:
        return
    if _is_leaf(batch):
        yield batch
        return
    for _, item in _steps(batch):
        yield from leaves(item, features)


def leaf_names(batch: Any, features: Any = None, name: str = "batch") -> Iterator[str]:
    """Returns a readable name of each leaf, such as batch.dense or batch["ids"][3]."""
    if features is not None and batch is features:
        return
    if _is_leaf(batch):
        yield name
        return
    for (kind, key), item in _steps(batch):
        yield from leaf_names(item, features, f"{name}.{key}" if kind == "attribute" else f"{name}[{key!r}]")


def snapshot(model: nn.Module, collection: nn.Module, device: torch.device) -> Callable[[], None]:
    """A function that puts back what a call of the model changes: random numbers, and buffers outside `collection`."""
    tables = set(map(id, collection.buffers()))
    before = [(buffer, buffer.clone()) for buffer in model.buffers() if id(buffer) not in tables]
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


class _ArrivedError(BaseException):  # not an Exception: a model that catches those must not catch this
    def __init__(self, features: Any) -> None:
        self.features = features


def _arrive(*args: Any, **kwargs: Any) -> NoReturn:
    raise _ArrivedError(next(iter((*args, *kwargs.values())), None))


def _walk(value: Any, path: Path, depth: int) -> Iterator[tuple[Path, Any]]:
    yield path, value
    if depth > 0 and not isinstance(value, KeyedJaggedTensor):
        for step, item in _steps(value):
            yield from _walk(item, (*path, step), depth - 1)


def _steps(value: Any) -> Iterator[tuple[tuple[str, Any], Any]]:
    if isinstance(value, Mapping):
        yield from ((("item", key), item) for key, item in value.items())
    elif isinstance(value, (tuple, list)):
        yield from ((("item", i), item) for i, item in enumerate(value))
    elif _has_fields(value):
        yield from ((("attribute", name), item) for name, item in _attributes(value))


def _is_leaf(value: Any) -> bool:
    return isinstance(value, Tensor) or not (isinstance(value, (Mapping, tuple, list)) or _has_fields(value))


def _has_fields(value: Any) -> bool:
    known = isinstance(value, (Multistreamable, SimpleNamespace)) or dataclasses.is_dataclass(value)
    return known and not isinstance(value, type)


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    for name in dict.fromkeys([*slots, *getattr(value, "__dict__", ())]):
        if hasattr(value, name) and name not in ("__dict__", "__weakref__"):
            yield name, getattr(value, name)
