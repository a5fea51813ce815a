"""NE and calibration of training batches, beside the loss: summed on the device, and read an interval later."""

import math

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.metrics.metric_module import generate_metric_module
from torchrec.metrics.metrics_config import MetricsConfig, RecMetricDef, RecMetricEnum, RecTaskInfo

from dlrm_bench.bench.config import RunConfig
from dlrm_bench.bench.records.schema import TrainMetricValues
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.device_metrics import DeviceRecMetrics
from dlrm_bench.pipeline.device_metrics.pending import PendingMetrics
from dlrm_bench.pipeline.interface import Pipeline

METRICS = {"ne": RecMetricEnum.NE, "calibration": RecMetricEnum.CALIBRATION}
_TASK = RecTaskInfo(name="train", label_name="label", prediction_name="prediction", weight_name="weight")


class TrainMetrics:
    """Values of every `interval` iterations' batches of all ranks, by TorchRec's definitions. The launching thread
    waits for the GPU only in `finish`. Rank 0 has the values; other ranks take part. A pipeline adds the batches, as to
    dlrm_bench.pipeline.interface.StepMetrics."""

    def __init__(self, device: torch.device, interval: int, local_batch: int) -> None:
        """local_batch: samples of a batch; each is real, and has weight 1. Collective: makes a process group."""
        self._interval = interval
        of_task = RecMetricDef(rec_tasks=[_TASK])
        self._metrics = generate_metric_module(
            metric_class=DeviceRecMetrics,
            metrics_config=MetricsConfig(
                rec_tasks=[_TASK], rec_metrics=dict.fromkeys(METRICS.values(), of_task), throughput_metric=None
            ),
            batch_size=local_batch,
            world_size=dist.get_world_size(),
            my_rank=dist.get_rank(),
            state_metrics_mapping={},
            device=device,
            process_group=dist.new_group(),  # keeps its gathers from standing between the training's collectives
        )
        self._weight = torch.ones(local_batch, device=device)
        self._metrics.compute_async()  # before the first timed one, as the ranks connect and kernels are loaded in it
        self._count = 0
        self._pending: PendingMetrics | None = None
        self._values: list[tuple[float, ...]] = []

    @classmethod
    def of_run(cls, config: RunConfig, ranks: Ranks, pipeline: Pipeline) -> "TrainMetrics":
        """Returns the metrics of a run with --train-metrics, to which the pipeline's training steps are added."""
        metrics = cls(ranks.device, config.loss_interval, config.local_batch_size)
        pipeline.measure(metrics)
        return metrics

    def update(self, predictions: Tensor, labels: Tensor) -> None:
        """See dlrm_bench.pipeline.interface.StepMetrics."""
        if len(predictions) > len(self._weight):  # of a model with several labels a sample
            self._weight = predictions.new_ones(len(predictions))
        weight = self._weight[: len(predictions)]
        self._metrics.update({"label": labels, "prediction": predictions, "weight": weight})

    def reset(self) -> None:
        """See dlrm_bench.pipeline.interface.StepMetrics."""
        self._metrics.reset()

    def end_step(self) -> None:
        """Ends a training step, which has called `update` or replayed it. Collective at every `interval`-th call."""
        self._count += 1
        if self._count % self._interval == 0:
            self._receive()
            self._pending = self._metrics.compute_async()
            self.reset()

    def finish(self) -> dict[str, np.ndarray]:
        """Waits for all values. Returns float64 arrays: by metric its values, and `metrics_after`, the number of this
        run's iterations after which each was computed."""
        self._receive()
        count = len(self._values)
        by_metric = zip(METRICS, np.array(self._values, np.float64).reshape(count, len(METRICS)).T, strict=True)
        return {"metrics_after": np.arange(1, count + 1) * self._interval, **dict(by_metric)}

    @property
    def last(self) -> TrainMetricValues:
        """Returns the last values read; None without any, or if they are not finite."""
        ne, calibration = self._values[-1] if self._values else (math.nan, math.nan)
        return {"ne": _finite(ne), "calibration": _finite(calibration)}

    def _receive(self) -> None:
        if self._pending is not None:
            values = self._pending.result()
            if values:
                self._values.append(tuple(values[f"{name}-train|lifetime_{name}"].item() for name in METRICS))
            self._pending = None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
