import pytest

from dlrm_bench.bench.doctor import judge
from dlrm_bench.bench.doctor.cuda_calls import cuda_calls, take_costs
from dlrm_bench.bench.doctor.findings import Finding, Seen, findings_of, seen_by
from dlrm_bench.bench.doctor.judge import Place, line_of
from dlrm_bench.bench.doctor.rank_file import MARK, MARKED_ITERATION, RankFile
from dlrm_bench.bench.doctor.remedies import suggestion
from dlrm_bench.bench.doctor.samples import Estimate
from dlrm_bench.bench.doctor.trace import ITERATION
from tests.bench.doctor.made import (
    CALLER,
    DIST,
    PACKAGES,
    TORCH,
    USER,
    frame,
    made_call,
    rank_file,
    stock_events,
    stock_rank,
)
from tests.bench.profile.gpu_traces import call, event, on_gpu


def findings(*ranks: RankFile) -> list[Finding]:
    events = stock_events(False) + stock_events(True)
    seen = []
    for rank in ranks:
        marked = cuda_calls(events, MARKED_ITERATION) if rank["device"] == "cuda" else []
        take_costs(marked, cuda_calls(events, ITERATION))
        seen.append((rank, seen_by(rank, marked)))
    return [finding for _, finding in findings_of(seen, suggestion)]


def test_a_gpus_findings_name_both_lines_and_cost_what_unmarked_iterations_paid():
    tolist, malloc, from_list = findings(stock_rank())
    assert (tolist["kind"], tolist["file"], tolist["line"]) == (judge.SYNC, "/home/me/train.py", 40)
    assert tolist["function"] == "main"
    assert tolist["library"] == {**DIST, "file": "torchrec/distributed/dist_data.py"}
    assert tolist["called_from"] == {**CALLER, "file": "torchrec/distributed/types.py"}
    assert (tolist["count"], tolist["waits"], tolist["copies"]) == (1, 1, {"DtoH pageable": 1})
    assert tolist["ms"] == pytest.approx(0.420)  # 400 us of the sync and 20 of the copy
    assert "trimmed" in tolist["suggestion"]
    assert (from_list["kind"], from_list["line"], from_list["library"]) == (judge.FROM_LIST, 12, None)
    assert from_list["ms"] == pytest.approx(0.040)
    # No mark was around it: named by what the trace knows.
    assert (malloc["kind"], malloc["file"], malloc["function"]) == (judge.ALLOCATOR, None, "outside of torch")


def test_ranks_are_averaged_and_the_worst_is_kept():
    idle = stock_rank(1)
    idle["calls"] = []
    both = findings(stock_rank(), stock_rank(1))
    assert both[0]["ms"] == pytest.approx(0.420)
    one = seen_by(stock_rank(), cuda_calls(stock_events(True), MARKED_ITERATION))
    half = [finding for _, finding in findings_of([(stock_rank(), one), (idle, {})], suggestion)]
    assert half[0]["ms"] == pytest.approx(0.110)
    assert half[0]["worst_ms"] == pytest.approx(0.220)
    assert half[0]["count"] == 0.5


def cpu(name: str, stack: list[object] | None = None, repeats: int = 1, **about: object) -> list[Finding]:
    """Returns findings of a call that each of two iterations makes `repeats` times."""
    stacks = [stack or [USER]]
    calls = [made_call(name, i, 0, 1000.0 * i + j, **about) for i in range(2) for j in range(repeats)]
    return findings(rank_file(stacks, calls, device="cpu"))


@pytest.mark.parametrize(
    ("name", "about", "kind"),
    [
        ("torch.Tensor.item", {}, judge.SYNC),
        ("torch.Tensor.tolist", {}, judge.SYNC),
        ("torch.Tensor.__bool__", {}, judge.SYNC),
        ("torch.nonzero", {}, judge.SYNC),
        ("torch.Tensor.__getitem__", {"mask": True}, judge.SYNC),
        ("torch.distributed.distributed_c10d.barrier", {}, judge.SYNC),
        ("torch.Tensor.__repr__", {}, judge.PRINT),
        ("torch.tensor", {"from_list": True}, judge.FROM_LIST),
        ("torch.Tensor.to", {"pinned": False, "names_device": True}, judge.H2D),
        ("torch.cuda.synchronize", {}, judge.SYNCHRONIZE),
        ("torch.cuda.streams.Event.synchronize", {}, judge.SYNCHRONIZE),
        ("torch.distributed.distributed_c10d.new_group", {}, judge.PROCESS_GROUP),
    ],
)
def test_kinds_without_a_gpu(name, about, kind):
    (finding,) = cpu(name, **about)
    assert (finding["kind"], finding["line"], finding["count"]) == (kind, 40, 1)
    assert finding["ms"] == pytest.approx(0.010)


@pytest.mark.parametrize(
    ("name", "about"),
    [
        ("torch.Tensor.add", {}),
        ("torch.Tensor.__getitem__", {"mask": False, "gathers": True}),
        ("torch.tensor", {"from_list": False}),
        ("torch.Tensor.to", {"pinned": True, "names_device": True}),
        ("torch.Tensor.to", {"pinned": False, "names_device": False}),  # another type
        ("torch.cuda.empty_cache", {}),
    ],
)
def test_what_is_no_finding_without_a_gpu(name, about):
    assert cpu(name, **about) == []


def test_what_torch_moves_itself_is_no_copy_of_a_batch():
    clip = frame(f"{PACKAGES}/torch/nn/utils/clip_grad.py", 106, "_get_total_norm")
    assert cpu("torch.Tensor.to", [clip, USER], pinned=False, names_device=True) == []


def test_a_read_of_a_tensor_on_the_host_is_no_finding_on_a_gpu():
    rank = rank_file([[USER]], [made_call("torch.Tensor.item", i, 0, 1000.0 * i, device="cpu") for i in range(2)])
    assert seen_by(rank, []) == {}


@pytest.mark.parametrize(
    ("memory", "waits", "kind"),
    [("Pageable", True, judge.H2D), ("Pageable", False, judge.H2D), ("Pinned", True, judge.H2D)],
)
def test_copies_to_a_gpu(memory, waits, kind):
    """One that neither waits nor reads pageable memory is none."""
    assert [finding["kind"] for finding in copied(memory, waits)] == [kind]
    assert copied("Pinned", False) == []


def copied(memory: str, waits: bool) -> list[Finding]:
    """Findings of a copy in each of two iterations."""
    events = []
    for i in range(2):
        t = 1000.0 * i
        events += [
            event("user_annotation", MARKED_ITERATION, t, 1000),
            event("cpu_op", f"{MARK}{i}", t + 10, 200),
            call("cudaMemcpyAsync", t + 20, 20, 10 * i + 1),
            on_gpu(f"Memcpy HtoD ({memory} -> Device)", t + 30, 2, 10 * i + 1),
            *([call("cudaStreamSynchronize", t + 50, 20, 10 * i + 2)] if waits else []),
        ]
    rank = rank_file([[USER]], [made_call("torch.Tensor.to", i, 0, 1000.0 * i + 10) for i in range(2)])
    seen = seen_by(rank, cuda_calls(events, MARKED_ITERATION))
    return [finding for _, finding in findings_of([(rank, seen)], suggestion)]


def test_a_group_made_anew_costs_what_it_takes_to_connect_it():
    """NCCL connects it in its first collective, on another line than the one that makes it."""
    events, calls = [], []
    for i in range(2):
        t, first = 1000.0 * i, 10 * i
        events += [event("user_annotation", MARKED_ITERATION, t, 1000)]
        for j, name in enumerate(("torch.distributed.distributed_c10d.new_group", "all_reduce", "all_reduce")):
            events += [event("cpu_op", f"{MARK}{3 * i + j}", t + 10 + 200 * j, 150)]
            calls += [made_call(name, i, min(j, 1), t + 10 + 200 * j, 150.0)]
        events += [call("cudaMalloc", t + 220, 20, first + 1), call("cudaLaunchKernel", t + 420, 5, first + 2)]
    stacks = [[frame("/home/me/train.py", 7)], [frame("/home/me/train.py", 8)]]
    rank = rank_file(stacks, calls)
    seen = seen_by(rank, cuda_calls(events, MARKED_ITERATION))
    ((_, finding),) = findings_of([(rank, seen)], suggestion)
    assert (finding["kind"], finding["line"], finding["count"]) == (judge.PROCESS_GROUP, 7, 1)
    assert finding["ms"] == pytest.approx(0.3)


def test_time_within_a_call_counts_once():
    """A group that is made, which waits for others: two findings share its time."""
    stacks = [[USER], [DIST, USER], [TORCH, USER]]
    calls = []
    for i in range(2):
        calls += [
            made_call("torch.distributed.distributed_c10d.new_group", i, 0, 1000.0 * i, 900.0),
            made_call("torch.device", i, 1, 1000.0 * i + 10, 800.0, within=3 * i),
            made_call("torch.distributed.distributed_c10d.barrier", i, 1, 1000.0 * i + 20, 700.0, within=3 * i + 1),
        ]
    made, barrier = sorted(findings(rank_file(stacks, calls, device="cpu")), key=lambda finding: finding["kind"])
    assert (made["kind"], barrier["kind"]) == (judge.PROCESS_GROUP, judge.SYNC)
    assert (made["ms"], barrier["ms"]) == (pytest.approx(0.2), pytest.approx(0.7))


def test_no_finding_costs_more_than_an_iteration():
    """Costs under the profiler, which makes iterations longer, are scaled down to those without it."""
    rank = stock_rank()
    rank["plain"]["ms"] = 0.2
    costs = [finding["ms"] or 0.0 for finding in findings(rank)]
    assert 0.19 < sum(costs) <= 0.2  # the rest is a copy from pinned memory, which is no finding
    assert costs[0] == pytest.approx(0.2 * 420 / 515)


def test_times_that_are_scaled_to_the_iteration_stay_within_their_intervals():
    rank = rank_file([[USER]], [made_call("torch.Tensor.item", i, 0, 1000.0 * i, 900.0) for i in range(2)])
    seen = {
        Place(kind, line_of(USER), ()): Seen(count=2, us=2000.0, left_out=Estimate(1.5, 0.1))
        for kind in (judge.SYNC, judge.PRINT)
    }
    for _, finding in findings_of([(rank, seen)], suggestion):
        times = [finding[name] for name in ("ms", "low_ms", "high_ms", "calls_ms", "worst_ms")]
        assert times == [pytest.approx(ms / 3) for ms in (1.5, 1.4, 1.6, 1.0, 1.5)]  # of 3 ms in an iteration of 1


def test_counters_of_an_optimizer_are_on_the_host():
    assert cpu("torch.Tensor.item", [frame(f"{PACKAGES}/torch/optim/optimizer.py", 9), USER]) == []


def test_a_metric_is_one_finding_however_it_works():
    deep = [
        TORCH,
        frame(f"{PACKAGES}/torchmetrics/a.py", 5, "g"),
        frame(f"{PACKAGES}/torchmetrics/b.py", 7, "auc"),
        USER,
    ]
    (finding,) = cpu("torch.cumsum", deep, 3)
    assert (finding["kind"], finding["line"], finding["count"]) == (judge.METRIC, 40, 3)
    assert finding["library"] == frame("torchmetrics/b.py", 0, "auc")


def test_loops_of_launches():
    step = [frame(f"{PACKAGES}/torch/optim/sgd.py", 379, "_single_tensor_sgd"), USER]
    assert cpu("torch.Tensor.add_", step, 15) == []
    (finding,) = cpu("torch.Tensor.add_", step, 16)
    assert (finding["kind"], finding["count"]) == (judge.OPTIMIZER_LOOP, 16)
    assert finding["library"] == frame("torch/optim/sgd.py", 0, "_single_tensor_sgd")
    (finding,) = cpu("torch.Tensor.__setitem__", None, 20)
    assert finding["kind"] == judge.BURST
    assert cpu("torch.Tensor.view", None, 20) == []
    assert cpu("torch.Tensor.__getitem__", None, 20, gathers=False) == []
    assert cpu("torch.nn.functional.linear", [frame(f"{PACKAGES}/torch/nn/modules/container.py", 9), USER], 20) == []


def test_a_shape_that_changes_is_found_where_it_comes_from():
    calls = []
    for i in range(2):
        calls += [
            made_call("torch.zeros", i, 1, 1000.0 * i + 1, shape=[4]),
            made_call("torch.randn", i, 0, 1000.0 * i + 2, shape=[32 - i]),
            made_call("torch.Tensor.add", i, 1, 1000.0 * i + 3, shape=[32 - i]),
        ]
    stacks = [[frame("/home/me/train.py", 7)], [USER]]
    (finding,) = findings(rank_file(stacks, calls, device="cpu"))
    assert (finding["kind"], finding["line"], finding["ms"]) == (judge.SHAPE, 7, None)


def test_times_of_marked_calls_fit_into_an_iteration_without_instruments():
    rank = rank_file(
        [[USER]], [made_call("torch.Tensor.item", i, 0, 1000.0 * i, 900.0) for i in range(2)], device="cpu"
    )
    rank["marked"]["ms"] = 3.5  # of which 0.5 are the marks'
    (finding,) = findings(rank)
    assert finding["ms"] == pytest.approx(0.3)
