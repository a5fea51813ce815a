"""The trimmed input dist gives TorchRec's lookups what TorchRec's own gives them, and asks less on the way."""

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, PoolingType
from torchrec.datasets.utils import Batch
from torchrec.distributed.types import ShardingEnv

from dlrm_bench.bench.doctor.trace import ITERATION, read_trace
from dlrm_bench.bench.profile.trace import summarize_trace
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.five_stage.trimmed.sharder import TrimmedEBCSharder
from tests.pipeline.five_stage.trimmed.cases import (
    CASES,
    STRIDES,
    Sharded,
    Trained,
    batches,
    equal_weights,
    fresh,
    train,
    trimmed,
)


class HostReads(TorchFunctionMode):
    """Counts reads of tensors by the host, and tensors made of what the host has."""

    def __init__(self, *reads: Any) -> None:
        super().__init__()
        self._reads = frozenset(reads)
        self.counts: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts["reads"] += func in self._reads
        self.counts["lists"] += func in (torch.tensor, torch.as_tensor)
        return func(*args, **(kwargs or {}))


class Ops(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.name().split(".")[0]] += 1
        return func(*args, **(kwargs or {}))


def counts(what: Sharded, batch: Batch) -> tuple[Counter[str], Counter[str]]:
    """Host reads and operators from a batch to what the lookups take, and of the lookups' own asking."""
    ebc = what.ebc
    reads = (Tensor.tolist, Tensor.item, Tensor.numpy, Tensor.__bool__, Tensor.__int__)
    with HostReads(*reads, Tensor.cpu) as host, Ops() as ops:
        context = ebc.create_context()
        features = ebc.input_dist(context, batch.sparse_features).wait().wait()
        for kjt in features:
            kjt.sync()
            kjt.offsets()
    with torch.no_grad(), HostReads(*reads) as in_forward:  # FBGEMM calls .cpu() on what is on the CPU
        ebc.compute_and_output_dist(context, features).wait()
    return host.counts + in_forward.counts, ops.counts


@dataclass
class Result:
    stock: list[Trained]
    """Directly, then in a pipeline of TorchRec's."""
    trimmed: list[Trained]
    features: dict[str, list[str]]
    counts: list[tuple[Counter[str], Counter[str]]]
    """Of stock, then trimmed."""
    evaluated: list[Tensor]
    """By stock, then trimmed."""
    waits: bool


def run_cases(ranks: Ranks, names: list[str]) -> dict[str, Result]:
    results = {}
    for name in names:
        case = CASES[name]
        made = batches(case, ranks)
        pair = equal_weights(case, ranks)
        directly = [train(what, made, ranks, in_pipeline=False) for what in pair]
        counted = [[counts(what, batch) for batch in fresh(made)][1] for what in pair]
        with torch.no_grad():
            evaluated = [torch.cat([what.model(batch)[1][1].cpu() for batch in fresh(made)]) for what in pair]
        piped = [train(what, made, ranks, in_pipeline=True) for what in pair]
        by_sharder = map(list, zip(directly, piped, strict=True))
        ebc = pair[1].ebc
        results[name] = Result(*by_sharder, ebc.trimmed_features(), counted, evaluated, ebc.input_dist_waits)
        ebc.close()
    return results


@pytest.fixture(scope="module")
def results(run_ranks: Callable[..., list[Any]]) -> dict[str, list[Result]]:
    by_case: dict[str, list[Result]] = {}
    for world_size in (1, 2, 3):
        names = [name for name, case in CASES.items() if case.world_size == world_size]
        per_rank = run_ranks(world_size, run_cases, names)
        by_case |= {name: [rank[name] for rank in per_rank] for name in names}
    return by_case


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_trains_what_stock_trains(results, name):
    for rank in results[name]:
        for theirs, ours in zip(rank.stock, rank.trimmed, strict=True):
            assert ours.losses == theirs.losses
            assert len(set(theirs.losses)) == len(STRIDES)
            assert all(map(torch.equal, ours.pooled, theirs.pooled))
            assert ours.keys == theirs.keys
            assert ours.state.keys() == theirs.state.keys()
            assert [key for key in theirs.state if not torch.equal(ours.state[key], theirs.state[key])] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_evaluates_as_stock_does(results, name):
    for rank in results[name]:
        stock, trimmed = rank.evaluated
        assert torch.equal(stock, trimmed)
        assert stock.any()


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.torchrec])
def test_asks_as_little_as_it_says(results, name):
    case = CASES[name]
    for rank in results[name]:
        features = {"static": case.static, "dynamic": case.dynamic, "torchrec": case.torchrec}
        assert rank.features == {kind: sorted(names) for kind, names in features.items()}
        stock, (host, ops) = rank.counts
        assert host["reads"] == case.reads
        assert rank.waits == bool(case.reads)
        assert host["lists"] == 0
        assert ops["aten::_local_scalar_dense"] == 0
        assert ops["c10d::alltoall_base_"] == case.all_to_alls
        assert sum(n for op, n in ops.items() if op.startswith("c10d::")) == case.all_to_alls
        # The counters see what stock TorchRec does.
        assert stock[0]["reads"] >= case.reads + bool(case.all_to_alls)
        assert stock[1]["c10d::alltoall_base_"] >= case.all_to_alls + bool(case.all_to_alls)


def all_in_flight(ranks: Ranks) -> tuple[list[Tensor], list[Tensor]]:
    case = CASES["tw cw dp rw, some vary"]
    stock, trimmed = equal_weights(case, ranks)
    made = batches(case, ranks)
    with torch.no_grad():
        expected = [stock.model(batch)[1][1] for batch in fresh(made)]
        contexts = [trimmed.ebc.create_context() for _ in made]
        started = [
            trimmed.ebc.input_dist(*each) for each in zip(contexts, [b.sparse_features for b in made], strict=True)
        ]
        launched = [each.wait() for each in started]
        features = [each.wait() for each in launched]
        looked_up = [trimmed.ebc.compute_and_output_dist(*each) for each in zip(contexts, features, strict=True)]
        return expected, [each.wait().values() for each in looked_up]


def test_batches_in_flight_leave_each_other_alone(run_ranks):
    for expected, pooled in run_ranks(2, all_in_flight):
        assert all(map(torch.equal, expected, pooled))


def launch_beside_another_collective(ranks: Ranks) -> float:
    """Rank 0 launches its input dist before a collective of the default group, rank 1 after it."""
    case = CASES["tw cw twcw dp"]
    what, made = trimmed(case, ranks), batches(case, ranks)
    what.model(made[0])
    number = torch.tensor([1.0 + ranks.rank])
    first_wait = what.ebc.input_dist(what.ebc.create_context(), made[1].sparse_features)
    second_wait = first_wait.wait() if ranks.rank == 0 else None
    try:
        dist.all_reduce(number, async_op=True).wait(timedelta(seconds=120))
    except RuntimeError:
        os._exit(1)  # at once: gloo's own threads would wait for the other collective half an hour
    (second_wait or first_wait.wait()).wait()
    return number.item()


def test_has_a_communicator_of_its_own(run_ranks):
    assert run_ranks(2, launch_beside_another_collective) == [3.0, 3.0]


def changed(batch: Batch, **fields: Any) -> KeyedJaggedTensor:
    kjt = batch.sparse_features
    whole = {"keys": kjt.keys(), "values": kjt.values(), "lengths": kjt.lengths(), "stride": kjt.stride()}
    return KeyedJaggedTensor(**(whole | fields))


def message(ebc: Any, kjt: KeyedJaggedTensor) -> str:
    with pytest.raises(ValueError, match=r"\w") as raised:
        ebc.input_dist(ebc.create_context(), kjt)
    return str(raised.value)


def break_promises(ranks: Ranks) -> dict[str, str]:
    case = CASES["tw cw twcw dp"]
    batch, shorter = batches(case, ranks, (6, 4))
    kjt = batch.sparse_features
    moved = kjt.lengths().clone()
    moved[7] -= 1  # f0 is the second key
    moved[8] += 1
    longer = kjt.lengths().clone()
    longer[7] += 1
    found = {}
    ebc = trimmed(case, ranks, validate=True).ebc
    for known in range(2):  # with the first batch and with a later one
        found[f"length {known}"] = message(ebc, changed(batch, lengths=moved) if ranks.rank == 1 else kjt)
        one_more = changed(batch, lengths=longer, values=kjt.values()[[0, *range(78)]])
        found[f"longer {known}"] = message(ebc, one_more if ranks.rank == 0 else kjt)
        found[f"stride {known}"] = message(ebc, (shorter if ranks.rank == 1 else batch).sparse_features)
        found[f"values {known}"] = message(ebc, changed(batch, values=kjt.values()[1:]) if ranks.rank == 1 else kjt)
        weighted = changed(batch, weights=torch.ones(kjt.values().numel()))
        found[f"types {known}"] = message(ebc, weighted if ranks.rank == 1 else kjt)
        ebc.input_dist(ebc.create_context(), kjt).wait().wait()
    ebc = trimmed(case, ranks).ebc
    found["missing"] = message(ebc, changed(batch, keys=["f3", "f0", "unused", "f2", "other", "f1"]))
    ebc.input_dist(ebc.create_context(), kjt).wait().wait()
    found["number"] = message(ebc, changed(batch, values=kjt.values()[1:]))
    moved[8:12] += 1
    found["length_per_key"] = message(ebc, changed(batch, lengths=moved, length_per_key=[24, 22, 12, 12, 6, 6]))
    found["order"] = message(ebc, changed(batch, keys=kjt.keys()[::-1]))
    found["weights"] = message(ebc, changed(batch, weights=torch.ones(kjt.values().numel(), 1)))
    found["batch per feature"] = message(ebc, changed(batch, stride=None, stride_per_key_per_rank=[[6]] * 6))
    return found


def test_broken_promises_are_named_on_all_ranks(run_ranks):
    ranks = run_ranks(2, break_promises)
    for found in ranks:
        for known in range(2):
            assert "rank 1: feature f0 has length 2 in sample 1, not 3 as in" in found[f"length {known}"]
            assert "rank 0: feature f0 has length 4 in sample 1, not 3 as in" in found[f"longer {known}"]
            assert "the ranks' batches have [6, 4] samples" in found[f"stride {known}"]
            assert "rank 1: the input has 77 ids in 6 samples" in found[f"values {known}"]
            assert "IdFormat(ids=torch.int64, weights=torch.float32)" in found[f"types {known}"]
        assert "lacks the features f4" in found["missing"]
        assert "77 ids in 6 samples, but multi_hot_sizes declares 13 per sample" in found["number"]
        assert "feature f0 has 22 ids in 6 samples, but multi_hot_sizes declares 3" in found["length_per_key"]
        assert "keep their order" in found["order"]
        assert found["weights"] == "the input has weights [78, 1] for ids [78]: one per id"
        assert "batch sizes per feature: use EmbeddingBagCollectionSharder" in found["batch per feature"]


def refuse(ranks: Ranks) -> None:
    table = EmbeddingBagConfig(name="a", num_embeddings=9, embedding_dim=8, feature_names=["f0"])
    collection = EmbeddingBagCollection(tables=[table], device=torch.device("meta"))
    with pytest.raises(ValueError, match="one process group: use EmbeddingBagCollectionSharder"):
        TrimmedEBCSharder({"f0": 1}).shard(collection, {}, ShardingEnv.from_local(1, 0))
    with pytest.raises(ValueError, match="mean pooling of row-wise"):
        trimmed(replace(CASES["rw"], pooling=PoolingType.MEAN), ranks)


def test_what_it_has_no_way_for_is_refused(run_ranks):
    run_ranks(1, refuse)


@pytest.mark.parametrize("size", [0, -1, 2.5, True])
def test_sizes_are_positive_integers(size):
    with pytest.raises(ValueError, match=r"positive integers, not \{'f1'"):
        TrimmedEBCSharder({"f0": 1, "f1": size})


def trace(ranks: Ranks, names: list[str], folder: Path) -> dict[str, dict[str, float]]:
    """Host calls of a batch from the input to the pooled vectors, after a few others."""
    calls = {}
    for name in names:
        case = CASES[name]
        what = trimmed(case, ranks)
        made = batches(case, ranks, (6,) * 6)
        activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
        with torch.no_grad(), profile(activities=activities) as profiled:
            for step, batch in enumerate(fresh(made)):
                with record_function(ITERATION if step >= 3 else "before"):
                    what.ebc(batch.sparse_features).values()
            torch.cuda.synchronize()
        path = folder / f"{ranks.rank}.json.gz"
        profiled.export_chrome_trace(str(path))
        calls[name] = summarize_trace(read_trace(path)).calls
        what.ebc.close()
    return calls


GPU_CASES = [
    pytest.param(1, ["1 rank", "1 rank, lengths vary"], marks=pytest.mark.gpu),
    pytest.param(
        2,
        [
            "tw",
            "tw, graphs",
            "tw cw twcw dp",
            "tw cw twcw dp, graphs",
            "tw cw twcw dp, int32",
            "tw cw dp rw, some vary",
            "tw cw twcw dp, weighted, graphs",
            "tw cw dp rw, some vary, int32, weighted",
        ],
        marks=pytest.mark.multi_gpu,
    ),
]


@pytest.mark.parametrize(("world_size", "names"), GPU_CASES)
def test_the_host_waits_for_no_gpu(run_ranks, tmp_path, world_size, names):
    for calls in run_ranks(world_size, trace, names, tmp_path, gpu=True):
        for name in names:
            assert calls[name]["kernel_launches"] > 0
            assert calls[name]["stream_syncs"] == CASES[name].reads
            assert calls[name]["d2h_copies"] == CASES[name].reads


@pytest.mark.parametrize(("world_size", "names"), GPU_CASES)
def test_trains_on_gpus_what_stock_trains(run_ranks, world_size, names):
    for rank in run_ranks(world_size, run_cases, names, gpu=True):
        for result in rank.values():
            for theirs, ours in zip(result.stock, result.trimmed, strict=True):
                assert ours.losses == pytest.approx(theirs.losses, rel=1e-5)
                assert ours.state.keys() == theirs.state.keys()
                for key, value in theirs.state.items():
                    torch.testing.assert_close(ours.state[key], value, rtol=1e-3, atol=1e-5)
