"""NE and calibration of training batches are TorchRec's own of the same batches, over ranks, interval by interval;
whole runs have them under every pipeline, and go on with them after a checkpoint."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from dlrm_bench.bench.instruments.train_metrics import METRICS, TrainMetrics
from dlrm_bench.bench.records.record import ITERATIONS_NPZ, read_record
from dlrm_bench.dlrm.dcnv2.data.planted import PlantedConfig, generate
from dlrm_bench.dlrm.runtime.ranks import Ranks
from tests.bench.test_run import CADENCE, SAMPLES_PER_DAY, assert_aborted, launch, values

INTERVAL, BATCH, STEPS = 4, 32, 11
LONG = 1003
"""Steps of an interval with more batches than TorchRec's windows hold."""


def plain(logits: np.ndarray, labels: np.ndarray) -> tuple[float, float]:
    """Cross entropy over that of the mean label, and the mean prediction over the mean label (He et al., 2014)."""
    prediction, rate = 1 / (1 + np.exp(-logits)), labels.mean()
    entropy = -(labels * np.log2(prediction) + (1 - labels) * np.log2(1 - prediction)).mean()
    return entropy / -(rate * np.log2(rate) + (1 - rate) * np.log2(1 - rate)), prediction.mean() / rate


def collected(
    ranks: Ranks, interval: int, count: int, batch: int, local_batch: int
) -> tuple[dict[str, np.ndarray], Any, list[Any]]:
    """Values of `count` steps with `batch` labels each, after one that is forgotten; and the steps of all ranks."""
    torch.manual_seed(ranks.rank)
    steps = [(torch.randn(batch), (torch.rand(batch) < 0.4).float()) for _ in range(count)]
    metrics = TrainMetrics(ranks.device, interval, local_batch)
    metrics.update(torch.full((batch,), 0.9), torch.zeros(batch))
    metrics.reset()
    for logits, labels in steps:
        metrics.update(torch.sigmoid(logits), labels)
        metrics.end_step()
    arrays = metrics.finish()
    everyone: list[Any] = [None] * ranks.world_size
    dist.all_gather_object(everyone, steps)
    return arrays, metrics.last, everyone


@pytest.mark.parametrize(
    ("interval", "count", "batch", "local_batch"),
    [(INTERVAL, STEPS, BATCH, BATCH), (INTERVAL, STEPS, 3 * BATCH, BATCH), (LONG, LONG + 1, 2, 2)],
    ids=["one label a sample", "three labels a sample", "long interval"],
)
def test_values_are_those_of_the_batches_of_all_ranks(
    run_ranks: Callable[..., Any], interval: int, count: int, batch: int, local_batch: int
) -> None:
    for rank, (arrays, last, everyone) in enumerate(run_ranks(2, collected, interval, count, batch, local_batch)):
        if rank:
            assert last == {"ne": None, "calibration": None}
            continue
        after = list(range(interval, count + 1, interval))
        assert list(arrays["metrics_after"]) == after  # the last steps fill no interval
        for i, end in enumerate(after):
            steps = [step for of_rank in everyone for step in of_rank[end - interval : end]]
            logits, labels = (torch.cat([step[j] for step in steps]).double().numpy() for j in (0, 1))
            expected = plain(logits, labels)
            assert (arrays["ne"][i], arrays["calibration"][i]) == pytest.approx(expected, rel=1e-5)
        assert last == {"ne": arrays["ne"][-1], "calibration": arrays["calibration"][-1]}


def test_nothing_is_known_of_a_run_without_a_whole_interval(run_ranks: Callable[..., Any]) -> None:
    ((arrays, last),) = run_ranks(1, empty)
    assert {name: len(of) for name, of in arrays.items()} == {"metrics_after": 0, "ne": 0, "calibration": 0}
    assert last == {"ne": None, "calibration": None}


def empty(ranks: Ranks) -> tuple[dict[str, np.ndarray], Any]:
    metrics = TrainMetrics(ranks.device, INTERVAL, BATCH)
    metrics.update(torch.full((BATCH,), 0.5), torch.zeros(BATCH))
    metrics.end_step()
    return metrics.finish(), metrics.last


# Whole runs


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, _, _ = generate(PlantedConfig(path=tmp_path_factory.mktemp("data"), samples_per_day=SAMPLES_PER_DAY))
    return path


def run(data: Path, folder: Path, pipeline: str, iterations: int, *arguments: str) -> dict[str, np.ndarray]:
    """Returns what iterations.npz has of a run that evaluates, and misses its target."""
    flags = ["--pipeline", pipeline, "--iterations", str(iterations), "--target-auc", "0.85", "--train-metrics"]
    ended = launch(data, folder, *flags, "--loss-interval", str(INTERVAL), *arguments)
    assert ended.statuses == [3, 3], ended
    assert len(values(folder, "eval_accuracy")) >= iterations // CADENCE
    record = read_record(folder / "results" / "x")
    with np.load(record.folder / ITERATIONS_NPZ) as arrays:
        found = {name: arrays[name] for name in ("metrics_after", *METRICS)}
    training = record.run["training"]
    assert training is not None
    last = {name: found[name][-1] if found[name].size else None for name in METRICS}
    assert training["train_metrics"] == last
    return found


def test_runs_of_all_pipelines_have_them_and_go_on_with_them(data: Path, tmp_path: Path) -> None:
    stock, whole = (run(data, tmp_path / name, name, 3 * INTERVAL) for name in ("torchrec", "static"))
    assert list(whole["metrics_after"]) == [INTERVAL, 2 * INTERVAL, 3 * INTERVAL]
    assert len(set(whole["ne"])) == 3
    for name in METRICS:
        np.testing.assert_allclose(whole[name], stock[name], rtol=1e-5)
    saved = tmp_path / "saved"
    saves = ("--checkpoint.path", str(saved), "--checkpoint.every", str(INTERVAL))
    run(data, tmp_path / "interrupted", "static", INTERVAL + 1, *saves)
    resumed = run(data, tmp_path / "resumed", "static", 3 * INTERVAL, "--resume", str(saved))
    assert list(resumed["metrics_after"]) == [INTERVAL, 2 * INTERVAL]
    for name in METRICS:
        assert np.array_equal(resumed[name], whole[name][1:])


def test_a_run_with_them_that_diverges_ends_as_one_without(data: Path, tmp_path: Path) -> None:
    flags = ["--pipeline", "static", "--optimizer.learning-rate", "1e30", "--target-auc", "None", "--train-metrics"]
    ended = launch(data, tmp_path, *flags, "--loss-interval", str(INTERVAL))
    assert_aborted(tmp_path, ended)
    for output in ended.outputs:
        assert "the loss of iteration 2 is nan: the run stops, with the weights as iteration 1 left them" in output
        assert "Traceback" not in output
