"""Evaluation without a run around it: samples that pad the last batches do not count."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from dlrm_bench.bench.checkpoints.checkpoints import Checkpoints
from dlrm_bench.bench.instruments.clock import IterationClock
from dlrm_bench.bench.instruments.losses import LossHistory
from dlrm_bench.bench.instruments.progress import StillBar
from dlrm_bench.bench.instruments.schedule import plan_schedule
from dlrm_bench.bench.mlperf.log import MLPerfLog
from dlrm_bench.bench.presets import preset
from dlrm_bench.bench.run import Run
from dlrm_bench.bench.run_files import _training
from dlrm_bench.dlrm.data.batch import Batch
from dlrm_bench.dlrm.data.metrics import exact_auc
from dlrm_bench.dlrm.dcnv2.config import ModelConfig
from dlrm_bench.dlrm.runtime.ranks import Ranks


class FewSamples:
    """Evaluation batches of 8, of which `valid` are real; the others would spoil the AUC."""

    train_samples = 8
    eval_samples = 15
    best_auc = None

    def __init__(self, valid: list[int], model: ModelConfig) -> None:
        self.batches = [self.batch(i, n, model) for i, n in enumerate(valid)]

    @staticmethod
    def batch(seed: int, valid: int, model: ModelConfig) -> Batch:
        batch = Batch.empty(8, model)
        generator = torch.Generator().manual_seed(seed)
        batch.dense.copy_(torch.randn(batch.dense.shape, generator=generator))
        batch.labels.copy_(torch.arange(8) % 2)
        batch.dense[valid:], batch.labels[valid:], batch.num_valid = -9, 1, valid
        return batch

    def eval_batches(self, rank: int, world_size: int, local_batch_size: int, pin: bool = False) -> Iterator[Batch]:
        return iter(self.batches)


class FirstFeature:
    """A model whose logit is the first dense feature; reads one batch ahead, as real pipelines do."""

    def prepare(self, batch: Batch) -> Batch:
        return batch

    def evaluate(self, batches: Iterator[Batch]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        ahead = next(batches, None)
        while (batch := ahead) is not None:
            ahead = next(batches, None)
            yield batch.dense[:, 0], batch.labels


def run_with(valid: list[int]) -> Run:
    config = replace(preset("smoke"), local_batch_size=8, warmup_iterations=0)
    dataset = FewSamples(valid, config.model)
    cpu = torch.device("cpu")
    ranks = Ranks(rank=0, local_rank=0, world_size=1, local_world_size=1, device=cpu)
    return Run(
        config=config,
        ranks=ranks,
        dataset=dataset,  # type: ignore[arg-type]
        schedule=plan_schedule(config, 8, 1),
        pipeline=FirstFeature(),  # type: ignore[arg-type]
        log=MLPerfLog(None),
        clock=IterationClock(cpu),
        losses=LossHistory(cpu, 1),
        bar=StillBar(1, "", Console()),
        folder=Path(),
        checkpoints=Checkpoints(config, ranks, FirstFeature(), None),  # type: ignore[arg-type]
    )


def test_padding_does_not_count():
    this = run_with([8, 5, 2, 0])
    real = [(b.dense[: b.num_valid, 0], b.labels[: b.num_valid]) for b in this.dataset.eval_batches(0, 1, 8)]
    scores, labels = (torch.cat(parts) for parts in zip(*real, strict=True))
    assert this.evaluate(0.5) == exact_auc(scores, labels)


@pytest.mark.parametrize(("valid", "samples"), [([8, 5, 2, 0], 15), ([8], 8)])
def test_the_record_counts_the_samples_that_were_evaluated(valid: list[int], samples: int):
    """Some data sets leave out the samples that fill no global batch (--data.drop-last-evaluation)."""
    this = run_with(valid)
    this.auc = [this.evaluate(0.5), this.evaluate(1.0)][-1]
    evaluations = _training(this, [0.5])["evaluations"]
    assert (evaluations["samples"], len(evaluations["seconds"])) == (samples, 2)
