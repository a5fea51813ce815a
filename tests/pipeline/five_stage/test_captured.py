"""What a graph's memory holds after a shorter batch: what that batch has, and zeros."""

import pytest
import torch
from torch import Tensor
from torchrec import JaggedTensor

import dlrm_bench.pipeline.five_stage.captured
from dlrm_bench.pipeline.five_stage.captured import Captured, Room
from dlrm_bench.pipeline.five_stage.embedding_outputs import EmbeddingOutputs
from tests.pipeline.cpu_graphs import Rerun


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
