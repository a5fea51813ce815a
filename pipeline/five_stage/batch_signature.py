"""The form of a batch: what a captured graph cannot change from one batch to the next."""

from typing import Any

import torch
from torch import Tensor

_SHOWN = 60  # characters of a field's value in a message


def form_of(fields: list[Any], pooled: Tensor) -> list[Any]:
    """Returns what a graph cannot change: shapes and dtypes, the value of any field that is no tensor, autocast."""
    kind = pooled.device.type
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    return [
        (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf) for leaf in (*fields, pooled, autocast)
    ]


def difference(names: list[str], first: list[Any], form: list[Any]) -> str:
    """The first difference between forms. names: of the fields of the latter."""
    if len(first) != len(form):
        return f"a batch with {len(form) - 2} fields besides its KJT, where the first had {len(first) - 2}"
    name, was, now = next(of for of in zip(names, first, form, strict=True) if of[1] != of[2])
    return f"{name} is {_shown(now)}, where the first had {_shown(was)}"


def _shown(of_form: Any) -> str:
    if isinstance(of_form, tuple):
        shape, dtype = of_form
        return f"{str(dtype).removeprefix('torch.')} of shape {tuple(shape)}"
    return of_form if len(of_form) <= _SHOWN else f"{of_form[: _SHOWN - 3]}..."
