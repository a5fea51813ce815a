"""The dense part is padded with tokens only if a trial finds that nothing changes; the trial leaves no trace."""

import copy
import signal
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.five_stage import padding
from dlrm_bench.pipeline.five_stage.graph_obstacles import runs_in_graphs
from dlrm_bench.pipeline.five_stage.options import FiveStageOptions
from tests.pipeline.cpu_graphs import dense_graph_on_cpu
from tests.pipeline.five_stage.any_models import Loss, Sequence, batches, sequences
from tests.pipeline.five_stage.test_graph_pool import DENSE, PLACES, both, train


class MeanOfTokens(Sequence):
    """Divides by the number of rows."""

    def logits(self, batch: Any) -> Tensor:
        found = self.items(batch.sequences)
        return self.of(found) + found["history"].values().mean()


class NormOfTokens(Sequence):
    """Its running statistics see all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.BatchNorm1d(8)

    def logits(self, batch: Any) -> Tensor:
        found = self.items(batch.sequences)
        return self.of(found) + self.tokens(found["history"].values()).sum() * 0.01


class MaskedById(Sequence):
    """Leaves out tokens of id 0, by their ids alone: those of padding too, as long as they are 0."""

    def __init__(self) -> None:
        super().__init__()
        self.items = sequences(need_indices=True)

    def logits(self, batch: Any) -> Tensor:
        found = self.items(batch.sequences)
        named = found["history"].weights() != 0
        return self.of(found) + (found["history"].values() * named.unsqueeze(1)).sum() / named.sum()


class MeanInOutput(Sequence):
    """Puts out a mean over all rows, which its loss does not see."""

    def forward(self, batch: Any) -> Any:
        found = self.items(batch.sequences)
        logits = self.of(found)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
        return loss, (loss.detach(), found["history"].values().detach().mean())


class MeanInBuffer(Sequence):
    """Keeps a mean over all rows, which its loss does not see."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def logits(self, batch: Any) -> Tensor:
        found = self.items(batch.sequences)
        self.mean.lerp_(found["history"].values().detach().mean(), 0.5)
        return self.of(found)


class OneRowForEach(Sequence):
    """Takes exactly as many rows as the sequences have."""

    def logits(self, batch: Any) -> Tensor:
        found = self.items(batch.sequences)
        history = found["history"]
        spread = batch.labels.repeat_interleave(history.lengths())
        return self.of(found) + 0.01 * (history.values() * spread.unsqueeze(1)).sum()


def padding_matters(ranks: Ranks) -> None:
    depends = "its loss, output, a gradient or a buffer depends on {} after the last token: pad to a fixed length first"
    for model, why in (
        (MeanOfTokens, depends.format("the number of rows")),
        (NormOfTokens, depends.format("the number of rows")),
        (MaskedById, depends.format("ids")),
        (MeanInOutput, depends.format("the number of rows")),
        (MeanInBuffer, depends.format("the number of rows")),
        (OneRowForEach, "it fails with rows after the last token: RuntimeError"),
    ):
        pipeline = both(ranks, model, batches(ranks, 12))
        assert why in pipeline.switched_off["cuda_graph"]
        assert pipeline.graphs == 0


@pytest.mark.parametrize(("world_size", "gpu"), PLACES)
def test_a_model_that_reads_the_padding_is_not_padded(run_ranks, world_size, gpu):
    run_ranks(world_size, padding_matters, gpu=gpu)


class LeavesTraces(Sequence):
    """Counts its batches, in Python too, and changes a field of each in place."""

    def __init__(self) -> None:
        super().__init__()
        self.items = sequences(need_indices=True)  # it is tried out with other ids, too
        self.register_buffer("seen", torch.zeros(()))
        self.number, self.numbers = 0, [0]

    def logits(self, batch: Any) -> Tensor:
        self.seen += 1
        self.number += 1
        self.numbers[0] += 1
        return super().logits(batch) + batch.dense.add_(1).sum(1)


def traces(ranks: Ranks) -> None:
    """Of three batches, the second of which makes the trial: a graph would not count in Python."""
    signal.alarm(600)
    dense_graph_on_cpu()
    data, hooked = batches(ranks, 3), list[Any]()

    @runs_in_graphs
    def hook(*_: Any) -> None:
        hooked.append(None)

    def model() -> Loss:
        made = LeavesTraces()
        made.register_forward_hook(hook)
        return made

    theirs, eager = train(ranks, model, FiveStageOptions(), copy.deepcopy(data))
    calls = len(hooked)
    ours, pipeline = train(ranks, model, DENSE, copy.deepcopy(data))
    torch.testing.assert_close(ours.outputs, theirs.outputs, rtol=1e-5, atol=1e-5)
    assert pipeline._graph._padding.values()
    assert all(why is None for why in pipeline._graph._padding.values())
    assert len(hooked) == 2 * calls
    trained, plain = pipeline._model.module, eager._model.module
    assert trained.seen == len(data)
    assert (trained.number, trained.numbers) == (plain.number, plain.numbers)


def test_trying_out_the_padding_leaves_no_trace(run_ranks):
    run_ranks(1, traces)


def tried_out(ranks: Ranks) -> None:
    calls: list[Any] = []

    def out_of_memory(plain: Any, *_: Any) -> None:
        calls.append(plain)
        raise torch.OutOfMemoryError("CUDA out of memory")

    with patch.object(padding, "_difference", out_of_memory):
        pipeline = both(ranks, Sequence, batches(ranks, 12))
    assert "too little memory to try out" in pipeline.switched_off["cuda_graph"]
    assert len(calls) == len(pipeline._graph._padding) == 1


def test_padding_is_tried_out_once_and_left_out_where_memory_is_too_little_for_that(run_ranks):
    run_ranks(1, tried_out)
