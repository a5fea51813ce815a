"""Metrics of both kinds over the same tasks, and batches for them."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torchrec.metrics.metric_module import RecMetricModule, generate_metric_module
from torchrec.metrics.metrics_config import MetricsConfig, RecMetricDef, RecMetricEnum, RecTaskInfo

from dlrm_bench.pipeline.device_metrics import DeviceRecMetrics
from tests.kernels.devices import DEVICE

WINDOWS = {
    RecMetricEnum.NE: 100,
    RecMetricEnum.CALIBRATION: 130,
    RecMetricEnum.AUC: 90,
    RecMetricEnum.CTR: 100,
    RecMetricEnum.MSE: 64,
    RecMetricEnum.ACCURACY: 10_000,
}
"""Windows in samples over all ranks: shorter than the tests' training, but for one."""


def tasks(count: int) -> list[RecTaskInfo]:
    """Tasks with labels, predictions and weights of their own."""
    return [RecTaskInfo(f"task{i}", f"label{i}", f"prediction{i}", f"weight{i}") for i in range(count)]


def config(
    rec_tasks: list[RecTaskInfo],
    windows: Mapping[RecMetricEnum, int] = WINDOWS,
    arguments: Mapping[RecMetricEnum, dict[str, Any]] | None = None,
    **options: Any,
) -> MetricsConfig:
    """Returns all metrics of `windows` for all tasks."""
    arguments = arguments or {}
    metrics = {
        # TorchRec adds to the arguments that it is given.
        metric: RecMetricDef(rec_tasks=rec_tasks, window_size=window, arguments=dict(arguments.get(metric, {})))
        for metric, window in windows.items()
    }
    return MetricsConfig(rec_tasks=rec_tasks, rec_metrics=metrics, **options)


def made(
    kind: type[RecMetricModule],
    of: MetricsConfig,
    rank: int = 0,
    world_size: int = 1,
    device: torch.device = DEVICE,
    batch_size: int = 16,
    **options: Any,
) -> RecMetricModule:
    """The metrics of a config, as a script makes them."""
    return generate_metric_module(
        kind,
        metrics_config=of,
        batch_size=batch_size,
        world_size=world_size,
        my_rank=rank,
        state_metrics_mapping={},
        device=device,
        **options,
    )


def both(of: MetricsConfig, **options: Any) -> tuple[RecMetricModule, DeviceRecMetrics]:
    """TorchRec's metrics of a config, and ours."""
    device_metrics = made(DeviceRecMetrics, of, **options)
    assert isinstance(device_metrics, DeviceRecMetrics)
    return made(RecMetricModule, of, **options), device_metrics


def batch(
    of: list[RecTaskInfo],
    size: int,
    generator: torch.Generator,
    dtype: torch.dtype = torch.float64,
    device: torch.device = DEVICE,
) -> dict[str, Tensor]:
    """Random outputs: labels 0 and 1, predictions within (0, 1), a third of the weights zero."""
    model_out = {}
    for task in of:
        draw = torch.rand(4, size, generator=generator, dtype=dtype).to(device)
        model_out[task.label_name] = (draw[0] < 0.3).to(dtype)
        model_out[task.prediction_name] = 0.001 + 0.998 * draw[1]
        model_out[task.weight_name] = draw[2] * (draw[3] > 1 / 3)
    return model_out


def copied(model_out: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns a copy for TorchRec's NE, which clamps float64 predictions in place."""
    return {name: tensor.clone() for name, tensor in model_out.items()}


def assert_same_values(ours: Mapping[str, Any], theirs: Mapping[str, Any], relative: float = 1e-12) -> None:
    """Asserts equal keys, shapes and dtypes; values within a relative difference, and AUC to the bit."""
    assert set(ours) == set(theirs)
    for key, value in theirs.items():
        value = value.cpu()
        assert (ours[key].shape, ours[key].dtype) == (value.shape, value.dtype), key
        rtol = 0.0 if "|window_auc" in key else relative
        torch.testing.assert_close(
            ours[key], value, rtol=rtol, atol=0.0, equal_nan=True, msg=lambda m, k=key: f"{k}: {m}"
        )
