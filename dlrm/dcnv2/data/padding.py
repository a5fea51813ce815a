"""Bags of varying lengths in blocks of fixed shape: each bag is padded to the capacity that its feature declares."""

from collections.abc import Sequence

import torch
from torch import Tensor

PADDING = -1
"""The id that pads a bag and means nothing; the static EBC skips it."""


def pack_capacity(values: Tensor, lengths: Tensor, capacities: Sequence[int], out: Tensor | None = None) -> Tensor:
    """Bags as a KJT has them to those that a Batch has, its ids of fixed shape.

    values: int32 [sum(lengths)], on the CPU as all here, by feature, then by sample. lengths: integers [features, B].
    Returns int32 [B * sum(capacities)], feature-major: each feature a [B, capacity] block whose bags are filled up with
    PADDING; in `out` where given. ValueError names the feature, the length and the capacity of a bag over capacity.
    """
    features, batch_size = lengths.shape
    assert features == len(capacities), f"{features} features, {len(capacities)} capacities"
    for feature, (longest, capacity) in enumerate(zip(lengths.amax(1).tolist(), capacities, strict=True)):
        if longest > capacity:
            raise ValueError(
                f"feature cat_{feature} has a bag of {longest} ids, over its capacity of {capacity}: raise its number "
                "in --model.multi-hot-sizes, or cut the bag"
            )
    if lengths.min() < 0 or lengths.sum() != values.numel():
        raise ValueError(f"lengths from {int(lengths.min())} that add up to {int(lengths.sum())}, not {values.numel()}")
    if out is None:
        out = torch.empty(batch_size * sum(capacities), dtype=torch.int32)
    blocks = out.fill_(PADDING).split([batch_size * capacity for capacity in capacities])
    of_features = values.split(lengths.sum(1).tolist())
    for block, ids, bag_lengths, capacity in zip(blocks, of_features, lengths, capacities, strict=True):
        block.view(batch_size, capacity)[torch.arange(capacity) < bag_lengths[:, None]] = ids
    return out
