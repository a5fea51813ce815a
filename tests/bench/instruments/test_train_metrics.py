"""NE and calibration of training batches are TorchRec's own of the same batches, over ranks, interval by interval."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from dlrm_bench.bench.instruments.train_metrics import TrainMetrics
from dlrm_bench.dlrm.runtime.ranks import Ranks

INTERVAL, BATCH, STEPS = 4, 32, 11


def plain(logits: np.ndarray, labels: np.ndarray) -> tuple[float, float]:
    """Cross entropy over that of the mean label, and the mean prediction over the mean label (He et al., 2014)."""
    prediction, rate = 1 / (1 + np.exp(-logits)), labels.mean()
    entropy = -(labels * np.log2(prediction) + (1 - labels) * np.log2(1 - prediction)).mean()
    return entropy / -(rate * np.log2(rate) + (1 - rate) * np.log2(1 - rate)), prediction.mean() / rate


def collected(ranks: Ranks) -> tuple[dict[str, np.ndarray], Any, list[Any]]:
    torch.manual_seed(ranks.rank)
    steps = [(torch.randn(BATCH), (torch.rand(BATCH) < 0.4).float()) for _ in range(STEPS)]
    taken = iter(steps)
    metrics = TrainMetrics(lambda: next(taken), ranks.device, INTERVAL, BATCH)
    for _ in steps:
        metrics.add()
    arrays = metrics.finish()
    everyone: list[Any] = [None] * ranks.world_size
    dist.all_gather_object(everyone, steps)
    return arrays, metrics.last, everyone


def test_values_are_those_of_the_batches_of_all_ranks(run_ranks: Callable[..., Any]) -> None:
    for rank, (arrays, last, everyone) in enumerate(run_ranks(2, collected)):
        if rank:
            assert last == {"ne": None, "calibration": None}
            continue
        assert list(arrays["metrics_after"]) == [4, 8]  # the last three steps fill no interval
        for i, after in enumerate(arrays["metrics_after"]):
            steps = [step for of_rank in everyone for step in of_rank[after - INTERVAL : after]]
            logits, labels = (torch.cat([step[j] for step in steps]).double().numpy() for j in (0, 1))
            expected = plain(logits, labels)
            assert (arrays["ne"][i], arrays["calibration"][i]) == pytest.approx(expected, rel=1e-5)
        assert last == {"ne": arrays["ne"][-1], "calibration": arrays["calibration"][-1]}


def test_nothing_is_known_of_a_run_without_a_whole_interval(run_ranks: Callable[..., Any]) -> None:
    ((arrays, last),) = run_ranks(1, empty)
    assert {name: len(of) for name, of in arrays.items()} == {"metrics_after": 0, "ne": 0, "calibration": 0}
    assert last == {"ne": None, "calibration": None}


def empty(ranks: Ranks) -> tuple[dict[str, np.ndarray], Any]:
    metrics = TrainMetrics(lambda: (torch.zeros(BATCH), torch.zeros(BATCH)), ranks.device, INTERVAL, BATCH)
    metrics.add()
    return metrics.finish(), metrics.last
