"""The trimmed input dist of unpooled embeddings gives TorchRec's lookups what its own gives them, and reads nothing."""

import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile, record_function
from torchrec import EmbeddingCollection
from torchrec.distributed import TrainPipelineSparseDist

from dlrm_bench.bench.doctor.trace import ITERATION, read_trace
from dlrm_bench.bench.profile.trace import summarize_trace
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.five_stage.options import FiveStageOptions
from dlrm_bench.pipeline.five_stage.pipeline import FiveStagePipeline
from dlrm_bench.pipeline.five_stage.trimmed import static_dist
from dlrm_bench.pipeline.five_stage.trimmed.ec_sharder import TrimmedECSharder
from dlrm_bench.pipeline.five_stage.trimmed.static_dist import Group, RankGroup, Sizes, StaticDist
from tests.cases import GPU_PLACES
from tests.pipeline.five_stage.any_models import LONGEST, Sequence, batches, build, sequences
from tests.pipeline.five_stage.torchrec_models import drain, state

LENGTHS = {"history": LONGEST, "context": LONGEST}
# TorchRec's own collection cannot look up data-parallel tables on the CPU (its dense kernel pools there).
PLANS = {
    "TW": lambda i, sequence: "table_wise",
    "CW": lambda i, sequence: "column_wise",
    "TW, CW": lambda i, sequence: ("table_wise", "column_wise")[i % 2],
    "TW, int64": lambda i, sequence: "table_wise",
}


class WithIds(Sequence):
    """Its logits depend on the ids as the collection gives them back."""

    def __init__(self) -> None:
        super().__init__()
        self.items = sequences(need_indices=True)

    def logits(self, batch: Any) -> Tensor:
        found = self.items(batch.sequences)
        return self.of(found) + found["context"].weights().view(-1, LONGEST).float().mean(dim=1)


class Reads(TorchFunctionMode):
    """Counts reads of tensors by the host."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.tolist, Tensor.item, Tensor.numpy, Tensor.__bool__, Tensor.__int__, Tensor.cpu):
            self.counts[func.__name__] += 1
        return func(*args, **(kwargs or {}))


def parity(ranks: Ranks, plans: list[str], cuda_graph: bool, rtol: float) -> list[dict[str, int]]:
    """Host reads of an input dist, of each plan."""
    signal.alarm(600)
    torch.backends.cuda.matmul.allow_tf32 = False
    counts = []
    for plan in plans:
        if "int64" in plan:
            static_dist._INT32_ELEMENTS = 0
        sharder = {EmbeddingCollection: TrimmedECSharder(LENGTHS, cuda_graph=cuda_graph)}
        results = []
        for sharders in (None, sharder):
            model, optimizer = build(ranks, WithIds, PLANS[plan], sharders=sharders)
            data = batches(ranks, 8, full=True, sizes=(6, 6, 6, 4))
            if sharders is None:
                results.append(drain(TrainPipelineSparseDist(model, optimizer, ranks.device), iter(data)))
            else:
                with FiveStagePipeline(model, optimizer, ranks.device, FiveStageOptions()) as pipeline:
                    results.append(drain(pipeline, iter(data)))
                assert model.module.items.why_not_trimmed is None
                counts.append(reads(model.module.items, data[0].to(ranks.device).sequences))
            results[-1].state = state(model, optimizer)
        theirs, ours = results
        torch.testing.assert_close(ours.outputs, theirs.outputs, rtol=rtol, atol=rtol)
        torch.testing.assert_close(ours.state, theirs.state, rtol=10 * rtol, atol=rtol)
    return counts


def reads(collection: Any, features: Any) -> dict[str, int]:
    with Reads() as counted:
        collection.input_dist(collection.create_context(), features).wait().wait()
    return dict(counted.counts)


@pytest.mark.parametrize("world_size", [1, 2])
def test_trains_bit_by_bit_as_stock_without_a_read(run_ranks, world_size):
    for counts in run_ranks(world_size, parity, list(PLANS), False, 0):
        assert counts == [{}] * len(PLANS)


@pytest.mark.parametrize(("world_size", "gpu"), GPU_PLACES)
def test_trains_as_stock_gpu(run_ranks, world_size, gpu):
    for cuda_graph in (False, True):
        run_ranks(world_size, parity, ["TW", "TW, CW", "TW, int64"], cuda_graph, 1e-5, gpu=gpu)


@pytest.mark.parametrize(("width", "counts"), [(1 << 20, torch.int32), (1 << 21, torch.int64)])
def test_more_elements_than_int32_counts_are_counted_in_int64(width, counts):
    group = Group(index=0, features=[["a"], []], exchanged=True, width=width)
    ranks = RankGroup(group=None, rank=0, world_size=2, device=torch.device("cpu"))
    static = StaticDist([group], ["a"], Sizes({}, [{"a": 1000}]), ranks, pooled=False)
    (layout,) = static._lay_out(4, 0, torch.int32).exchanged
    assert layout.lengths.dtype == counts
    assert layout.lengths.sum() == 2000


def waits(ranks: Ranks, folder: Path) -> dict[str, float]:
    """Host calls of an iteration: input dists, dense graph and Adam's step, of unpooled embeddings."""
    signal.alarm(600)
    sharders = {EmbeddingCollection: TrimmedECSharder(LENGTHS)}
    model, optimizer = build(ranks, Sequence, PLANS["TW, CW"], sharders=sharders)
    data = iter(batches(ranks, 16, full=True))
    options = FiveStageOptions(cuda_graph="dense")
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with FiveStagePipeline(model, optimizer, ranks.device, options) as pipeline:
        for _ in range(10):
            pipeline.progress(data)
        with profile(activities=activities) as profiled:
            for _ in range(3):
                with record_function(ITERATION):
                    pipeline.progress(data)
            torch.cuda.synchronize()
    path = folder / f"{ranks.rank}.json.gz"
    profiled.export_chrome_trace(str(path))
    return summarize_trace(read_trace(path)).calls


@pytest.mark.parametrize(("world_size", "gpu"), GPU_PLACES)
def test_an_iteration_waits_for_no_gpu(run_ranks, tmp_path, world_size, gpu):
    for calls in run_ranks(world_size, waits, tmp_path, gpu=gpu):
        assert calls["graph_launches"] >= 2
        assert calls["stream_syncs"] == calls["d2h_copies"] == 0


def not_trimmed(ranks: Ranks) -> list[str]:
    signal.alarm(600)
    why = []
    for plan, lengths in (("row_wise", LENGTHS), ("table_wise", {"history": LONGEST})):
        sharders = {EmbeddingCollection: TrimmedECSharder(lengths)}
        model, optimizer = build(ranks, Sequence, lambda i, sequence, plan=plan: plan, sharders=sharders)
        with FiveStagePipeline(model, optimizer, ranks.device, FiveStageOptions()) as pipeline:
            ours = drain(pipeline, iter(batches(ranks, 4)))
        model.module.items.close()
        why.append(model.module.items.why_not_trimmed)
        model, optimizer = build(ranks, Sequence, lambda i, sequence, plan=plan: plan)
        theirs = drain(TrainPipelineSparseDist(model, optimizer, ranks.device), iter(batches(ranks, 4)))
        torch.testing.assert_close(ours.outputs, theirs.outputs, rtol=0, atol=0)
    model, optimizer = build(ranks, Sequence, PLANS["TW"], sharders={EmbeddingCollection: TrimmedECSharder(LENGTHS)})
    pipeline = FiveStagePipeline(model, optimizer, ranks.device, FiveStageOptions())
    with pytest.raises(ValueError, match=r"the input has \d+ ids in 6 sequences, .* told 72 in all"):
        drain(pipeline, iter(batches(ranks, 1)))
    return why


def test_what_is_not_fixed_is_torchrecs_and_said(run_ranks):
    (why,) = run_ranks(1, not_trimmed)
    assert why == ["row_wise tables depend on the ids", "neither sequence_lengths nor batch_ids declares context"]


@pytest.mark.parametrize("length", [0, -1, 2.5, True])
def test_lengths_are_positive_integers(length):
    with pytest.raises(ValueError, match=r"positive integers, not \{'b'"):
        TrimmedECSharder({"a": 1, "b": length})


def test_a_feature_is_declared_once():
    with pytest.raises(ValueError, match="a is in sequence_lengths and in batch_ids"):
        TrimmedECSharder({"a": 1}, batch_ids={"a": 3, "b": 2})


@pytest.mark.parametrize(
    ("batch_ids", "message"),
    [
        ([{"a": 3, "b": 2}, {"a": 2, "b": 3}], r"the totals \[5, 5\]"),
        ([{"a": 3}, {"b": 2}], "different features"),
        ([{"a": 3}, {"a": 0}], r"positive integers, not \{'a': 0"),
    ],
)
def test_several_kinds_of_batches_can_be_told_apart(batch_ids, message):
    with pytest.raises(ValueError, match=message):
        TrimmedECSharder(batch_ids=batch_ids)
