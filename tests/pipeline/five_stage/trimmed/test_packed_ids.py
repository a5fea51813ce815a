"""Ids and weights come out of their rows as they went in, whichever rows are picked."""

import pytest
import torch
from torchrec import KeyedJaggedTensor

from dlrm_bench.pipeline.five_stage.trimmed.packed_ids import IdFormat


@pytest.mark.parametrize(
    ("ids", "weights", "shape"),
    [
        (torch.int64, torch.float32, [9, 3]),
        (torch.int32, torch.float32, [9, 2]),
        (torch.int64, torch.float64, [9, 2]),
        (torch.int32, torch.bfloat16, [9, 6]),
        (torch.int64, None, [9]),
    ],
)
def test_what_is_packed_comes_out(ids, weights, shape):
    values = torch.randint(torch.iinfo(ids).max, (9,)).to(ids)
    of_values = None if weights is None else torch.randn(9).to(weights)
    form = IdFormat.of(KeyedJaggedTensor(["a"], values, of_values, lengths=torch.tensor([9], dtype=torch.int32)))
    packed = form.pack(values, of_values)
    assert list(packed.shape) == shape
    for rows in (torch.arange(9), torch.tensor([4, 0, 4]), torch.tensor([3]), torch.arange(0)):
        found_ids, found_weights = form.unpack(packed.index_select(0, rows))
        assert torch.equal(found_ids, values[rows])
        assert (found_weights is None) if of_values is None else torch.equal(found_weights, of_values[rows])
        assert found_ids.is_contiguous()
        assert found_weights is None or found_weights.is_contiguous()
