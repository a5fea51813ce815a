"""Cross-cutting: metrics of training batches are the same under every pipeline, and equal a plain computation of the
predictions that a pipeline gives: over ranks, beside evaluations, and of no batch but the training's."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dlrm_bench.bench.config import RunConfig
from dlrm_bench.bench.instruments.train_metrics import TrainMetrics
from dlrm_bench.dlrm.dcnv2 import static_schedule
from dlrm_bench.dlrm.dlrmv4.data.generate import generate, smoke_config
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.build import build_pipeline
from dlrm_bench.pipeline.static_sequences.lane import EAGER
from tests.bench.instruments.test_train_metrics import plain
from tests.cases import GPU_PLACES, WAYS
from tests.pipeline.cpu_graphs import capture_on_cpu
from tests.pipeline.small_runs import batches_of
from tests.pipeline.small_runs import small as small_dcn
from tests.pipeline.static_sequences.test_pipeline import drawn, evaluated, without_room
from tests.pipeline.static_sequences.test_pipeline import small as small_sequences
from tests.pipelines import changed

INTERVAL, STEPS = 4, 14
"""Iterations of each value, and of all, the last of which fill no interval."""
CAPTURED_STEPS = 50
BEFORE = 6
"""Iterations before the evaluation."""
GRAPH: dict[str, Any] = {"cuda_graph": "iteration", "overlap": True}
PLACES = [pytest.param(2, False), *GPU_PLACES]


class Logged:
    """Metrics that keep every batch on the device as well, which a graph can hold."""

    def __init__(self, metrics: TrainMetrics, samples: int, device: torch.device) -> None:
        self._metrics = metrics
        most = CAPTURED_STEPS + EAGER + 2  # or those of a warm-up
        self._kept = torch.zeros(2, most, samples, device=device)
        self._count = torch.zeros(1, dtype=torch.int64, device=device)

    def update(self, predictions: Tensor, labels: Tensor) -> None:
        for kept, batch in zip(self._kept, (predictions, labels), strict=True):
            kept.index_copy_(0, self._count, batch[None])
        self._count += 1
        self._metrics.update(predictions, labels)

    def reset(self) -> None:
        self._count.zero_()
        self._metrics.reset()

    @property
    def batches(self) -> Tensor:
        """Predictions and labels, float32 [2, batches, samples], on the CPU."""
        return self._kept[:, : self._count.item()].cpu()


@dataclass(slots=True)
class Measured:
    arrays: dict[str, np.ndarray]
    """Of `TrainMetrics.finish`."""
    batches: Tensor
    """Predictions and labels of all ranks, [ranks, 2, steps, samples]."""
    losses: list[float]
    described: dict[str, Any]


def measured(
    ranks: Ranks, config: RunConfig, batches: Iterator[Any], held_out: Iterator[Any], steps: int = STEPS
) -> Measured:
    torch.set_float32_matmul_precision("highest")
    pipeline = build_pipeline(config, config.pipeline, ranks)
    metrics = TrainMetrics(ranks.device, INTERVAL, config.local_batch_size)
    logged = Logged(metrics, config.local_batch_size, ranks.device)
    pipeline.measure(logged)
    pipeline.warm_up(evaluates=True)
    training, losses = map(pipeline.prepare, batches), []
    for step in range(steps):
        losses.append(pipeline.train_step(training))
        metrics.end_step()
        if step + 1 == BEFORE:
            assert list(pipeline.evaluate(map(pipeline.prepare, held_out)))
    arrays = metrics.finish()
    own = logged.batches
    everyone: list[Any] = [None] * ranks.world_size
    dist.all_gather_object(everyone, own)
    described = pipeline.describe()
    pipeline.close()
    return Measured(arrays, torch.stack(everyone), [loss.item() for loss in losses], described)


def of_dcn(ranks: Ranks) -> dict[str, Measured]:
    """By pipeline and its options: stock, five-stage, and the static pipeline, in each way and in two halves."""
    on_gpu = ranks.device.type == "cuda"
    if not on_gpu:
        capture_on_cpu()
    stock = changed(small_dcn(), "torchrec")
    configs = {"stock": stock, "five-stage": changed(stock, "five-stage")}
    configs |= {way: small_dcn(**options, **GRAPH) for way, options in WAYS.items()}
    configs |= {"eager": small_dcn(**WAYS["presorted"]), "halves": small_dcn(**WAYS["peer memory"], **GRAPH)}
    results = {}
    for name, config in configs.items():
        with pytest.MonkeyPatch.context() as patch:
            if name == "halves":
                patch.setattr(static_schedule, "_FILLING_BATCH", 1)
            results[name] = measured(ranks, config, batches_of(config, ranks), batches_of(config, ranks, 3))
    return results


def assert_plain(of: Measured, steps: int = STEPS) -> None:
    """Asserts that rank 0's values are those of the batches that were kept, each of all ranks."""
    assert of.batches.shape[2] == steps, "the training's batches, and no other"
    after = np.arange(INTERVAL, steps + 1, INTERVAL)
    assert list(of.arrays["metrics_after"]) == list(after)
    assert set(of.batches[:, 1].unique().tolist()) == {0.0, 1.0}
    for i, end in enumerate(after):
        predictions, labels = of.batches[:, :, end - INTERVAL : end].transpose(0, 1).double().flatten(1)
        expected = plain(torch.logit(predictions).numpy(), labels.numpy())
        assert (of.arrays["ne"][i], of.arrays["calibration"][i]) == pytest.approx(expected, rel=1e-9)


def assert_same(a: Measured, b: Measured, tolerance: float) -> None:
    """Asserts equal labels, and predictions, losses and rank 0's values that are as close as `tolerance`."""
    assert torch.equal(a.batches[:, 1], b.batches[:, 1])
    torch.testing.assert_close(a.batches, b.batches, rtol=0, atol=tolerance)
    torch.testing.assert_close(torch.tensor(a.losses), torch.tensor(b.losses), rtol=tolerance, atol=tolerance)
    for name in ("metrics_after", "ne", "calibration"):
        np.testing.assert_allclose(a.arrays[name], b.arrays[name], rtol=tolerance, atol=0)


@pytest.mark.parametrize(("world_size", "gpu"), PLACES)
def test_every_pipeline_measures_what_stock_measures(
    run_ranks: Callable[..., list[Any]], world_size: int, gpu: bool
) -> None:
    results = run_ranks(world_size, of_dcn, gpu=gpu)[0]
    for name, found in results.items():
        assert_plain(found)
        assert_same(found, results["stock"], 1e-5)
        if name in (*WAYS, "halves"):
            assert found.described["cuda_graphs"]["iteration"]["captures"] == 1
    assert len(set(results["stock"].arrays["ne"])) == STEPS // INTERVAL


def of_sequences(ranks: Ranks, folder: Path) -> dict[str, Measured]:
    """Stock, and the static pipeline with graphs for many rooms, eager, and with rooms that batches exceed."""
    if ranks.device.type == "cpu":
        capture_on_cpu()

    def run(pipeline: str, **options: Any) -> Measured:
        config = small_sequences(folder, pipeline, **options)
        return measured(ranks, config, iter(drawn(config, ranks)), iter(evaluated(config, ranks)))

    results = {"stock": run("torchrec"), "graphs": run("static", **GRAPH), "eager": run("static")}
    without_room()
    return results | {"without room": run("static", **GRAPH)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("days")
    generate(replace(smoke_config(folder), users=300, days=5))
    return folder


@pytest.mark.parametrize(("world_size", "gpu"), PLACES)
def test_sequences_are_measured_in_whatever_room_they_train(
    run_ranks: Callable[..., list[Any]], folder: Path, world_size: int, gpu: bool
) -> None:
    results = run_ranks(world_size, of_sequences, folder, gpu=gpu)[0]
    for found in results.values():
        assert_plain(found)
        assert_same(found, results["stock"], 1e-3 if gpu else 1e-5)
    tight = results["without room"].described
    assert tight["rooms"]["iteration"]["larger_rooms"] > 0
    assert len(tight["rooms"]["iteration"]["batches_by_room_for_tokens"]) > 3
    assert (tight["rooms"]["iteration"]["batches_over_capacity"] > 0) == (world_size > 1)


def captured(ranks: Ranks, folder: Path) -> dict[str, list[Measured]]:
    """The same batches in graphs and eagerly: in fp32 and bf16, whole and in halves; sequences, in fused kernels."""
    results: dict[str, list[Measured]] = {}
    for name, options in (
        ("fp32", WAYS["presorted"]),
        ("bf16", {"precision": "bf16", **WAYS["peer memory"]}),
        ("halves", {"local_batch_size": 2048, **WAYS["peer memory"]}),
    ):
        results[name] = []
        for how in (GRAPH, {}):
            config = small_dcn(**options, **how)
            training, held_out = (batches_of(config, ranks, count) for count in (CAPTURED_STEPS, 3))
            results[name].append(measured(ranks, config, training, held_out, CAPTURED_STEPS))
    results["sequences"] = []
    for how in (GRAPH, {}):
        config = small_sequences(folder, "static", **how)
        config = replace(config, model=replace(config.model, kernels="fused"))
        batches = iter(drawn(config, ranks)), iter(evaluated(config, ranks))
        results["sequences"].append(measured(ranks, config, *batches, CAPTURED_STEPS))
    return results


@pytest.mark.parametrize(("world_size", "gpu"), GPU_PLACES)
def test_graphs_measure_what_is_measured_eagerly(
    run_ranks: Callable[..., list[Any]], folder: Path, world_size: int, gpu: bool
) -> None:
    """To the bit, except for sequences, some of whose sums have another order in each run."""
    for name, (graph, eager) in run_ranks(world_size, captured, folder, gpu=gpu)[0].items():
        assert_plain(graph, CAPTURED_STEPS)
        assert_same(graph, eager, 1e-3 if name == "sequences" else 0)
        assert graph.described["cuda_graphs"]["iteration"]["captures"] >= 1
        assert graph.described["cuda_graphs"]["iteration"]["fell_back"] is None
