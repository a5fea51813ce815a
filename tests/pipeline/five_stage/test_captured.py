"""What a graph's memory holds after a shorter batch: what that batch has, and zeros. A rehearsal that fails leaves no
trace."""

import copy
import signal
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec import JaggedTensor

import dlrm_bench.pipeline.five_stage.captured
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.five_stage.captured import Captured, Room
from dlrm_bench.pipeline.five_stage.embedding_outputs import EmbeddingOutputs
from dlrm_bench.pipeline.five_stage.options import FiveStageOptions
from tests.pipeline.cpu_graphs import Rerun, dense_graph_on_cpu
from tests.pipeline.five_stage.any_models import batches
from tests.pipeline.five_stage.test_graph_pool import DENSE, train
from tests.pipeline.five_stage.test_padding import LeavesTraces


def outputs_of(ids: list[int]) -> EmbeddingOutputs:
    """Two sequences, the second one empty, whose vectors are made of their ids."""
    tokens = torch.tensor(ids)
    vectors = (10.0 * tokens).unsqueeze(1).expand(-1, 4).contiguous()
    return EmbeddingOutputs(
        ["items"], [{"history": JaggedTensor(vectors, lengths=torch.tensor([len(ids), 0]), weights=tokens)}]
    )


def test_padding_after_a_longer_batch_is_zero_vectors_and_zero_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dlrm_bench.pipeline.five_stage.captured, "record", lambda work, **_: Rerun(work))
    first = outputs_of([1, 2, 3])
    graph = Captured((), [], first, [5], [Room(first.values[0], 5)])

    def run(batch: object, features: list[object], outputs: EmbeddingOutputs) -> tuple[object, list[Tensor | None]]:
        return (outputs.tokens[0] * 1, outputs.values[0].sum(dim=1)), [outputs.values[0] * 2]

    graph.capture(run, None)
    for ids in ([1, 2, 3], [4, 5, 6, 7, 8], [9], [], [2, 1]):
        (tokens, sums), (grad,) = graph.replay([], outputs_of(ids))
        assert tokens.tolist() == ids + [0] * (5 - len(ids))
        assert sums.tolist() == [40 * i for i in ids] + [0] * (5 - len(ids))
        assert grad is not None
        assert grad.tolist() == [[20 * i] * 4 for i in ids]


class ReadsAKjt(LeavesTraces):
    """Draws random numbers, and then reads ids, which no graph may."""

    def logits(self, batch: Any) -> Tensor:
        logits = nn.functional.dropout(super().logits(batch) * (1 + 0.1 * self.number), 0.2)
        return logits + 0 * batch.bags.lengths().sum()


def failed_rehearsals(ranks: Ranks) -> None:
    signal.alarm(600)
    dense_graph_on_cpu()
    data = batches(ranks, 12)
    theirs, eager = train(ranks, ReadsAKjt, FiveStageOptions(), copy.deepcopy(data))
    ours, pipeline = train(ranks, ReadsAKjt, DENSE, copy.deepcopy(data))
    torch.testing.assert_close(ours.outputs, theirs.outputs, rtol=1e-5, atol=1e-5)
    assert "reads the batch's KJT (.lengths)" in pipeline.switched_off["cuda_graph"]
    assert pipeline._model.module.seen == len(data)
    trained, plain = pipeline._model.module, eager._model.module
    assert (trained.number, trained.numbers) == (plain.number, plain.numbers)


def test_a_rehearsal_that_fails_leaves_no_trace(run_ranks: Any) -> None:
    run_ranks(1, failed_rehearsals)
