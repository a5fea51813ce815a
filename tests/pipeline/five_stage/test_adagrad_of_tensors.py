"""Adagrad's update in one kernel: by its formula, element by element, and as torch's, step by step."""

import gc
import logging
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adagrad

import dlrm_bench.pipeline.five_stage.adagrad_of_tensors as of_kernel
import dlrm_bench.pipeline.five_stage.step_graph as step_graph
from dlrm_bench.kernels._triton import INTERPRETED
from dlrm_bench.pipeline.five_stage.adagrad_of_tensors import (
    adagrad_of_tensors,
    blocks_of,
    has_torchs_bits,
    one_kernel,
)
from dlrm_bench.pipeline.five_stage.step_graph import WARM_UP, StepGraph
from tests.kernels.devices import DEVICE, needs_triton
from tests.pipeline.five_stage.graphed_steps import ANEW, Twins, graphs_on_cpu

pytestmark = needs_triton
OPTIONS: dict[str, Any] = {
    "lr": 0.1,
    "eps": 1e-8,
    "weight_decay": 0.0,
    "lr_decay": 0.0,
    "maximize": False,
    "foreach": None,
    "fused": None,
    "differentiable": False,
}


def by_formula(parameter: Tensor, grad: Tensor, total: Tensor, rate: float, eps: float) -> tuple[Tensor, Tensor]:
    """Parameter and sum after a step, in fp64 of which each line of the formula is rounded to fp32."""
    p, g, s = (of.cpu().double() for of in (parameter, grad, total))
    of_rate, of_eps = torch.tensor(rate).double(), torch.tensor(eps).double()
    new_sum = (g * g + s).float()
    deviation = (new_sum.double().sqrt().float().double() + of_eps).float()
    step = (g * -of_rate).float()
    quotient = (step.double() / deviation.double()).float()
    return (p + quotient.double()).float(), new_sum


def assert_same_bits(ours: Tensor, other: Tensor) -> None:
    assert torch.equal(ours.detach().cpu().view(torch.int32), other.detach().cpu().view(torch.int32))


def slices(counts: list[int], places: list[int]) -> tuple[list[Tensor], list[Tensor]]:
    """Random tensors of these sizes, each at a place in memory of its own; that memory too."""
    memory = [torch.randn(place + count + 5, device=DEVICE) for count, place in zip(counts, places, strict=True)]
    return [of[at : at + n] for of, at, n in zip(memory, places, counts, strict=True)], memory


@pytest.mark.parametrize("places", [(0, 0, 0), (4, 8, 0), (1, 1, 1), (0, 1, 4), (2, 0, 3)], ids=str)
def test_the_kernel_rounds_as_its_formula(places: tuple[int, int, int]) -> None:
    """Of parts of memory, aligned or not; what is around them stays."""
    counts = [1, 2047, 2048, 0, 2049, 3, 6144]
    (parameters, memory), (grads, _), (sums, of_sums) = (slices(counts, [place] * len(counts)) for place in places)
    for total in sums:
        total.abs_()
    expected, before = [], [of.clone() for of in (*memory, *of_sums)]
    for of in zip(parameters, grads, sums, strict=True):
        expected.append(by_formula(*of, 0.05, 1e-4))
    adagrad_of_tensors(blocks_of(parameters, grads, sums), torch.tensor(0.05, device=DEVICE), 1e-4)
    for parameter, total, of in zip(parameters, sums, expected, strict=True):
        assert_same_bits(parameter, of[0])
        assert_same_bits(total, of[1])
    for i, (of, was) in enumerate(zip((*memory, *of_sums), before, strict=True)):
        place, count = places[0] if i < len(counts) else places[2], counts[i % len(counts)]
        assert torch.equal(of[:place], was[:place])
        assert torch.equal(of[place + count :], was[place + count :])


def test_lists_without_elements_are_updated_by_nothing() -> None:
    empty = [torch.zeros(0, device=DEVICE)]
    adagrad_of_tensors(blocks_of(empty, empty, empty), torch.tensor(0.1, device=DEVICE), 1e-8)


@pytest.mark.gpu
def test_it_has_the_bits_of_torchs_foreach_kernels() -> None:
    assert has_torchs_bits(torch.device("cuda", torch.cuda.current_device()))


def of_torch(change: Callable[[Tensor], Tensor]) -> Callable[..., None]:
    """Stands for torch's function: the formula, with changed sums. On CPUs torch's own has square roots of MKL, some of
    which are the other neighbour."""

    def adagrad(parameters: Any, grads: Any, sums: Any, counts: Any, *, lr: float, eps: float, **_: Any) -> None:
        for parameter, grad, total in zip(parameters, grads, sums, strict=True):
            new, of_sum = by_formula(parameter, grad, total, lr, eps)
            parameter.copy_(new)
            total.copy_(change(of_sum))

    return adagrad


def raising(*_: Any, **__: Any) -> None:
    raise RuntimeError("no C compiler")


def next_of_one(sums: Tensor) -> Tensor:
    """The sums, of which one is the next number."""
    sums[-1] = torch.nextafter(sums[-1], torch.tensor(torch.inf))
    return sums


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (of_torch(lambda sums: sums), None),
        (of_torch(next_of_one), f"torch {torch.__version__} rounds otherwise than one of them"),
        (raising, "trying one in Triton, RuntimeError: no C compiler"),
    ],
    ids=["the same bits", "another bit", "an error"],
)
def test_a_trial_finds_out_whether_torch_rounds_so(function: Any, says: Any, monkeypatch: Any, caplog: Any) -> None:
    monkeypatch.setattr(of_kernel, "adagrad", function)
    with caplog.at_level(logging.WARNING):
        assert has_torchs_bits.__wrapped__(DEVICE) is (says is None)
    assert [record.getMessage() for record in caplog.records] == (
        [] if says is None else [f"Adagrad takes torch's own kernels: {says}"]
    )


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel, interpreted, is used on the CPU, and never torch's function; graphs replay by running."""
    if not INTERPRETED:
        pytest.skip("kernels that are compiled do not reach a CPU's memory")
    graphs_on_cpu(monkeypatch)
    monkeypatch.setattr(of_kernel, "runs_on", lambda device: True)
    monkeypatch.setattr(of_kernel, "has_torchs_bits", lambda device: True)
    monkeypatch.setattr(step_graph, "adagrad", raising)


class Slice(nn.Parameter):
    """Of tables, say."""


def lists(make: Callable[[], Tensor]) -> list[list[Tensor]]:
    return [[make(), torch.ones(3)] for _ in range(3)]


ONES = lists(lambda: torch.ones(2, 4))
LEFT_TO_TORCH: dict[str, tuple[Any, dict[str, Any]]] = {
    "no tensors": ([[], [], []], {}),
    "bf16": (lists(lambda: torch.ones(2, 4, dtype=torch.bfloat16)), {}),
    "complex": (lists(lambda: torch.ones(2, 4, dtype=torch.complex64)), {}),
    "gaps": (lists(lambda: torch.ones(2, 8)[:, :4]), {}),
    "overlaps": (lists(lambda: torch.ones(4).expand(2, 4)), {}),
    "transposed": ([[torch.ones(4, 2).t()], [torch.ones(2, 4)], [torch.ones(2, 4)]], {}),
    "sparse": ([[torch.ones(2)], [torch.ones(2).to_sparse()], [torch.ones(2)]], {}),
    "another shape": ([[torch.ones(2)], [torch.ones(1)], [torch.ones(2)]], {}),
    "another type": ([[Slice(torch.ones(2))], [torch.ones(2)], [torch.ones(2)]], {}),
    "tensor by tensor": (ONES, {"foreach": False}),
    "not fused": (ONES, {"fused": False}),
    "weight decay": (ONES, {"weight_decay": 0.1}),
    "maximize": (ONES, {"maximize": True}),
    "a rate in fp64": (ONES, {"lr": torch.tensor(0.1, dtype=torch.float64)}),
    "a rate in a list": (ONES, {"lr": torch.tensor([0.1])}),
    "a rate at an odd address": (ONES, {"lr": torch.ones(2)[1]}),
}


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(("tensors", "options"), LEFT_TO_TORCH.values(), ids=LEFT_TO_TORCH)
def test_what_is_left_to_torch(tensors: Any, options: dict[str, Any]) -> None:
    assert one_kernel(*tensors, OPTIONS | options) is None


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(
    "options", [{}, {"foreach": True}, {"foreach": True, "fused": False}, {"lr": torch.tensor(0.1)}], ids=str
)
def test_what_is_taken(options: dict[str, Any]) -> None:
    tensors = lists(lambda: torch.ones(2, 4))
    update = one_kernel(*tensors, OPTIONS | options)
    assert update is not None
    update()
    assert torch.equal(tensors[2][0], torch.full((2, 4), 2.0))


def test_cpus_and_torch_that_rounds_otherwise_keep_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert one_kernel(*ONES, OPTIONS) is None
    monkeypatch.setattr(of_kernel, "runs_on", lambda device: True)
    monkeypatch.setattr(of_kernel, "has_torchs_bits", lambda device: False)
    assert one_kernel(*ONES, OPTIONS) is None


@pytest.mark.usefixtures("on_cpu")
def test_replays_are_torchs_steps_with_any_rates() -> None:
    """A changed rate is captured once more, and read from then on. MKL's square roots differ in the last bit."""
    twins = Twins(rtol=1e-6, foreach=True)
    assert twins.run(10) == ANEW
    for step in range(10):
        twins.both(lambda adagrad, rate=0.1 * 0.9**step: adagrad.param_groups[0].update(lr=rate))
        assert twins.run(1) == (step == 1, True)
    assert twins.run(10, unused=("p1",)) == ANEW
    assert twins.optimizers[1][1].state[twins.graphed["p0"]]["step"] == 30


class Forgets:
    """Stands for a graph: it keeps nothing alive."""

    def __init__(self, work: Callable[[], None]) -> None:
        """Captures."""

    def replay(self) -> None:
        """Runs nothing."""

    def reset(self) -> None:
        """There is nothing to free."""


@pytest.mark.usefixtures("on_cpu")
def test_the_table_that_a_graph_reads_is_freed_with_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    tables: list[weakref.ref[Tensor]] = []

    def noted(*tensors: Any) -> Tensor:
        table = blocks_of(*tensors)
        tables.append(weakref.ref(table))
        return table

    monkeypatch.setattr(of_kernel, "blocks_of", noted)
    monkeypatch.setattr(step_graph, "record", Forgets)
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    optimizer = Adagrad([parameter], foreach=True)
    graph = StepGraph(optimizer)
    for _ in range(WARM_UP + 3):
        graph.step(optimizer.step)
    gc.collect()
    (table,) = tables
    assert graph.captured
    assert table() is not None
    graph.forget()
    gc.collect()
    assert table() is None


@pytest.mark.gpu
@pytest.mark.parametrize("foreach", [None, True])
@pytest.mark.parametrize("moves", [False, True], ids=["one rate", "rates"])
def test_fifty_replays_have_the_bits_of_torchs_steps(moves: bool, foreach: bool | None, monkeypatch: Any) -> None:
    """Of tensors of any size, on any address."""
    monkeypatch.setattr(step_graph, "adagrad", raising)
    counts, places = [1, 3, 129, 2048, 4099, 1 << 20, 1_000_003], [0, 1, 2, 3, 0, 0, 1]
    ours, theirs = ([nn.Parameter(of) for of in slices(counts, places)[0]] for _ in range(2))
    grads, _ = slices(counts, [0, 0, 1, 0, 3, 0, 0])
    for our, their, grad in zip(ours, theirs, grads, strict=True):
        our.data.copy_(their.data)
        our.grad, their.grad = grad, grad
    of_us, of_torch = (Adagrad(of, lr=0.01, eps=1e-8, foreach=foreach) for of in (ours, theirs))
    graph = StepGraph(of_us)
    for step in range(50):
        if moves:
            of_us.param_groups[0]["lr"] = of_torch.param_groups[0]["lr"] = 0.01 * 0.97**step
        for grad in grads:
            grad.copy_(torch.randn_like(grad) * 10 ** torch.randn_like(grad))
        graph.step(of_us.step)
        of_torch.step()
        for our, their in zip(ours, theirs, strict=True):
            assert_same_bits(our, their)
            assert_same_bits(of_us.state[our]["sum"], of_torch.state[their]["sum"])
    assert graph.captured
    assert of_us.state[ours[0]]["step"] == 50
    graph.forget()
