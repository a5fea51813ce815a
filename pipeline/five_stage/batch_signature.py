"""The form of a batch: the properties that a captured graph cannot change from one batch to the next."""

from collections.abc import Iterable
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from . import reasons
from .embedding_outputs import EmbeddingOutputs

Form = tuple[tuple[Any, ...], tuple[Any, ...]]
"""Signature of the batch's fields, and of everything else."""

Kind = tuple[tuple[Any, ...], tuple[int, ...]]

CONSTANT = (int, float, complex, str, bytes, Enum, torch.dtype, torch.device, type(None))
"""Types, beside tensors, whose values a graph may keep: of a batch's fields, and of a captured model's output."""
_PLAIN = {*CONSTANT, bool}
_SHOWN = 60  # characters of a field's value in a message


class _OfArray(NamedTuple):
    shape: tuple[int, ...]
    dtype: str
    data: bytes


def form_of(fields: list[Any], outputs: EmbeddingOutputs, device: torch.device) -> Form | None:
    """Returns the properties that a graph cannot change: shapes and dtypes, the value of any field that is no tensor on
    `device`, autocast. None where a field's value cannot be compared. The number of tokens of unpooled embeddings is
    not part of it."""
    of_fields = tuple(_by_value(leaf) if _on_host(leaf, device) else signature(leaf) for leaf in fields)
    if None in of_fields:
        return None
    of_values = (
        (values.shape[1:] if jagged else values.shape, values.dtype)
        for values, jagged in zip(outputs.values, outputs.jagged, strict=True)
    )
    of_lengths = ((lengths.shape, lengths.dtype) for lengths in outputs.lengths)
    return of_fields, (*of_values, *of_lengths, autocast_of(device))


def autocast_of(device: torch.device) -> str:
    """Returns autocast's type in words."""
    if not torch.is_autocast_enabled(device.type):
        return "off"
    return str(torch.get_autocast_dtype(device.type)).removeprefix("torch.")


def signature(leaf: Any) -> Any:
    """Returns what a graph cannot change of a field: a tensor's shape and dtype, else the value. None for a value of a
    type whose values are not known to differ where their text does: the text of an object may be its address."""
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype
    if type(leaf) in _PLAIN:
        return repr(leaf)
    if isinstance(leaf, Enum):
        return f"{type(leaf).__module__}.{type(leaf).__qualname__}.{leaf.name}"
    if isinstance(leaf, np.ndarray | np.generic) and not leaf.dtype.hasobject:
        return _OfArray(leaf.shape, str(leaf.dtype), leaf.tobytes())
    return None


def _on_host(leaf: Any, device: torch.device) -> bool:
    """Whether a field is a tensor in host memory, whose values a forward can decide by without a read of the device."""
    return isinstance(leaf, Tensor) and leaf.is_cpu and device.type != "cpu"


def _by_value(leaf: Tensor) -> _OfArray:
    data = leaf.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return _OfArray(tuple(leaf.shape), str(leaf.dtype).removeprefix("torch."), data.tobytes())


def why_on_host(names: Iterable[str], fields: Iterable[Any], device: torch.device) -> str | None:
    """Returns the first tensor of a batch that is not on the device, as an obstacle; None without one. names: of the
    fields."""
    on_host = (name for name, leaf in zip(names, fields, strict=True) if _on_host(leaf, device))
    return next((reasons.ON_HOST(field=name) for name in on_host), None)


def kind_of(fields: Iterable[Any], rows: Iterable[int]) -> Kind:
    """Returns the shapes of a batch's tensors, and the numbers of its looked-up vectors."""
    return tuple(of.shape for of in fields if isinstance(of, Tensor)), tuple(rows)


def why_no_form(names: Iterable[str], fields: Iterable[Any]) -> str | None:
    """Returns the first field of a batch whose value cannot be compared, as an obstacle; None without one. names: of
    the fields."""
    for name, leaf in zip(names, fields, strict=True):
        if signature(leaf) is None:
            return reasons.OBJECT(field=name, kind=type(leaf).__name__)
    return None


def difference(names: list[str], outputs: EmbeddingOutputs, first: Form, form: Form) -> str:
    """Returns the first difference between forms. names: of the batch's fields in `form`, like its `outputs`."""
    if len(first[0]) != len(form[0]):
        return f"a batch with {len(form[0])} fields besides its KJTs, where the first had {len(first[0])}"
    lengths = ["the lengths of a sequence"] * len(outputs.lengths)
    names = [*names, *outputs.value_names, *lengths, "autocast's dtype"]
    name, was, now = next(
        of for of in zip(names, (*first[0], *first[1]), (*form[0], *form[1]), strict=True) if of[1] != of[2]
    )
    return f"{name} is {_shown(now)}, where the first had {_shown(was)}"


def _shown(of_form: Any) -> str:
    if isinstance(of_form, _OfArray):
        return f"an array of {of_form.dtype} of shape {of_form.shape} with other values"
    if isinstance(of_form, tuple):
        shape, dtype = of_form
        return f"{str(dtype).removeprefix('torch.')} of shape {tuple(shape)}"
    return of_form if len(of_form) <= _SHOWN else f"{of_form[: _SHOWN - 3]}..."
