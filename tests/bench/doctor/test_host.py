import pytest

from dlrm_bench.bench.doctor import judge
from dlrm_bench.bench.doctor.findings import Seen, seen_by
from dlrm_bench.bench.doctor.host import HostCosts
from dlrm_bench.bench.doctor.judge import Place
from dlrm_bench.bench.doctor.rank_file import Frame, RankFile
from dlrm_bench.bench.doctor.samples import Estimate
from tests.bench.doctor.made import PACKAGES, USER, frame, made_call, rank_file, sampled

FORWARD = frame(f"{PACKAGES}/torch/nn/modules/linear.py", 9, "Linear.forward")
READS = frame("/home/me/data.py", 12, "read", "file.read()")
QUEUE = frame("/env/lib/python3.12/queue.py", 171, "Queue.get")
LOADER = frame(f"{PACKAGES}/torch/utils/data/dataloader.py", 1275, "_MultiProcessingDataLoaderIter._try_get_data")


def estimates(*parts: tuple[list[Frame], float, float], rank: RankFile | None = None) -> dict[Place, Estimate]:
    """parts: stacks with the time of an iteration of 1 ms, in us, and the share of it that the thread ran."""
    made = rank or rank_file([], [], device="cpu")
    samples = []
    for i in range(50):
        at = 1000.0 * i
        for number, (_, us, ran) in enumerate(parts):
            at += us
            samples.append((min(at, 1000.0 * i + 999), number, us, us * ran))
    made["sampled"] = sampled([stack for stack, _, _ in parts], samples)
    return HostCosts(made, seen_by(made, []), {}, []).estimates()


@pytest.mark.parametrize(
    ("stack", "ran", "kind", "line", "function"),
    [
        ([READS, USER], 0.1, judge.HOST_WAIT, 12, None),
        ([READS, USER], 0.9, judge.HOST_COMPUTE, 12, None),
        ([QUEUE, READS, USER], 0.0, judge.HOST_WAIT, 12, "Queue.get"),
        ([QUEUE, LOADER, USER], 0.0, judge.LOADER, 40, "_MultiProcessingDataLoaderIter._try_get_data"),
        ([frame(f"{PACKAGES}/numpy/a.py", 3, "sort"), USER], 1.0, judge.HOST_COMPUTE, 40, "sort"),
    ],
)
def test_time_outside_of_torch_is_a_finding(stack, ran, kind, line, function):
    ((place, estimate),) = estimates((stack, 300.0, ran), ([FORWARD, USER], 700.0, 1.0)).items()
    assert (place.kind, place.user.line) == (kind, line)
    assert [one.function for one in place.library] == ([] if function is None else [function])
    assert estimate.ms == pytest.approx(0.3)


@pytest.mark.parametrize(("ran", "kind"), [(0.05, judge.HOST_WAIT), (0.25, judge.HOST_COMPUTE)])
def test_waits_for_a_core_tell_nothing_of_the_kind(ran, kind):
    """A sleep that a busy machine ends late, and a computation that loses its core: .7 of their time without one."""
    rank = rank_file([], [], device="cpu")
    rank["sampled"] = sampled([[READS, USER]], [])
    rank["sampled"]["samples"] = [(1000.0 * i + 500, 0, 400.0, 400.0 * ran, 280.0) for i in range(50)]
    ((place, estimate),) = HostCosts(rank, {}, {}, []).estimates().items()
    assert place.kind == kind
    assert estimate.ms == pytest.approx(0.4)


def test_what_is_no_finding():
    assert estimates(([READS, USER], 20.0, 0.0), ([FORWARD, USER], 980.0, 1.0)) == {}  # 2 %
    assert estimates(([FORWARD, USER], 1000.0, 0.0)) == {}  # torch waits
    assert estimates(([QUEUE, FORWARD, USER], 1000.0, 0.0)) == {}


def test_a_line_that_calls_torch_alone_is_no_work_outside_of_it():
    """Operators run no Python: the script's line is the innermost frame."""
    calls = [made_call("torch.Tensor.mul", i, 0, 1000.0 * i, 400.0) for i in range(2)]
    rank = rank_file([[USER]], calls, device="cpu")
    assert estimates(([USER], 600.0, 1.0), ([FORWARD, USER], 400.0, 1.0), rank=rank) == {}


def test_a_lambda_is_the_line_that_it_stands_in():
    inner = frame(USER["file"], USER["line"], "main.<locals>.<lambda>", USER["text"])
    (place,) = estimates(([inner, USER], 300.0, 1.0), ([USER], 300.0, 1.0))
    assert place.user.function == "main"


def test_a_read_costs_its_line_and_not_what_the_line_calls():
    calls = [made_call("torch.Tensor.item", i, 0, 1000.0 * i, 10.0) for i in range(2)]
    rank = rank_file([[USER]], calls, device="cpu")
    ((place, estimate),) = estimates(([USER], 200.0, 1.0), ([FORWARD, USER], 800.0, 1.0), rank=rank).items()
    assert (place.kind, estimate.ms) == (judge.SYNC, pytest.approx(0.2))


@pytest.mark.parametrize(("operators", "found"), [([0], {}), ([], {judge.SYNC: 0.0})])
def test_an_operator_without_samples_costs_what_its_calls_take(operators, found):
    """`if t:` many times an iteration, each shorter than the sampler needs to see it: the next call has its samples."""
    calls = [made_call("torch.Tensor.__bool__", i, 0, 1000.0 * i, 300.0) for i in range(2)]
    rank = rank_file([[USER]], calls, device="cpu") | {"operators": operators}
    rank["marked"]["marks_ms"] = 0.5  # as fast as without marks
    costs = estimates(([FORWARD, USER], 1000.0, 1.0), rank=rank)
    assert {place.kind: estimate.ms for place, estimate in costs.items()} == found
    ((_, seen),) = seen_by(rank, []).items()
    assert seen.ms(2) == pytest.approx(0.3)


def test_a_line_that_logs_a_value_goes_as_a_whole():
    logging = frame("/env/lib/python3.12/logging/__init__.py", 377, "LogRecord.getMessage")
    calls = [made_call("torch.Tensor.item", i, 0, 1000.0 * i, 10.0) for i in range(2)]
    rank = rank_file([[logging, USER]], calls, device="cpu")
    emits = frame("/env/lib/python3.12/logging/__init__.py", 1100, "StreamHandler.emit")
    ((place, estimate),) = estimates(([emits, USER], 200.0, 1.0), ([FORWARD], 800.0, 1.0), rank=rank).items()
    assert (place.kind, estimate.ms) == (judge.SYNC, pytest.approx(0.2))


def test_findings_at_one_line_share_its_samples():
    names = [("torch.Tensor.item", 30.0), ("torch.tensor", 10.0)]
    calls = [
        made_call(name, i, 0, 1000.0 * i + j, us, from_list=name == "torch.tensor")
        for i in range(2)
        for j, (name, us) in enumerate(names)
    ]
    rank = rank_file([[USER]], calls, device="cpu")
    found = estimates(([USER], 400.0, 1.0), ([FORWARD, USER], 600.0, 1.0), rank=rank)
    assert {place.kind: round(one.ms, 6) for place, one in found.items()} == {judge.SYNC: 0.3, judge.FROM_LIST: 0.1}


def test_the_lines_of_a_loop_are_one_finding_with_their_backward(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("for step in data:\n    for row in rows:\n        a = x * row\n        b = b + a\n    step()\n")
    one, two = (frame(str(script), line, "<module>", "") for line in (3, 4))
    calls = [
        made_call("torch.Tensor.add", i, stack, 1000.0 * i + 10 * j, 5.0)
        for i in range(2)
        for j in range(20)
        for stack in (0, 1)
    ]
    rank = rank_file([[one], [two]], calls, device="cpu")
    rank["loop"] = [frame(str(script), 5, "<module>")]
    header = frame(str(script), 2, "<module>", "")
    rank["sampled"] = sampled(
        [[one], [two], [header], [FORWARD, frame(str(script), 5, "<module>")]],
        [(1000.0 * i + 200 * j, j, 200.0, 200.0) for i in range(50) for j in range(4)],
    )
    seen = seen_by(rank, [])
    assert len(seen) == 2
    backward = dict.fromkeys(range(len(calls)), 2.0)
    ((place, estimate),) = HostCosts(rank, seen, backward, []).estimates().items()
    assert (place.kind, seen[place].count, len(seen)) == (judge.BURST, 80, 1)
    assert estimate.ms == pytest.approx(0.6 + 0.08)


def test_what_leaving_out_costs_where_calls_agree_and_where_not():
    seen = Seen(us=100.0, left_out=Estimate(0.06, 0.02))
    assert seen.ms(2) == 0.05  # in the interval
    seen.left_out = Estimate(0.2, 0.02)
    assert seen.ms(2) == 0.2
    assert Seen(us=None, left_out=Estimate(0.2, 0.1)).ms(2) == 0.2
    assert Seen(us=None).ms(2) is None
