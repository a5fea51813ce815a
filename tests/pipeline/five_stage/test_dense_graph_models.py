"""Cross-cutting: models that a dense graph cannot hold, and outputs of all kinds, train as stock, or it is said why."""

import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchrec.datasets.utils import Batch
from torchrec.models.dlrm import DLRMTrain

from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.five_stage.options import FiveStageOptions
from dlrm_bench.pipeline.five_stage.pipeline import FiveStagePipeline
from tests.cases import GPU_PLACES
from tests.pipeline.cpu_graphs import dense_graph_on_cpu
from tests.pipeline.five_stage.test_dense_graph import DENSE, TIMEOUT, assert_equal, train
from tests.pipeline.five_stage.torchrec_models import BATCH, Trained, batches, build, drain, state

ONE = [(1, False), GPU_PLACES[0]]
TWO = [(2, False), *GPU_PLACES]


def start(ranks: Ranks) -> float:
    """Of every function below; the tolerance between an eager and a graphed run, for weights 10 times as much."""
    signal.alarm(TIMEOUT)
    torch.backends.cuda.matmul.allow_tf32 = False
    if ranks.device.type == "cuda":
        return 1e-5
    dense_graph_on_cpu()
    return 0


class ReadsPast(nn.Module):
    """Reads parameters that it has put into a list, and one of them as a module does, too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.linear = nn.Linear(12, 12)
        self.own = [self.linear.weight, self.linear.bias]

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, *self.own) + self.linear.bias


def add_reads_past(model: DLRMTrain) -> None:
    model.model.over_arch.model.insert(1, ReadsPast())


def reads_past(ranks: Ranks) -> None:
    start(ranks)
    data = batches(ranks, 8)
    ours, trainer = train(ranks, DENSE, data, add_reads_past)
    theirs, _ = train(ranks, None, data, add_reads_past)
    assert not ours.captured
    assert_equal(ours, theirs, 1e-5)  # the bias's gradient is summed in another order
    off = trainer.switched_off["cuda_graph"]
    assert "reads model.over_arch.model.1.linear.weight past the module that it is a parameter of" in off


@pytest.mark.parametrize(("world_size", "gpu"), TWO)
def test_parameters_read_past_their_module_are_trained_and_said(run_ranks, world_size, gpu):
    run_ranks(world_size, reads_past, gpu=gpu)


class Checkpointed(nn.Module):
    """torch.autograd.grad does not run its backward, if it is reentrant. Leaves traces before that."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.linear, self.norm, self.dropout = nn.Linear(12, 12), nn.BatchNorm1d(12), nn.Dropout(0.3)
        self._reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.linear, self.dropout(self.norm(x)), use_reentrant=self._reentrant)


def checkpointed(ranks: Ranks) -> None:
    """Reentrant on all ranks, or on the last one alone."""
    tolerance = start(ranks)
    data = batches(ranks, 8)
    for first in (0, ranks.world_size - 1):

        def change(model: DLRMTrain, first: int = first) -> None:
            model.model.over_arch.model.insert(1, Checkpointed(ranks.rank >= first))

        for threads in (1, 2):
            options = FiveStageOptions(cuda_graph="dense", launch_threads=threads)
            ours, trainer = train(ranks, options, data, change)
            theirs, _ = train(ranks, None, data, change)
            assert_equal(ours, theirs, tolerance)
            assert not ours.captured
            off = trainer.switched_off["cuda_graph"]
            assert ("use_reentrant=True" if ranks.rank >= first else "another rank could not") in off


@pytest.mark.parametrize(("world_size", "gpu"), TWO)
def test_what_autograd_grad_cannot_run_trains_as_by_ddp(run_ranks, world_size, gpu):
    run_ranks(world_size, checkpointed, gpu=gpu)


def ddp_afterwards(ranks: Ranks) -> None:
    """One model, without DDP until its first iterations are done."""
    tolerance = start(ranks)

    def change(model: DLRMTrain) -> None:
        model.model.over_arch.model.insert(1, Checkpointed(True))

    expected, _ = train(ranks, None, batches(ranks, 9), change)
    model, optimizer = build(ranks, "mixed", change=change)
    torch.manual_seed(7)
    trained, data = Trained(), batches(ranks, 9)
    for options, part in ((DENSE, data[:4]), (FiveStageOptions(), data[4:])):
        with FiveStagePipeline(model, optimizer, ranks.device, options) as trainer:
            trained.outputs += drain(trainer, iter(part)).outputs
    trained.state = state(model, optimizer)
    assert_equal(trained, expected, tolerance)


@pytest.mark.parametrize(("world_size", "gpu"), TWO)
def test_ddp_trains_on_afterwards(run_ranks, world_size, gpu):
    run_ranks(world_size, ddp_afterwards, gpu=gpu)


class Fails(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise LookupError("of the user")


def add_failing(model: DLRMTrain) -> None:
    model.model.over_arch.model.insert(1, Fails())


def fails(ranks: Ranks) -> None:
    start(ranks)
    with pytest.raises(LookupError, match="of the user") as raised:
        train(ranks, DENSE, batches(ranks, 3), add_failing)
    assert raised.value.__context__ is None


def test_the_models_own_errors_are_seen(run_ranks):
    run_ranks(2, fails)


def fails_with_its_device(ranks: Ranks) -> None:
    """As after an assertion on the device: whatever comes next fails, too."""
    start(ranks)

    def change(model: DLRMTrain) -> None:
        def fail(*_: Any) -> None:
            dist.all_reduce = no_device  # type: ignore[assignment]
            raise LookupError("of the user")

        model.model.over_arch.register_forward_pre_hook(fail)

    def no_device(*_: Any, **__: Any) -> None:
        raise RuntimeError("CUDA error")

    all_reduce = dist.all_reduce
    with pytest.raises(LookupError, match="of the user"):
        train(ranks, DENSE, batches(ranks, 3), change)
    dist.all_reduce = all_reduce


def test_the_models_own_error_is_seen_where_the_device_fails_with_it(run_ranks):
    run_ranks(1, fails_with_its_device)


@dataclass
class AsDataclass:
    loss: Tensor
    logits: Tensor
    count: int


class AsTuple(NamedTuple):
    loss: Tensor
    logits: Tensor


class Opaque:
    def __init__(self, loss: Tensor) -> None:
        self.loss = loss


OUTPUTS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "tuple": lambda loss, logits: (loss, (logits, None)),
    "dict": lambda loss, logits: {"loss": loss, "more": [logits]},
    "dataclass": lambda loss, logits: AsDataclass(loss, logits, 3),
    "named tuple": AsTuple,
    "opaque": lambda loss, logits: (Opaque(loss), logits),
}


def outputs(ranks: Ranks) -> None:
    tolerance = start(ranks)
    for name, make in OUTPUTS.items():

        def change(model: DLRMTrain, make: Callable[[Tensor, Tensor], Any] = make) -> None:
            before = model.forward

            def forward(batch: Batch) -> Any:
                losses, (loss, logits, _) = before(batch)
                return losses, make(loss, logits)

            model.forward = forward  # type: ignore[method-assign, assignment]

        results = []
        for options in (FiveStageOptions(), DENSE):
            model, optimizer = build(ranks, "TW", change=change)
            with FiveStagePipeline(model, optimizer, ranks.device, options) as trainer:
                data = iter(batches(ranks, 9))
                results.append([trainer.progress(data) for _ in range(9)])
                graph = trainer._graph
                if graph is not None:
                    assert (not graph.captured) == (name == "opaque")
                    assert (graph.why_eager is None) == (name != "opaque")
        if name == "opaque":
            assert "output holds a Opaque" in trainer.switched_off["cuda_graph"]
            continue
        eager, graphed = results
        for one, other in zip(eager, graphed, strict=True):
            assert type(one) is type(other)
            torch.testing.assert_close(*(_plain(output) for output in (other, one)), rtol=tolerance, atol=tolerance)


def _plain(output: Any) -> Any:
    return vars(output) if isinstance(output, AsDataclass) else output


@pytest.mark.parametrize(("world_size", "gpu"), ONE)
def test_outputs_of_any_kind_are_copied_out_of_the_graph(run_ranks, world_size, gpu):
    run_ranks(world_size, outputs, gpu=gpu)


class Noted(Batch):
    """A batch with a field that is no tensor."""

    note: Any = None

    def to(self, device: torch.device, non_blocking: bool = False) -> "Noted":
        return noted(super().to(device, non_blocking), self.note)


def noted(batch: Batch, note: Any) -> Noted:
    result = Noted(batch.dense_features, batch.sparse_features, batch.labels)
    result.note = note
    return result


def why(ranks: Ranks) -> None:
    start(ranks)

    def train_on(note: Callable[[int], Any], size: int = BATCH) -> tuple[bool, str | None]:
        data = [noted(batch, note(i)) for i, batch in enumerate(batches(ranks, 9) + batches(ranks, 1, size=size))]
        ours, trainer = train(ranks, DENSE, data, plan="TW")
        return ours.captured, trainer._graph.why_eager

    assert train_on(lambda i: 5) == (True, None)
    captured, said = train_on(lambda i: 5, BATCH - 2)
    assert captured
    assert said is not None
    assert said.startswith("1 of 10 batches ran eagerly")
    assert said.endswith(f"float32 of shape ({BATCH - 2}, 5), where the first had float32 of shape ({BATCH}, 5)")
    captured, said = train_on(lambda i: [7, f"id{i}" + i * "x" * 100])
    assert not captured
    assert said is not None
    assert said.startswith("9 of 10 batches ran eagerly")
    assert said.endswith(f"batch.note[1] is 'id1{53 * 'x'}..., where the first had 'id0'")
    captured, said = train_on(lambda i: object())
    assert not captured
    assert said is not None
    assert said.startswith("10 of 10 batches ran eagerly: batch.note is a object, whose values a graph cannot compare")
    captured, said = train_on(lambda i: [5] * (1 + i))
    assert not captured
    assert said is not None
    assert said.endswith("a batch with 4 fields besides its KJTs, where the first had 3")


@pytest.mark.parametrize(("world_size", "gpu"), ONE)
def test_why_batches_ran_eagerly_is_told(run_ranks, world_size, gpu):
    run_ranks(world_size, why, gpu=gpu)
