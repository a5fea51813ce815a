"""Copies of several tensors with few launches: a launch takes the host some 10 us, and between two graphs it is a gap
in which the device does nothing."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .batch_fields import map_fields

_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
TOGETHER = frozenset((torch.float64, torch.float32, torch.float16, torch.bfloat16, *_INTEGERS))
"""Types that torch copies together. On GPUs torch._foreach_copy_ refuses some others, such as uint16."""
_WORD = torch.int32
_OF_WORDS = frozenset((torch.float64, torch.float32, torch.int64, torch.int32))
"""Types whose elements are one or two words: as words, all of them are copied together."""


class CopyTogether:
    """A copy of tensors [any shapes and types] into others of equal shapes, with one launch for all whose elements are
    32-bit words, or two of them, and one for each other type. Values of other types are converted."""

    def __init__(self, into: Sequence[Tensor]) -> None:
        self._words, self._alone = list[tuple[int, torch.dtype]](), list[tuple[Tensor, int]]()
        by_type: dict[torch.dtype, list[int]] = {}
        for i, to in enumerate(into):
            if to.dtype in _OF_WORDS and to.dim() > 0 and to.is_contiguous():
                self._words.append((i, to.dtype))
            elif to.dtype in TOGETHER:
                by_type.setdefault(to.dtype, []).append(i)
            else:
                self._alone.append((to, i))
        self._into_words = [into[i].view(_WORD) for i, _ in self._words]
        self._by_type = [([into[i] for i in places], places) for places in by_type.values()]
        self._count = len(into)

    def __call__(self, tensors: Sequence[Tensor]) -> None:
        """Copies on the current stream."""
        assert len(tensors) == self._count, "one for each"
        with torch.no_grad():
            if self._words:
                words = [_words_of(tensors[i], dtype) for i, dtype in self._words]
                torch._foreach_copy_(self._into_words, words, non_blocking=True)
            for into, places in self._by_type:
                torch._foreach_copy_(into, [tensors[i] for i in places], non_blocking=True)
            for to, i in self._alone:
                to.copy_(tensors[i], non_blocking=True)


def _words_of(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if tensor.dtype is not dtype:
        tensor = tensor.to(dtype)
    return tensor.contiguous().view(_WORD)


def copies_of(output: Any) -> Any:
    """Returns the output of a graph with copies of its tensors, on the current stream: what Tensor.clone would give for
    each, but with one launch for each type.

    Each copy has separate memory, so that a tensor that the caller keeps for long, such as a loss, keeps no other.
    """
    by_type: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}

    def copied(leaf: Any) -> Any:
        # A view with gaps would have torch copy all tensors of its type one by one.
        if type(leaf) is Tensor and leaf.dtype in TOGETHER and leaf.layout is torch.strided and leaf.is_contiguous():
            into, of = by_type.get(leaf.dtype) or by_type.setdefault(leaf.dtype, ([], []))
            of.append(leaf)
            into.append(copy := torch.empty_like(leaf))
            return copy
        return leaf.clone() if isinstance(leaf, Tensor) else leaf

    made = map_fields(output, copied)
    for into, of in by_type.values():
        torch._foreach_copy_(into, of)
    return made
