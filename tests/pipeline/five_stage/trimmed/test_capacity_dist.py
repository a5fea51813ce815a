"""Row-wise and table-row-wise tables with room for fixed numbers of ids train bit by bit what stock TorchRec trains."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torchrec import KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed.sharding_plan import column_wise, data_parallel, row_wise, table_row_wise, table_wise

from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.five_stage.trimmed.sharder import TrimmedEBCSharder
from tests.pipeline.five_stage.trimmed.cases import (
    SIZES,
    TABLES,
    Case,
    Sharded,
    flat,
    fresh,
    int32,
    plan_of,
    stock,
    trimmed,
)

STRIDES = (40, 40, 7, 40)
HEADROOM = 1.3
"""Tables of several sizes share features, whose ids are so spread over the rows of the smallest one."""
RW = plan_of(*[row_wise()] * 5)
MIXED = plan_of(table_wise(1), row_wise(), column_wise(ranks=[0, 1]), data_parallel(), row_wise())
TWO = plan_of(*[row_wise()] * 2)
NODES = plan_of(table_row_wise(0), table_row_wise(1), table_row_wise(0), row_wise(), table_row_wise(1))
ONE_NODE = plan_of(table_row_wise(0), row_wise(), table_row_wise(0), table_wise(1), row_wise())
ONLY_ONE = plan_of(table_row_wise(0), table_row_wise(0))
DECAY: dict[str, Any] = {"weight_decay": 0.1}
"""Of fused updates that change rows of zero gradient: unused places name rows of the batch."""
CASES = {
    1: {"1 rank": Case(RW), "1 rank, named": Case(RW, fused_params=DECAY)},
    2: {"rw": Case(RW), "weighted": Case(RW, weighted=True, ids=torch.int32, fused_params=int32), "mixed": Case(MIXED)},
    3: {
        "mixed, 3 ranks": Case(MIXED, weighted=True),
        "named, 3 ranks": Case(TWO, weighted=True, fused_params=DECAY | int32, ids=torch.int32),
    },
    4: {"twrw": Case(NODES), "twrw, weighted": Case(NODES, weighted=True), "rank 2 and 3 have none": Case(ONLY_ONE)}
    | {"twrw, named": Case(NODES, fused_params=DECAY)},
}
READS = ("aten._local_scalar_dense.default", "aten.nonzero.default", "aten.equal.default")


def batches(case: Case, ranks: Ranks, strides: Sequence[int] = STRIDES, first: int | None = None) -> list[Batch]:
    """Of ids spread evenly over rows. first: all ids are below it instead."""
    random = torch.Generator().manual_seed(17 + ranks.rank)
    keys = ["f3", "f0", "unused", "f2", "f4", "f1"]
    rows = {key: min((count for count, names in TABLES.values() if key in names), default=9) for key in keys}
    made = []
    for stride in strides:
        values = [torch.randint(0, first or rows[key], (stride * SIZES[key],), generator=random) for key in keys]
        lengths = torch.cat([torch.full((stride,), SIZES[key], dtype=torch.int32) for key in keys])
        weights = torch.rand(sum(map(len, values)), generator=random) if case.weighted else None
        kjt = KeyedJaggedTensor(keys, torch.cat(values).to(case.ids), weights=weights, lengths=lengths, stride=stride)
        labels = torch.randint(0, 2, (stride,), generator=random).float()
        made.append(Batch(dense_features=torch.zeros(stride, 1), sparse_features=kjt, labels=labels))
    return made


class Distributed:
    """A sharded collection whose forward is by capacity."""

    def __init__(self, what: Sharded) -> None:
        self.overflows: list[int] = []
        ebc = what.ebc

        def forward(features: KeyedJaggedTensor) -> Any:
            context = ebc.create_context()
            with ebc.by_capacity() as by:
                distributed = ebc.input_dist(context, features).wait().wait()
            self.overflows.append(max(int(of.overflow) for of in by))
            return ebc.compute_and_output_dist(context, distributed)

        ebc.forward = forward


def train(what: Sharded, made: list[Batch]) -> tuple[list[Tensor], dict[str, Tensor]]:
    pooled = []
    for batch in fresh(made):
        what.optimizer.zero_grad()
        loss, (_, of_batch) = what.model(batch)
        loss.backward()
        what.optimizer.step()
        pooled.append(of_batch)
    state = {"model": what.model.state_dict(), "fused": what.model.fused_optimizer.state_dict()["state"]}
    return pooled, flat(state)


def compare(ranks: Ranks) -> dict[str, Any]:
    result = {}
    for name, case in CASES[ranks.world_size].items():
        made = batches(case, ranks)
        theirs = stock(case, ranks)
        ours = trimmed(case, ranks, row_capacity=HEADROOM)
        ours.model.load_state_dict(theirs.model.state_dict())
        by_capacity = Distributed(ours)
        expected, found = train(theirs, made), train(ours, made)
        for mine, other in zip(found[0], expected[0], strict=True):
            assert torch.equal(mine, other), name
        assert found[1].keys() == expected[1].keys()
        assert [key for key in expected[1] if not torch.equal(found[1][key], expected[1][key])] == [], name
        assert by_capacity.overflows == [0] * len(made)
        rooms = ours.ebc.row_capacities(STRIDES[0])
        result[name] = rooms, ours.ebc.trimmed_features(), ours.ebc.reading_features()
    return result


@pytest.mark.parametrize("world_size", CASES)
def test_trains_bit_by_bit_as_stock(run_ranks: Callable[..., Any], world_size: int) -> None:
    for by_case in run_ranks(world_size, compare, nodes=2 if world_size == 4 else 1):
        for rooms, features, reading in by_case.values():
            assert set(rooms) == set(features["capacity"])
            assert reading == []
            ids = {name: STRIDES[0] * SIZES[name] for name in rooms}
            assert all(rooms[name] <= ids[name] for name in rooms)
            # The larger ones have less room than all ids of a batch.
            assert world_size == 1 or any(rooms[name] < ids[name] for name in rooms)


def integers(ranks: Ranks) -> None:
    case = Case(RW, weighted=False)
    made = batches(case, ranks)
    theirs, ours = stock(case, ranks), trimmed(case, ranks, row_capacity=HEADROOM)
    ours.model.load_state_dict(theirs.model.state_dict())
    by_capacity = Distributed(ours)
    expected = train(theirs, made)
    for batch in made:
        kjt = batch.sparse_features
        kjt._weights = torch.full_like(kjt.values(), 3)
    found = train(ours, made)
    for mine, other in zip(found[0], expected[0], strict=True):
        assert torch.equal(mine, other)
    assert by_capacity.overflows == [0] * len(made)


def test_weights_that_are_integers_count_for_none(run_ranks: Callable[..., Any]) -> None:
    run_ranks(2, integers)


def beyond_all_tables(ranks: Ranks) -> list[list[int]]:
    """The rows that this rank looks up for one id of each feature that no table has."""
    ebc = trimmed(Case(RW), ranks, row_capacity=HEADROOM).ebc
    found = []
    for wrong in (2**33 + 4, 2**32 * ranks.world_size, -5):
        features = batches(Case(RW), ranks, (40,))[0].sparse_features
        for key in ("f0", "f1", "f2", "f3", "f4"):
            features.values()[features.offset_per_key()[features.keys().index(key)]] = wrong
        with ebc.by_capacity():
            (looked_up,) = ebc.input_dist(ebc.create_context(), features).wait().wait()
        found.append([int(looked_up[key].values().max()) for key in looked_up.keys()])  # noqa: SIM118 no dict
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_ids_of_64_bits_beyond_all_tables_stay_beyond_them(run_ranks: Callable[..., Any], world_size: int) -> None:
    """They reach FBGEMM's bounds check, as in stock TorchRec, instead of rows that they do not name."""
    of_ranks = run_ranks(world_size, beyond_all_tables)
    for largest in zip(*of_ranks, strict=True):
        assert all(max(of_feature) == 2**31 - 1 for of_feature in zip(*largest, strict=True))


class Reads(TorchDispatchMode):
    """Counts what makes the host wait for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += str(operator) in READS
        return operator(*args, **(kwargs or {}))


def overflowing(ranks: Ranks, named_by: Sequence[int]) -> list[tuple[int, int]]:
    """named_by: ranks that have only ids of the first rows."""
    case = Case(RW, weighted=True)
    ebc = trimmed(case, ranks, row_capacity=HEADROOM).ebc
    result = []
    for first in (None, 8 if ranks.rank in named_by else None):
        features = batches(case, ranks, (200,), first)[0].sparse_features
        with ebc.by_capacity() as by, Reads() as reads:
            ebc.input_dist(ebc.create_context(), features).wait().wait()
        (of_batch,) = by
        result.append((int(of_batch.overflow), reads.count))
    return result


@pytest.mark.parametrize("named_by", [(0,), (1, 2), (0, 1, 2)])
def test_an_overflow_is_known_to_all_ranks_and_nothing_is_read(run_ranks: Callable[..., Any], named_by: Any) -> None:
    for of_rank in run_ranks(3, overflowing, named_by):
        (fits, _), (overflows, reads) = of_rank
        assert (fits, overflows, reads) == (0, 1, 0)


def refused(ranks: Ranks) -> list[list[str]]:
    """Tables that keep their exact input dist."""
    found = []
    for sizes in (SIZES, {key: size for key, size in SIZES.items() if key != "f0"}):
        undeclared = tuple(SIZES.keys() - sizes)
        ebc = trimmed(Case(RW, undeclared=undeclared), ranks, row_capacity=HEADROOM).ebc
        found.append(ebc.reading_features())
    return found


def test_undeclared_features_have_no_capacity(run_ranks: Callable[..., Any]) -> None:
    for declared, undeclared in run_ranks(2, refused):
        assert declared == []
        assert undeclared == ["f0", "f1", "f2", "f3", "f4"]


@pytest.mark.parametrize(
    ("options", "message"),
    [({"row_capacity": 0.5}, "1.0 or more"), ({"row_capacity": 1.0, "rows_to_all": True}, "leave one out")],
)
def test_options_that_contradict(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrimmedEBCSharder(SIZES, **options)
