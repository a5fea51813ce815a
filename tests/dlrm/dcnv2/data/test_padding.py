"""Packed bags are the bags, padded; one that does not fit is named."""

import pytest
import torch
from torch import Tensor

from dlrm_bench.dlrm.data.batch import feature_blocks
from dlrm_bench.dlrm.dcnv2.data.padding import PADDING, pack_capacity

CAPACITIES = (3, 1, 5)


def bags(batch_size: int) -> tuple[Tensor, Tensor]:
    """Values and lengths as a KJT has them, empty and full bags among them."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.stack(
        [torch.randint(capacity + 1, (batch_size,), generator=generator) for capacity in CAPACITIES]
    ).int()
    return torch.randint(1000, (int(lengths.sum()),), generator=generator, dtype=torch.int32), lengths


@pytest.mark.parametrize("batch_size", [1, 7, 100])
def test_every_bag_is_there_and_padded(batch_size):
    values, lengths = bags(batch_size)
    packed = feature_blocks(pack_capacity(values, lengths, CAPACITIES), CAPACITIES)
    remaining = iter(values.tolist())
    for block, capacity, of_feature in zip(packed, CAPACITIES, lengths.tolist(), strict=True):
        expected = [
            [*(next(remaining) for _ in range(length)), *[PADDING] * (capacity - length)] for length in of_feature
        ]
        assert block.tolist() == expected
    assert next(remaining, None) is None


def test_into_the_memory_of_a_batch():
    values, lengths = bags(9)
    out = torch.zeros(9 * sum(CAPACITIES), dtype=torch.int32)
    assert pack_capacity(values, lengths, CAPACITIES, out) is out
    assert torch.equal(out, pack_capacity(values, lengths, CAPACITIES))


def test_all_bags_may_be_empty():
    packed = pack_capacity(torch.empty(0, dtype=torch.int32), torch.zeros(3, 4, dtype=torch.int64), CAPACITIES)
    assert packed.tolist() == [PADDING] * 4 * sum(CAPACITIES)


def test_a_bag_over_capacity_is_named():
    values, lengths = bags(9)
    lengths[2, 4] = 6
    with pytest.raises(ValueError, match="cat_2 has a bag of 6 ids, over its capacity of 5: raise its number"):
        pack_capacity(values, lengths, CAPACITIES)


@pytest.mark.parametrize("length", [-1, 2])
def test_lengths_that_are_not_those_of_the_values(length):
    lengths = torch.tensor([[1], [1], [length]])
    with pytest.raises(ValueError, match="not 3"):
        pack_capacity(torch.zeros(3, dtype=torch.int32), lengths, CAPACITIES)
