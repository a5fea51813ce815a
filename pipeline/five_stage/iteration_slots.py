"""Memory that graphs of whole iterations read: batches as they come, and batches whose ids have been distributed.

Lengths are no part of it: of declared multi-hot sizes they are the same for every batch.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torchrec import KeyedJaggedTensor
from torchrec.distributed.embedding_types import KJTList

from .batch_fields import kjts_of, leaves, map_fields
from .captured import FeaturesRead
from .input_dist import Distribution

Form = tuple[Any, ...]


class BatchForm:
    """What all batches of a graph have in common: shapes, dtypes and values of fields, keys and lengths of KJTs."""

    def __init__(self, batch: Any, kjts: Sequence[KeyedJaggedTensor], multi_hot_sizes: Mapping[str, int]) -> None:
        """kjts: of the batch, each once. multi_hot_sizes: of all their keys."""
        self._form = _form_of(batch, kjts)
        of_keys = ([multi_hot_sizes[key] for key in list(kjt.keys())] for kjt in kjts)
        self._lengths = [
            torch.tensor(of).repeat_interleave(kjt.stride()) for of, kjt in zip(of_keys, kjts, strict=True)
        ]
        self._checked: list[Tensor] = []

    def fits(self, batch: Any, kjts: Sequence[KeyedJaggedTensor]) -> bool:
        """Returns whether a batch has this form. Lengths that are on the device are trusted; others are read."""
        return _form_of(batch, kjts) == self._form and self.has_lengths(kjts)

    def has_lengths(self, kjts: Sequence[KeyedJaggedTensor]) -> bool:
        """Returns whether all bags have the declared sizes, as far as the host knows."""
        if any(kjt.device().type != "cpu" for kjt in kjts):
            return True
        own = [kjt.lengths() for kjt in kjts]
        if [lengths.dtype for lengths in own] != [lengths.dtype for lengths in self._checked]:
            self._checked = [of.to(lengths.dtype) for of, lengths in zip(self._lengths, own, strict=True)]
        return all(map(torch.equal, own, self._checked))


def _form_of(batch: Any, kjts: Sequence[KeyedJaggedTensor]) -> Form:
    fields = leaves(batch, set(map(id, kjts)))
    of_fields = [(leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf) for leaf in fields]
    of_kjts = [(kjt.keys(), kjt.stride(), *_layout(kjt.values()), *_layout(kjt.weights_or_none())) for kjt in kjts]
    return of_fields, of_kjts


def _layout(tensor: Tensor | None) -> tuple[Any, ...]:
    return (None,) if tensor is None else (tensor.shape, tensor.dtype)


def distinct(batch: Any, features: Sequence[KeyedJaggedTensor]) -> list[KeyedJaggedTensor]:
    """Returns the KJTs that the modules are given and all others of the batch, each once."""
    return list({id(kjt): kjt for kjt in (*features, *kjts_of(batch))}.values())


def tensors_of(batch: Any, kjts: Iterable[KeyedJaggedTensor]) -> list[Tensor]:
    """Returns the tensors of a batch beside its KJTs, then the ids of these, with their weights."""
    kjts = list(kjts)
    return [*fields_of(batch, kjts), *(tensor for kjt in kjts for tensor in _ids_of(kjt))]


def fields_of(batch: Any, kjts: Iterable[KeyedJaggedTensor]) -> list[Tensor]:
    """Returns the tensors of a batch beside its KJTs."""
    return [leaf for leaf in leaves(batch, set(map(id, kjts))) if isinstance(leaf, Tensor)]


def copy_by_type(into: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Copies tensors [of any shapes and types] into others of the same ones, with a launch for each type."""
    by_type: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for to, of in zip(into, tensors, strict=True):
        pair = by_type.setdefault(of.dtype, ([], []))
        pair[0].append(to)
        pair[1].append(of)
    with torch.no_grad():
        for tos, ofs in by_type.values():
            torch._foreach_copy_(tos, ofs, non_blocking=True)


class Staging:
    """A batch as it came to the device, for an input dist to read."""

    def __init__(self, batch: Any, features: Sequence[KeyedJaggedTensor]) -> None:
        """Of the form of a batch on the device. features: what each module that is called is given of it."""
        kjts = distinct(batch, features)
        own = {id(kjt): _over(kjt, torch.zeros_like) for kjt in kjts}
        self.features = [own[id(kjt)] for kjt in features]
        """The KJT of each module."""
        self.fields = [torch.zeros_like(field) for field in fields_of(batch, kjts)]
        self._memory = [*self.fields, *(tensor for kjt in own.values() for tensor in _ids_of(kjt))]
        self.holds: Any = None
        """Whose batch is in it."""

    def fill(self, batch: Any, features: Sequence[KeyedJaggedTensor]) -> None:
        """Copies a batch on the device, on the current stream."""
        copy_by_type(self._memory, tensors_of(batch, distinct(batch, features)))


class Slot:
    """A batch to train on: its fields, and the ids that this rank looks up."""

    def __init__(self, batch: Any, features: Sequence[KeyedJaggedTensor], distribution: Distribution) -> None:
        """Of the form of a batch on the device. distribution: of this batch, done; its lengths and contexts are those
        of all batches."""
        kjts = distinct(batch, features)
        stand_ins = {id(kjt): FeaturesRead() for kjt in kjts}
        self.batch = map_fields(batch, _empty_like, stand_ins)
        self.stand_ins = [stand_ins[id(kjt)] for kjt in features]
        """What the model gives to each module in place of its KJT."""
        self._fields = [leaf for leaf in leaves(self.batch, set(map(id, stand_ins.values()))) if _is_tensor(leaf)]
        self.contexts = distribution.contexts
        self.features = [KJTList([_over(kjt, torch.zeros_like) for kjt in of]) for of in distribution.features]
        """What each module looks up."""
        self.holds: Any = None
        """Whose batch is in it."""

    def fill(self, fields: Sequence[Tensor], features: Sequence[KJTList]) -> None:
        """Copies a batch and what its input dist has made, on the current stream."""
        copy_by_type([*self._fields, *_ids(self.features)], [*fields, *_ids(features)])


def _ids(features: Sequence[KJTList]) -> list[Tensor]:
    return [tensor for of_module in features for kjt in of_module for tensor in _ids_of(kjt)]


def _ids_of(kjt: KeyedJaggedTensor) -> list[Tensor]:
    weights = kjt.weights_or_none()
    return [kjt.values()] if weights is None else [kjt.values(), weights]


def _over(kjt: KeyedJaggedTensor, make: Any) -> KeyedJaggedTensor:
    """Returns the same KJT over new ids and weights; lengths and offsets are the same memory."""
    weights = kjt.weights_or_none()
    return KeyedJaggedTensor(
        keys=kjt.keys(),
        values=make(kjt.values()),
        weights=None if weights is None else make(weights),
        lengths=kjt.lengths_or_none(),
        offsets=kjt.offsets_or_none(),
        stride=kjt.stride(),
        length_per_key=kjt.length_per_key_or_none(),
        offset_per_key=kjt.offset_per_key_or_none(),
    )


def _empty_like(leaf: Any) -> Any:
    return torch.zeros_like(leaf) if isinstance(leaf, Tensor) else leaf


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, Tensor)
