"""Copies of many tensors in few launches."""

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor


def copy_together(tos: Sequence[Tensor], ofs: Sequence[Tensor]) -> None:
    """Copies each of `ofs` to that of `tos`, all of one dtype: those of one dtype that have their target's strides in
    one launch, others in one each. In a single call of torch, one tensor of another dtype or with other strides would
    give every tensor a launch of its own."""
    pairs = sorted(zip(tos, ofs, strict=True), key=_kind)
    for _, alike in groupby(pairs, _kind):
        some, others = zip(*alike, strict=True)
        torch._foreach_copy_(some, others)


def _kind(pair: tuple[Tensor, Tensor]) -> tuple[str, bool]:
    to, of = pair
    return str(of.dtype), to.stride() == of.stride()
