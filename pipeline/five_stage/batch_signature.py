"""The form of a batch: the properties that a captured graph cannot change from one batch to the next."""

from typing import Any

import torch
from torch import Tensor

from .embedding_outputs import EmbeddingOutputs

Form = tuple[tuple[Any, ...], tuple[Any, ...]]
"""Signature of the batch's fields; of all else."""

_SHOWN = 60  # characters of a field's value in a message


def form_of(fields: list[Any], outputs: EmbeddingOutputs, device: torch.device) -> Form:
    """Returns the properties that a graph cannot change: shapes and dtypes, the value of any field that is no tensor,
    autocast. The number of tokens of unpooled embeddings is not part of it."""
    kind = device.type
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    of_values = (
        (values.shape[1:] if jagged else values.shape, values.dtype)
        for values, jagged in zip(outputs.values, outputs.jagged, strict=True)
    )
    of_lengths = ((lengths.shape, lengths.dtype) for lengths in outputs.lengths)
    of_fields = ((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf) for leaf in fields)
    return tuple(of_fields), (*of_values, *of_lengths, repr(autocast))


def difference(names: list[str], outputs: EmbeddingOutputs, first: Form, form: Form) -> str:
    """Returns the first difference between forms. names: of the batch's fields of the latter, whose `outputs` are."""
    if len(first[0]) != len(form[0]):
        return f"a batch with {len(form[0])} fields besides its KJTs, where the first had {len(first[0])}"
    lengths = ["the lengths of a sequence"] * len(outputs.lengths)
    names = [*names, *outputs.value_names, *lengths, "autocast's dtype"]
    name, was, now = next(
        of for of in zip(names, (*first[0], *first[1]), (*form[0], *form[1]), strict=True) if of[1] != of[2]
    )
    return f"{name} is {_shown(now)}, where the first had {_shown(was)}"


def _shown(of_form: Any) -> str:
    if isinstance(of_form, tuple):
        shape, dtype = of_form
        return f"{str(dtype).removeprefix('torch.')} of shape {tuple(shape)}"
    return of_form if len(of_form) <= _SHOWN else f"{of_form[: _SHOWN - 3]}..."
