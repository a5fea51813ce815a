"""Checks of outputs: shapes, dtypes and strides that are taken as TorchRec takes them, and those that are refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torchrec.metrics.metric_module import RecMetricModule
from torchrec.metrics.metrics_config import RecMetricEnum

from dlrm_bench.pipeline.device_metrics import DeviceRecMetrics
from dlrm_bench.pipeline.device_metrics.update import Updater, launch_all
from tests.kernels.devices import DEVICE, needs_triton
from tests.pipeline.device_metrics.made_metrics import (
    WINDOWS,
    assert_same_values,
    batch,
    both,
    config,
    copied,
    made,
    tasks,
)

GENERATOR = torch.Generator().manual_seed(0)


def as_column(tensor: Tensor) -> Tensor:
    """Returns it at a stride of three, as a column of several tasks' logits."""
    return torch.stack([tensor, tensor + 1, tensor + 2], dim=1)[:, 0]


FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "column": lambda tensor: tensor[:, None],
    "three dimensions": lambda tensor: tensor[:, None, None],
    "of a stride": as_column,
    "column of a stride": lambda tensor: as_column(tensor)[:, None],
    "matrix": lambda tensor: tensor.view(4, -1),
    "offset": lambda tensor: torch.cat([tensor.new_zeros(3), tensor])[3:],
    "one element": lambda tensor: tensor[:1],
    "no dimension": lambda tensor: tensor[0],
    "requires grad": lambda tensor: tensor.clone().requires_grad_(),
}


@pytest.mark.parametrize("form", FORMS)
def test_shapes_are_taken_as_torchrec_takes_them(form: str) -> None:
    of = tasks(2)
    theirs, ours = both(config(of))
    for _ in range(4):
        model_out = {name: FORMS[form](tensor) for name, tensor in batch(of, 40, GENERATOR).items()}
        ours.update(model_out)
        theirs.update({name: tensor.detach().clone() for name, tensor in model_out.items()})
    assert_same_values(ours.compute(), theirs.compute())


def test_an_expanded_weight_is_taken() -> None:
    of = tasks(1)
    theirs, ours = both(config(of))
    model_out = batch(of, 40, GENERATOR)
    model_out["weight0"] = torch.full((), 0.5, dtype=torch.float64, device=DEVICE).expand(40)
    ours.update(model_out)
    theirs.update(copied(model_out))
    assert_same_values(ours.compute(), theirs.compute())


@pytest.mark.parametrize("labels", [torch.bool, torch.uint8, torch.int32, torch.int64, torch.float16, torch.float32])
@pytest.mark.parametrize("predictions", [torch.bfloat16, torch.float16, torch.float32])
def test_any_real_dtype_is_taken_as_its_float64(labels: torch.dtype, predictions: torch.dtype) -> None:
    """Tasks of other dtypes beside it; TorchRec is given the same numbers as float64."""
    of = tasks(2)
    theirs, ours = both(config(of))
    for _ in range(2):
        model_out = batch(of, 40, GENERATOR)
        model_out["label0"], model_out["prediction0"] = (
            model_out["label0"].to(labels),
            model_out["prediction0"].to(predictions),
        )
        ours.update(model_out)
        theirs.update({name: tensor.double() for name, tensor in model_out.items()})
    assert_same_values(ours.compute(), theirs.compute())


def test_a_batch_is_not_written_to() -> None:
    """TorchRec's NE clamps float64 predictions in place."""
    of = tasks(1)
    metrics = made(DeviceRecMetrics, config(of))
    model_out = batch(of, 40, GENERATOR)
    model_out["prediction0"][:3] = torch.tensor([0.0, 1.0, 0.5])
    before = copied(model_out)
    metrics.update(model_out)
    for name, tensor in before.items():
        assert torch.equal(model_out[name], tensor)


def test_predictions_of_zero_one_and_nan() -> None:
    of = tasks(1)
    theirs, ours = both(config(of))
    for nan in (False, True):
        model_out = batch(of, 40, GENERATOR)
        model_out["prediction0"][:3] = torch.tensor([0.0, 1.0, float("nan") if nan else 0.5])
        ours.update(model_out)
        theirs.update(copied(model_out))
        # TorchRec's NE clamps what the metrics after it read, by 1e-12.
        values, expected = ours.compute(), theirs.compute()
        for key, value in expected.items():
            torch.testing.assert_close(values[key], value.cpu(), rtol=1e-11, atol=0.0, equal_nan=True)


def without(name: str) -> Callable[[dict[str, Any]], object]:
    return lambda model_out: model_out.pop(name)


def put(name: str, value: Callable[[Tensor], Any]) -> Callable[[dict[str, Any]], object]:
    return lambda model_out: model_out.__setitem__(name, value(model_out[name]))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (without("weight1"), "no 'weight1'"),
        (put("label0", lambda tensor: tensor.tolist()), "'label0' of the model's output is a list"),
        (put("label0", lambda tensor: tensor[1:]), r"task 'task0' has 39 labels \('label0'\), 40 predictions"),
        (put("weight1", lambda tensor: tensor[:0]), "task 'task1' has 40 labels .* and 0 weights"),
        (put("label1", lambda tensor: tensor.to(torch.complex64)), "'label1' is torch.complex64"),
        (put("label1", lambda tensor: tensor.to_sparse()), "'label1' is .*sparse"),
        (put("prediction0", lambda tensor: tensor.view(5, 8).t()), r"'prediction0' has shape \(8, 5\) and is not"),
        (put("prediction0", lambda tensor: tensor.to("meta")), "'prediction0' is on meta"),
    ],
    ids=["missing", "list", "lengths", "empty", "complex", "sparse", "strided", "device"],
)
def test_a_bad_batch_is_refused_by_name_and_changes_nothing(spoil: Callable[[Any], object], message: str) -> None:
    of = tasks(2)
    metrics = made(DeviceRecMetrics, config(of))
    good = batch(of, 40, GENERATOR)
    metrics.update(good)
    before = [tensor.clone() for tensor in metrics.device_state.buffers()]
    bad: dict[str, Any] = dict(good)
    spoil(bad)
    with pytest.raises(ValueError, match=message):
        metrics.update(bad)
    assert all(map(torch.equal, before, metrics.device_state.buffers()))
    metrics.update(good)
    assert metrics.trained_batches == 2


def test_a_form_is_checked_once() -> None:
    of = tasks(1)
    metrics = made(DeviceRecMetrics, config(of))
    updater: Updater = metrics._updater
    for size in (8, 16, 8, 16):
        metrics.update(batch(of, size, GENERATOR))
    assert len(updater._forms) == 2


@needs_triton
def test_tasks_beyond_one_launch_take_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dlrm_bench.pipeline.device_metrics.triton_update.MAX_TASKS", 2)
    of = tasks(7)
    sums = config(of, {metric: window for metric, window in WINDOWS.items() if metric != RecMetricEnum.AUC})
    plain, ours = (made(DeviceRecMetrics, sums, device=device) for device in (torch.device("cpu"), DEVICE))
    model_out = batch(of, 20, GENERATOR)
    for name in ("label2", "prediction2", "weight2", "label3", "prediction3", "weight3", "label6"):
        model_out[name] = model_out[name][:0]  # tasks 2 and 3, which would share a launch, have no samples
    model_out |= {"prediction6": model_out["prediction6"][:0], "weight6": model_out["weight6"][:0]}
    updater: Updater = ours._updater
    tensors = [model_out[name] for name in updater._names]
    sizes = [0 if task in (2, 3, 6) else 20 for task in range(7)]
    launches = updater._launches(sizes, [1] * 21, [torch.float64] * 21)
    assert len(launches) == 2
    launch_all(launches, tensors)
    plain.update({name: tensor.cpu() for name, tensor in model_out.items()})
    assert_same_values(ours.compute(), plain.compute())


def test_more_forms_than_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dlrm_bench.pipeline.device_metrics.update._MOST_FORMS", 3)
    of = tasks(1)
    theirs, ours = both(config(of))
    assert isinstance(theirs, RecMetricModule)
    for size in range(1, 9):
        model_out = batch(of, size, GENERATOR)
        ours.update(model_out)
        theirs.update(copied(model_out))
    assert len(ours._updater._forms) <= 3
    assert_same_values(ours.compute(), theirs.compute())
