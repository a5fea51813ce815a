"""The forms of batches that have graphs of whole iterations."""

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torchrec import KeyedJaggedTensor

from .batch_fields import parts_of
from .batch_signature import signature
from .trimmed.static_dist import Sizes

Form = tuple[Any, ...]
_DTYPE = attrgetter("dtype")


class BatchForms:
    """A form for each combination of the numbers of ids that modules declare (batch_ids): one if all declare one.

    A form has the shapes of the first batch with these numbers of ids. Its fields may differ from those of the very
    first batch in their first dimension, like a field with one entry per id, and in nothing else.
    """

    def __init__(self, batch: Any, features: Sequence[KeyedJaggedTensor], declared: Sequence[Sizes]) -> None:
        """batch: the first one. features: the KJT of each called module. declared: sizes of these modules, for all
        keys of these KJTs together."""
        kjts, rest = parts_of(batch)
        places = {id(kjt): i for i, kjt in enumerate(kjts)}
        self._of_modules = [places[id(kjt)] for kjt in features]
        self._used = sorted(set(self._of_modules))
        self._declared = list(declared)
        self._kinds = [_kinds(sizes, kjt) for sizes, kjt in zip(declared, features, strict=True)]
        self._alike = _alike(self._of(kjts), rest)
        self._forms: dict[int, BatchForm] = {}
        self.number(batch)

    def __getitem__(self, number: int) -> "BatchForm":
        """Returns a form by its number."""
        return self._forms[number]

    @property
    def several(self) -> bool:
        """Whether batches may have more than one form."""
        return any(len(kinds) > 1 for kinds in self._kinds)

    def number(self, batch: Any) -> int | None:
        """Returns the number of a batch's form, which is the same on all ranks for the same numbers of ids; None if it
        has no form. Lengths on the device are trusted; others are read."""
        kjts, rest = parts_of(batch)
        if self._used and self._used[-1] >= len(kjts):
            return None
        number, chosen = 0, []
        for place, kinds in zip(self._of_modules, self._kinds, strict=True):
            kind = kinds.get(kjts[place].values().numel()) if len(kinds) > 1 else 0
            if kind is None:
                return None
            number = number * len(kinds) + kind
            chosen.append(kind)
        kjts = self._of(kjts)
        if number in self._forms:
            return number if self._forms[number].fits(kjts, rest) else None
        if _alike(kjts, rest) != self._alike:
            return None
        form = BatchForm(self._used, kjts, rest, list(zip(self._declared, chosen, strict=True)))
        if not form.fits(kjts, rest):
            return None
        self._forms[number] = form
        return number

    def _of(self, kjts: Sequence[KeyedJaggedTensor]) -> list[KeyedJaggedTensor]:
        return [kjts[i] for i in self._used]


class BatchForm:
    """The common properties of all batches of a graph: shapes, dtypes and values of fields, keys and numbers of ids.

    KJTs that no module receives are ignored: the graph contains nothing that reads them.
    """

    def __init__(
        self,
        used: Sequence[int],
        kjts: Sequence[KeyedJaggedTensor],
        rest: Sequence[Any],
        declared: Sequence[tuple[Sizes, int]],
    ) -> None:
        """used: indices of the batch's KJTs that a module receives; kjts: these KJTs. rest: the batch's other leaves.
        declared: sizes of the modules, each with the kind of batch, for all keys of `kjts` together."""
        self._used = list(used)
        self._form = _form_of(kjts, rest)
        self._ids = [[_ids_of_key(key, declared, kjt.stride()) for key in list(kjt.keys())] for kjt in kjts]
        self._even = [all(_is_even(key, declared) for key in list(kjt.keys())) for kjt in kjts]
        self.vary = [not even for even in self._even]
        """Whether the lengths of each used KJT change from batch to batch."""
        self._expected: list[Tensor] = []
        self._dtypes: list[torch.dtype] = []

    def used(self, kjts: Sequence[KeyedJaggedTensor]) -> list[KeyedJaggedTensor]:
        """Returns the batch's KJTs that a module receives."""
        return [kjts[i] for i in self._used]

    def fits(self, kjts: Sequence[KeyedJaggedTensor], rest: Sequence[Any]) -> bool:
        """Whether a batch, with these used KJTs and other leaves, has this form."""
        return _form_of(kjts, rest) == self._form and self._has_declared(kjts)

    def _has_declared(self, kjts: Sequence[KeyedJaggedTensor]) -> bool:
        """Whether all bags have the declared sizes, or all features the declared number of ids, if the host knows."""
        own: list[Tensor] = []
        for kjt, even in zip(kjts, self._even, strict=True):
            if not kjt.values().is_cpu:
                return True
            lengths = kjt.lengths()
            own.append(lengths if even else lengths.view(-1, kjt.stride()).sum(dim=1))
        if (dtypes := [*map(_DTYPE, own)]) != self._dtypes:
            self._dtypes = dtypes
            self._expected = [
                torch.tensor([n // kjt.stride() for n in ids], dtype=of.dtype).repeat_interleave(kjt.stride())
                if even
                else torch.tensor(ids, dtype=of.dtype)
                for of, ids, kjt, even in zip(own, self._ids, kjts, self._even, strict=True)
            ]
        return all(map(torch.equal, own, self._expected))


def _kinds(sizes: Sizes, kjt: KeyedJaggedTensor) -> dict[int, int]:
    """Returns the kind of a batch by the number of ids of a module's KJT; the first kind with that number."""
    kinds = reversed(range(len(sizes.per_batch)))
    return {sum(sizes.ids(key, kjt.stride(), kind) for key in list(kjt.keys())): kind for kind in kinds}


def _is_even(key: str, declared: Sequence[tuple[Sizes, int]]) -> bool:
    return any(key in sizes.per_bag for sizes, _ in declared)


def _ids_of_key(key: str, declared: Sequence[tuple[Sizes, int]], stride: int) -> int:
    """Returns the number of a feature's ids in a batch."""
    return next(sizes.ids(key, stride, kind) for sizes, kind in declared if key in sizes)


def _form_of(kjts: Sequence[KeyedJaggedTensor], rest: Sequence[Any]) -> Form:
    of_fields = [_value_of(leaf) for leaf in rest]
    of_kjts = [(kjt.keys(), kjt.stride(), *_layout(kjt.values()), *_layout(kjt.weights_or_none())) for kjt in kjts]
    return of_fields, of_kjts


def _alike(kjts: Sequence[KeyedJaggedTensor], rest: Sequence[Any]) -> Form:
    """Returns the properties common to batches of all forms."""
    of_fields = [(leaf.shape[1:], leaf.dtype) if isinstance(leaf, Tensor) else _value_of(leaf) for leaf in rest]
    return of_fields, [(kjt.keys(), kjt.stride(), kjt.values().dtype) for kjt in kjts]


def _value_of(leaf: Any) -> Any:
    """Returns a field's signature; what equals nothing else where it has none."""
    found = signature(leaf)
    return object() if found is None else found


def _layout(tensor: Tensor | None) -> tuple[Any, ...]:
    return (None,) if tensor is None else (tensor.shape, tensor.dtype)
