"""Memory that graphs of whole iterations read: incoming batches, and batches whose ids have been distributed.

Lengths are not part of it: with declared multi-hot sizes they are the same in every batch.
"""

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torchrec import KeyedJaggedTensor
from torchrec.distributed.embedding_types import KJTList

from .batch_fields import leaves, map_fields, parts_of
from .batch_forms import BatchForm
from .captured import FeaturesRead
from .copies import CopyTogether
from .feature_processors import with_weights
from .input_dist import Distribution

TURNS = 2
"""Graphs that take turns: one reads the slot that the other has filled."""


def fields_of(batch: Any) -> list[Tensor]:
    """Returns the tensors of a batch beside its KJTs."""
    return _tensors(parts_of(batch)[1])


def batch_bytes(batch: Any) -> int:
    """Returns the bytes of a batch's fields, ids and weights: a measure of its size."""
    kjts, _ = parts_of(batch)
    return sum(tensor.nbytes for tensor in (*fields_of(batch), *(of for kjt in kjts for of in _ids_of(kjt))))


class Staging:
    """A batch as it came to the device, for an input dist to read."""

    def __init__(self, batch: Any, features: Sequence[KeyedJaggedTensor], form: BatchForm) -> None:
        """Makes memory in the form of a batch on the device. features: the KJT of each module that is called."""
        kjts, rest = parts_of(batch)
        of_form = zip(form.used(kjts), form.vary, strict=True)
        own = {id(kjt): _over(kjt, lengths_too=varies) for kjt, varies in of_form}
        self._form = form
        self._features = [own[id(kjt)] for kjt in features]
        self.fields = [torch.zeros_like(field) for field in _tensors(rest)]
        self._memory = [*self.fields, *self._of_kjts(list(own.values()))]
        self._copy = CopyTogether(self._memory)
        self.holds: Any = None
        """Whose batch is in it."""

    @property
    def nbytes(self) -> int:
        """Bytes of its memory."""
        return sum(tensor.nbytes for tensor in self._memory)

    @property
    def features(self) -> list[KeyedJaggedTensor]:
        """Returns the KJT of each module, see `_again`."""
        again = {id(kjt): _again(kjt) for kjt in self._features}
        return [again[id(kjt)] for kjt in self._features]

    def fill(self, batch: Any) -> None:
        """Copies a batch on the device, on the current stream."""
        kjts, rest = parts_of(batch)
        self._copy([*_tensors(rest), *self._of_kjts(self._form.used(kjts))])

    def hold(self, batch: Any) -> None:
        """Copies a batch in flight, and holds it from now on."""
        self.fill(batch.batch)
        self.holds = batch

    def _of_kjts(self, kjts: Sequence[KeyedJaggedTensor]) -> list[Tensor]:
        tensors: list[Tensor] = []
        for kjt, varies in zip(kjts, self._form.vary, strict=True):
            tensors += _ids_of(kjt)
            if varies:
                tensors.append(kjt.lengths())
        return tensors


class Slot:
    """A batch to train on: its fields, and the ids that this rank looks up."""

    def __init__(
        self,
        batch: Any,
        features: Sequence[KeyedJaggedTensor],
        distribution: Distribution,
        varying: Sequence[Sequence[int]],
    ) -> None:
        """Allocates memory in the form of a batch on the device. distribution: this batch's finished distribution; all
        batches share its lengths of looked-up ids, except for the KJTs of each module in `varying`."""
        stand_ins = {id(kjt): FeaturesRead() for kjt in parts_of(batch)[0]}
        self.batch = map_fields(batch, _empty_like, stand_ins)
        self.stand_ins = [stand_ins[id(kjt)] for kjt in features]
        """Stand-ins that the model gives to each module in place of its KJT."""
        self._fields = _tensors(leaves(self.batch, set(map(id, stand_ins.values()))))
        self.contexts = [_own_context(context) for context in distribution.contexts]
        """TorchRec's, for each module's compute_and_output_dist."""
        self._varying = [list(of_module) for of_module in varying]
        self._features = [
            KJTList([_over(kjt, lengths_too=i in vary, offsets_too=i in vary) for i, kjt in enumerate(of)])
            for of, vary in zip(distribution.features, self._varying, strict=True)
        ]
        self.holds: Any = None
        """Whose batch is in it."""

    @property
    def features(self) -> list[KJTList]:
        """Returns the features that each module looks up, see `_again`."""
        return [KJTList([_again(kjt) for kjt in of]) for of in self._features]

    def fill(self, fields: Sequence[Tensor], distribution: Distribution) -> None:
        """Copies a batch and what its input dist has made, on the current stream."""
        CopyTogether(self._memory)([*fields, *self._of(distribution.features), *_lengths(distribution.contexts)])

    @property
    def nbytes(self) -> int:
        """Bytes of its memory."""
        return sum(tensor.nbytes for tensor in self._memory)

    @property
    def capacity_bytes(self) -> int:
        """Bytes of the KJTs in it that have a capacity, used or not."""
        kjts = [of[i] for of, vary in zip(self._features, self._varying, strict=True) for i in vary]
        return sum(tensor.nbytes for kjt in kjts for tensor in (*_ids_of(kjt), kjt.lengths(), kjt.offsets()))

    @property
    def _memory(self) -> list[Tensor]:
        return [*self._fields, *self._of(self._features), *_lengths(self.contexts)]

    def _of(self, features: Sequence[KJTList]) -> list[Tensor]:
        """Returns the parts of this rank's looked-up KJTs that differ between batches."""
        kjts = [of[i] for of, vary in zip(features, self._varying, strict=True) for i in vary]
        return [*_ids(features), *(tensor for kjt in kjts for tensor in (kjt.lengths(), kjt.offsets()))]


class FormMemory:
    """The memory of one form's batches: a slot and a staging of each turn."""

    def __init__(self, slots: Sequence[Slot], staging: Sequence[Staging], made: int) -> None:
        """made: the iteration that allocates the memory; during that iteration no other stream may fill it."""
        self.slots, self.staging, self.made = list(slots), list(staging), made

    @property
    def nbytes(self) -> int:
        """Bytes of all slots and stagings."""
        return sum(slot.nbytes for slot in self.slots) + sum(staging.nbytes for staging in self.staging)

    @property
    def capacity_bytes(self) -> int:
        """Bytes of these for the KJTs that have a capacity."""
        return sum(slot.capacity_bytes for slot in self.slots)


def _ids(features: Sequence[KJTList]) -> list[Tensor]:
    return [tensor for of_module in features for kjt in of_module for tensor in _ids_of(kjt)]


def _ids_of(kjt: KeyedJaggedTensor) -> list[Tensor]:
    weights = kjt.weights_or_none()
    return [kjt.values()] if weights is None else [kjt.values(), weights]


def _lengths(contexts: Sequence[Any]) -> list[Tensor]:
    """Returns the sequence lengths that the output dist uses."""
    return [before.lengths() for context in contexts for before in _before(context)]


def _before(context: Any) -> list[KeyedJaggedTensor]:
    kjts = (getattr(of, "features_before_input_dist", None) for of in context.sharding_contexts)
    return [kjt for kjt in kjts if kjt is not None]


def _own_context(context: Any) -> Any:
    """Returns a context like this one, with the lengths of sequences in separate memory."""
    if not _before(context):
        return context
    own = copy.copy(context)
    own.sharding_contexts = [copy.copy(of) for of in context.sharding_contexts]
    for of in own.sharding_contexts:
        of.features_before_input_dist = _over(of.features_before_input_dist, lengths_too=True)
    return own


def _over(kjt: KeyedJaggedTensor, lengths_too: bool = False, offsets_too: bool = False) -> KeyedJaggedTensor:
    """Returns the same KJT over new ids and weights; lengths and offsets are the same memory, or new too. Offsets of
    new lengths alone are made by whoever asks for them."""
    weights = kjt.weights_or_none()
    offsets = kjt.offsets().clone() if offsets_too else None if lengths_too else kjt.offsets_or_none()
    return KeyedJaggedTensor(
        keys=kjt.keys(),
        values=torch.zeros_like(kjt.values()),
        weights=None if weights is None else torch.zeros_like(weights),
        lengths=kjt.lengths().clone() if lengths_too else kjt.lengths_or_none(),
        offsets=offsets,
        stride=kjt.stride(),
        length_per_key=kjt.length_per_key_or_none(),
        offset_per_key=kjt.offset_per_key_or_none(),
    )


def _again(kjt: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Returns another KJT over the same memory. A KJT caches values that it computes on demand, such as to_dict() its
    offsets: values cached during a capture are in that graph's private memory, which others must not read."""
    return with_weights(kjt, kjt.weights_or_none())


def _empty_like(leaf: Any) -> Any:
    return torch.zeros_like(leaf) if isinstance(leaf, Tensor) else leaf


def _tensors(leaves_of: Iterable[Any]) -> list[Tensor]:
    return [leaf for leaf in leaves_of if isinstance(leaf, Tensor)]
