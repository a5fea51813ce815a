"""Times of metrics on one GPU: TorchRec's RecMetricModule, unfused and fused, and DeviceRecMetrics.

    PYTHONPATH=. python examples/device_metrics_timing.py --out timing.json

Each round runs all cases in turn, with the same batches. A case has, in microseconds:

    host      host time of one call of update(), on an idle device
    update    time per update, for several in a row, until the device is idle again
    graph     device time of an update in a replayed CUDA graph; only DeviceRecMetrics can be captured
    start     host time of one call of compute_async(); only DeviceRecMetrics has it
    compute   time of compute() and of reading all of its values on the host, on an idle device

Each number is the median over rounds of a round's median, with the 95 % interval of the rounds' mean by Student's t.
"""

import argparse
import json
import shlex
import statistics
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor
from torchrec.metrics.metric_module import RecMetricModule, generate_metric_module
from torchrec.metrics.metrics_config import MetricsConfig, RecComputeMode, RecMetricDef, RecMetricEnum, RecTaskInfo

from dlrm_bench.bench.stats.statistics import student_t
from dlrm_bench.kernels.benchmark.graph_time import host_us, replayed_us
from dlrm_bench.pipeline.device_metrics import DeviceRecMetrics

SUMS = (RecMetricEnum.NE, RecMetricEnum.CALIBRATION, RecMetricEnum.CTR, RecMetricEnum.MSE)
ALL = (*SUMS, RecMetricEnum.ACCURACY, RecMetricEnum.AUC)
SETS = {"ne, calibration, ctr, mse": SUMS, "and accuracy, auc": ALL}
WINDOW = 16_384  # samples
KINDS: dict[str, tuple[type[RecMetricModule], RecComputeMode]] = {
    "RecMetricModule, unfused": (RecMetricModule, RecComputeMode.UNFUSED_TASKS_COMPUTATION),
    "RecMetricModule, fused": (RecMetricModule, RecComputeMode.FUSED_TASKS_COMPUTATION),
    "DeviceRecMetrics": (DeviceRecMetrics, RecComputeMode.UNFUSED_TASKS_COMPUTATION),
}
IN_GRAPH, REPLAYS = 50, 10
DEVICE = torch.device("cuda")


def tasks_of(count: int) -> list[RecTaskInfo]:
    """Returns tasks, each with its own labels and predictions, and all with the same weight."""
    return [RecTaskInfo(f"task{i}", f"label{i}", f"prediction{i}", "weight") for i in range(count)]


def batch_of(tasks: Sequence[RecTaskInfo], samples: int) -> dict[str, Tensor]:
    model_out = {"weight": torch.ones(samples, device=DEVICE)}
    for task in tasks:
        model_out[task.label_name] = (torch.rand(samples, device=DEVICE) < 0.3).float()
        model_out[task.prediction_name] = torch.rand(samples, device=DEVICE)
    return model_out


class Case:
    """One kind of metrics module, for a number of tasks."""

    def __init__(self, kind: str, metrics: str, tasks: int, samples: int) -> None:
        self.key = {"kind": kind, "metrics": metrics, "tasks": tasks}
        metric_class, mode = KINDS[kind]
        rec_tasks = tasks_of(tasks)
        definitions = {metric: RecMetricDef(rec_tasks=rec_tasks, window_size=WINDOW) for metric in SETS[metrics]}
        config = MetricsConfig(rec_tasks=rec_tasks, rec_metrics=definitions, rec_compute_mode=mode)
        self.module = generate_metric_module(metric_class, config, samples, 1, 0, {}, DEVICE)
        self.model_out = batch_of(rec_tasks, samples)
        # More samples than the window holds, so that removing the oldest is part of an update's work.
        while self.module.trained_batches * samples < 1.5 * WINDOW:
            self.module.update(self.model_out)
        self.module.compute()
        self.graph = self._captured() if isinstance(self.module, DeviceRecMetrics) else None
        self.rounds: dict[str, list[float]] = {}

    def _captured(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(IN_GRAPH):
                self.module.update(self.model_out)
        return graph

    def measure(self, calls: int) -> None:
        """Adds the times of one round."""
        self._add("host", [host_us(self._update) for _ in range(calls)])
        self._add("update", [host_us(self._update, calls, wait=True)])
        if self.graph is not None:
            self._add("graph", [replayed_us(self.graph, REPLAYS) / IN_GRAPH for _ in range(3)])
            self._add("start", [host_us(self.module.compute_async) for _ in range(3)])
        self._add("compute", [host_us(self._compute, wait=True) for _ in range(2)])

    def _update(self) -> None:
        self.module.update(self.model_out)

    def _compute(self) -> None:
        for value in self.module.compute().values():
            value.item()

    def _add(self, name: str, times: list[float]) -> None:
        self.rounds.setdefault(name, []).append(statistics.median(times))

    def result(self) -> dict[str, object]:
        return {**self.key, **{name: summary(times) for name, times in self.rounds.items()}}


def summary(rounds: list[float]) -> dict[str, object]:
    """Returns the median, and the 95 % interval of the mean, of the rounds' medians."""
    middle, spread = statistics.mean(rounds), statistics.stdev(rounds) / len(rounds) ** 0.5
    half = student_t(0.975, len(rounds) - 1) * spread
    interval = [round(middle - half, 2), round(middle + half, 2)]
    return {
        "median": round(statistics.median(rounds), 2),
        "interval": interval,
        "rounds": [round(t, 2) for t in rounds],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--samples", type=int, default=512, help="number of samples per batch")
    parser.add_argument("--rounds", type=int, default=7, help="number of rounds, at least 2")
    parser.add_argument("--calls", type=int, default=8, help="number of updates of a case per round")
    options = parser.parse_args()
    if options.rounds < 2:
        parser.error("--rounds: an interval needs at least 2")
    if not torch.cuda.is_available():
        parser.error("this needs a GPU: examples/device_metrics.py runs without one")
    cases = [Case(kind, metrics, tasks, options.samples) for metrics in SETS for tasks in (1, 20) for kind in KINDS]
    for _ in range(options.rounds):
        for case in cases:
            case.measure(options.calls)
    record = {
        "command": shlex.join(sys.argv),
        "machine": torch.cuda.get_device_name(),
        "versions": {
            "torch": torch.__version__,
            "torchrec": version("torchrec"),
            "torchmetrics": version("torchmetrics"),
            "cuda": torch.version.cuda,
        },
        "samples": options.samples,
        "window": WINDOW,
        "unit": "us",
        "cases": [case.result() for case in cases],
    }
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    print(table(record["cases"]))


def table(cases: Sequence[dict[str, dict[str, object]]]) -> str:
    names = ("host", "update", "graph", "start", "compute")
    lines = [f"{'metrics':28}{'tasks':>6}  {'kind':26}" + "".join(f"{name:>12}" for name in names)]
    for case in cases:
        times = "".join(f"{case[name]['median'] if name in case else '-':>12}" for name in names)
        lines.append(f"{case['metrics']:28}{case['tasks']:>6}  {case['kind']:26}{times}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
