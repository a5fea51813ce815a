"""Cross-cutting: twenty tasks' metrics, updated within the graph of an iteration whose learning rates change with every
step, are TorchRec's, and the model is trained as without graphs."""

import signal
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torchrec.metrics.metric_module import RecMetricModule
from torchrec.metrics.metrics_config import RecComputeMode

from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.device_metrics import DeviceRecMetrics
from dlrm_bench.pipeline.five_stage.options import FiveStageOptions
from dlrm_bench.pipeline.five_stage.pipeline import FiveStagePipeline
from dlrm_bench.pipeline.five_stage.trimmed.sharder import TrimmedEBCSharder
from tests.cases import GPU_PLACES
from tests.pipeline.cpu_graphs import iteration_graph_on_cpu
from tests.pipeline.device_metrics.made_metrics import assert_same_values, config, copied, made, tasks
from tests.pipeline.five_stage.torchrec_models import BATCH, HOT, batches, build, state

TASKS = tasks(20)
DISTINCT = 50
"""Batches, which are used in turn."""
EAGER = 5
WHOLE = FiveStageOptions(cuda_graph="iteration")


@dataclass
class Run:
    outputs: list[tuple[Tensor, ...]] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)
    described: dict[str, Any] = field(default_factory=dict)


class OfTasks:
    """Outputs of all tasks, made of one logit and one label a sample."""

    def __init__(self, device: torch.device) -> None:
        self._scales = torch.linspace(-2, 2, len(TASKS), dtype=torch.float64, device=device)[:, None]
        self._weights = torch.linspace(0.5, 1.5, BATCH, dtype=torch.float64, device=device)

    def __call__(self, logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
        predictions = torch.sigmoid(self._scales * logits.double() + self._scales)
        label, made = labels.double(), dict[str, Tensor]()
        for i, task in enumerate(TASKS):
            made |= {task.label_name: label, task.prediction_name: predictions[i], task.weight_name: self._weights}
        return made


def metrics_of(ranks: Ranks, kind: type[RecMetricModule]) -> Any:
    fused = config(TASKS, rec_compute_mode=RecComputeMode.FUSED_TASKS_COMPUTATION)
    return made(kind, fused, ranks.rank, ranks.world_size, ranks.device, BATCH)


def train(
    ranks: Ranks,
    steps: int,
    options: FiveStageOptions,
    change: Callable[[Any], None] = lambda model: None,
    after: Callable[[int, tuple[Tensor, ...]], None] = lambda step, output: None,
) -> Run:
    """change: to the model before it is sharded. after: called with the output of each step."""
    model, optimizer = build(ranks, "mixed without RW", sharder=TrimmedEBCSharder(HOT), change=change)
    run, given = Run(), batches(ranks, DISTINCT, fixed=True)
    data = iter([given[step % DISTINCT] for step in range(steps)])
    with FiveStagePipeline(model, optimizer, ranks.device, options) as pipeline:
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = 0.05 * min(1, (step + 1) / 10) / (1 + step / 50)
            output = pipeline.progress(data)
            after(step, output)
            run.outputs.append(tuple(tensor.cpu() for tensor in output))
        run.state, run.described = state(model, optimizer), pipeline.describe()
    return run


def within_the_graph(ranks: Ranks, steps: int) -> Run:
    """Trains with DeviceRecMetrics in the model's forward; compares them with RecMetricModule's, which get the outputs
    of every step, four times on the way."""
    ours, theirs, of_tasks = (
        metrics_of(ranks, DeviceRecMetrics),
        metrics_of(ranks, RecMetricModule),
        OfTasks(ranks.device),
    )
    pending: list[Any] = []

    def updates(model: Any) -> None:
        forward = model.forward

        def updating(batch: Any) -> Any:
            losses, output = forward(batch)
            # The plain update, for CPUs, reads what a kernel reads itself.
            with _disable_current_modes() if ranks.device.type == "cpu" else nullcontext():
                ours.update(of_tasks(*output[1:]))
            return losses, output

        model.forward = updating

    def compare(step: int, output: tuple[Tensor, ...]) -> None:
        for computing, expected in pending:  # while the next step is trained
            assert_same_values(computing.result(), expected)
        pending.clear()
        theirs.update(copied(of_tasks(*output[1:])))
        if (step + 1) % (steps // 4) == 0:
            pending.append((ours.compute_async(), theirs.compute()))

    run = train(ranks, steps, WHOLE, updates, compare)
    assert_same_values(ours.compute(), theirs.compute())
    return run


def compared(ranks: Ranks, steps: int, rtol: float) -> dict[str, Any]:
    signal.alarm(600)
    torch.backends.cuda.matmul.allow_tf32 = False
    if ranks.device.type == "cpu":
        iteration_graph_on_cpu(numbered=True)
    ours, eager = within_the_graph(ranks, steps), train(ranks, steps, FiveStageOptions())
    torch.testing.assert_close(ours.outputs, eager.outputs, rtol=rtol, atol=rtol)
    torch.testing.assert_close(ours.state, eager.state, rtol=10 * rtol, atol=rtol)
    return ours.described


@pytest.mark.parametrize(
    ("world_size", "gpu", "steps", "rtol"),
    [
        (2, False, 32, 0.0),
        *(pytest.param(*place.values, 1000, 1e-4, marks=(*place.marks, pytest.mark.slow)) for place in GPU_PLACES),
    ],
)
def test_schedules_and_twenty_tasks_train_and_measure_as_without_graphs(
    run_ranks: Callable[..., Any], world_size: int, gpu: bool, steps: int, rtol: float
) -> None:
    for described in run_ranks(world_size, compared, steps, rtol, gpu=gpu):
        assert (described["replays"], described["captures"], described["eager"]) == (steps - EAGER, 1, {})
        assert described["follows_table_rates"]
