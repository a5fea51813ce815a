"""The KJT of a batch is found wherever the batch holds it, without a trace of the search in the model."""

from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import MutableMapping
from dataclasses import dataclass
from operator import is_
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor

from dlrm_bench.pipeline.five_stage.batch_fields import (
    find_path,
    follow,
    forward_replaced,
    leaf_names,
    leaves,
    map_fields,
    parts_of,
)

CPU = torch.device("cpu")


class Collection(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(3))

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return features.lengths().float()


class Model(nn.Module):
    """Gives its collection what `path` finds in the batch, after work that leaves traces."""

    def __init__(self, get: Any) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.dropout = nn.Dropout(0.5)
        self.collection = Collection()
        self._get = get

    def forward(self, batch: Any) -> Tensor:
        self.dropout(self.norm(torch.rand(4, 2)))
        try:
            return self.collection(self._get(batch))
        except Exception:  # what the search raises must come through
            return torch.zeros(())


@dataclass
class Fields:
    dense: Tensor
    sparse: Any


@dataclass(slots=True, frozen=True)
class Slots:
    sparse: Any
    dense: Tensor


Named = namedtuple("Named", "dense sparse")


def kjt() -> KeyedJaggedTensor:
    return KeyedJaggedTensor(keys=["a"], values=torch.tensor([1, 2]), lengths=torch.tensor([1, 1]))


BATCHES = {
    "itself": (lambda features: features, lambda batch: batch),
    "dataclass": (lambda features: Fields(torch.ones(2), features), lambda batch: batch.sparse),
    "slots": (lambda features: Slots(features, torch.ones(2)), lambda batch: batch.sparse),
    "tuple": (lambda features: (torch.ones(2), features), lambda batch: batch[1]),
    "named tuple": (lambda features: Named(torch.ones(2), features), lambda batch: batch.sparse),
    "dict": (lambda features: {"dense": torch.ones(2), "sparse": features}, lambda batch: batch["sparse"]),
    "namespace": (lambda features: SimpleNamespace(x=[torch.ones(2), features]), lambda batch: batch.x[1]),
    "second KJT": (lambda features: (kjt(), features), lambda batch: batch[1]),
}


@pytest.mark.parametrize("name", BATCHES)
def test_finds_the_kjt(name):
    make, get = BATCHES[name]
    batch, another = make(kjt()), make(kjt())
    path = find_path(batch, get(batch))
    assert path is not None
    assert follow(another, path) is get(another)
    assert find_path(batch, kjt()) is None


def test_a_forward_replaced_before_comes_back():
    collection = Collection()
    collection.forward = outer = lambda features: torch.ones(1)
    with forward_replaced(collection, lambda features: torch.zeros(1)):
        assert collection(kjt()).item() == 0
    assert vars(collection)["forward"] is outer


@pytest.mark.parametrize("name", BATCHES)
def test_maps_every_field_but_the_kjt(name):
    make, get = BATCHES[name]
    batch, stands_in = make(kjt()), object()
    mapped = map_fields(batch, lambda leaf: leaf + 1 if isinstance(leaf, Tensor) else leaf, {id(get(batch)): stands_in})
    assert type(mapped) is type(batch) or mapped is stands_in
    assert get(mapped) is stands_in
    before, after = list(leaves(batch, {id(get(batch))})), list(leaves(mapped, {id(stands_in)}))
    assert len(before) == len(after) == {"itself": 0}.get(name, len(before))
    assert all(torch.equal(b + 1, a) for b, a in zip(before, after, strict=True) if isinstance(b, Tensor))


@pytest.mark.parametrize("name", BATCHES)
def test_kjts_and_the_other_leaves_in_one_pass(name):
    make, get = BATCHES[name]
    batch = make(kjt())
    kjts, rest = parts_of(batch)
    assert any(found is get(batch) for found in kjts)
    assert len(kjts) == (2 if name == "second KJT" else 1)
    others = list(leaves(batch, set(map(id, kjts))))
    assert len(rest) == len(others)
    assert all(map(is_, rest, others))


def test_a_kjt_in_two_places_is_one():
    features = kjt()
    assert [found is features for found in parts_of((features, {"again": features}))[0]] == [True]


@pytest.mark.parametrize("name", BATCHES)
def test_names_lead_to_the_leaves(name):
    make, get = BATCHES[name]
    batch = make(kjt())
    names, found = list(leaf_names(batch, {id(get(batch))})), list(leaves(batch, {id(get(batch))}))
    assert len(names) == len(found)
    assert all(eval(name, {"batch": batch}) is leaf for name, leaf in zip(names, found, strict=True))


class Bag(MutableMapping):
    """Of which a copy shares the items."""

    def __init__(self, **items):
        self._items = items

    def __getitem__(self, key):
        return self._items[key]

    def __setitem__(self, key, value):
        self._items[key] = value

    def __delitem__(self, key):
        del self._items[key]

    def __iter__(self):
        return iter(self._items)

    def __len__(self):
        return len(self._items)


def test_a_mapping_of_the_users_own_is_left_alone():
    bag = Bag(a=1, b=[2])
    assert dict(map_fields(bag, lambda leaf: leaf + 1)) == {"a": 2, "b": [3]}
    assert dict(bag) == {"a": 1, "b": [2]}


def test_mappings_keep_their_type():
    for batch in (OrderedDict(b=1, a=2), defaultdict(list, a=1)):
        mapped = map_fields(batch, lambda leaf: leaf + 1)
        assert type(mapped) is type(batch)
        assert list(mapped.items()) == [(key, value + 1) for key, value in batch.items()]
        assert getattr(mapped, "default_factory", None) is getattr(batch, "default_factory", None)
