"""A form for each choice of declared numbers of ids; what else differs has none."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torchrec import KeyedJaggedTensor

from dlrm_bench.pipeline.five_stage.batch_forms import BatchForms
from dlrm_bench.pipeline.five_stage.trimmed.static_dist import Sizes

BAGS = Sizes({"a": 2})
SEQUENCES = Sizes({}, [{"s": 4}, {"s": 6}, {"s": 9}])
OTHERS = Sizes({}, [{"t": 3}, {"t": 5}])


@dataclass
class Batch:
    bags: KeyedJaggedTensor
    sequences: KeyedJaggedTensor
    others: KeyedJaggedTensor
    actions: Tensor
    """One for each id of the sequences."""
    labels: Tensor


def kjt(key: str, lengths: list[int]) -> KeyedJaggedTensor:
    return KeyedJaggedTensor([key], torch.zeros(sum(lengths), dtype=torch.int64), lengths=torch.tensor(lengths))


def batch(bags: tuple[int, ...] = (2, 2), sequences: int = 4, others: int = 3, dtype: Any = torch.float32) -> Batch:
    stride = len(bags)
    made = [kjt(key, [count - stride + 1, *[1] * (stride - 1)]) for key, count in (("s", sequences), ("t", others))]
    return Batch(kjt("a", list(bags)), *made, torch.zeros(sequences), torch.zeros(stride, dtype=dtype))


@pytest.fixture
def forms() -> BatchForms:
    first = batch(sequences=6)
    return BatchForms(first, [first.bags, first.sequences, first.others], [BAGS, SEQUENCES, OTHERS])


def test_numbers_are_those_of_the_declared_sizes_whatever_comes_first(forms: BatchForms) -> None:
    assert forms.several
    found = [forms.number(batch(sequences=s, others=t)) for s in (9, 4, 6) for t in (5, 3)]
    assert found == [5, 4, 1, 0, 3, 2]


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (batch(sequences=5), "no declared number of ids"),
        (batch(bags=(2, 2, 2), sequences=9, others=5), "more samples"),
        (batch(sequences=9, dtype=torch.float64), "another type of labels, in a form that has not come yet"),
        (batch(sequences=6, dtype=torch.float64), "another type of labels, in the first one's form"),
        (batch(bags=(1, 3)), "bags of other lengths"),
        (batch(bags=(3, 3)), "more ids of the bags"),
    ],
)
def test_others_have_none(forms: BatchForms, other: Batch, why: str) -> None:
    assert forms.number(other) is None, why
    assert forms.number(batch(sequences=9)) == 4  # and leave no form behind


def test_lengths_may_vary_where_batches_have_so_many_ids(forms: BatchForms) -> None:
    other = batch(sequences=6)
    other.sequences = kjt("s", [1, 5])
    assert forms.number(other) == forms.number(batch(sequences=6)) == 2
    fields = batch(sequences=6)
    fields.actions = torch.zeros(7)
    assert forms.number(fields) is None


def test_one_declared_number_is_one_form() -> None:
    first = batch()
    of_bags = BatchForms(first, [first.bags], [BAGS])
    assert not of_bags.several
    assert of_bags.number(first) == 0
    assert of_bags.number(batch(sequences=9)) is None  # of another number of actions than the first one
    assert of_bags.number(first.labels) is None  # without a KJT


def test_values_that_cannot_be_compared_have_no_form() -> None:
    first: Any = batch(sequences=6)
    first.labels = {1}
    forms = BatchForms(first, [first.bags, first.sequences, first.others], [BAGS, SEQUENCES, OTHERS])
    assert forms.number(first) is None
