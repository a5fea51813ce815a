"""Cross-cutting: a batch that a forward changes in place is changed once, also where its first try fails."""

import signal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dlrm_bench.dlrm.runtime.ranks import Ranks
from tests.pipeline.cpu_graphs import dense_graph_on_cpu
from tests.pipeline.five_stage.any_models import AnyBatch, TwoTower, batches
from tests.pipeline.five_stage.test_dense_run import DENSE, EAGER, train


class OutOfPlace(TwoTower):
    """Preprocesses a field of the batch, and with `reentrant` runs only by Tensor.backward."""

    reentrant = False

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(1, 1)

    def logits(self, batch: AnyBatch) -> Tensor:
        inputs = self.preprocessed(batch.dense).sum(1, keepdim=True) + super().logits(batch).unsqueeze(-1)
        return (checkpoint(self.out, inputs, use_reentrant=True) if self.reentrant else self.out(inputs)).squeeze(-1)

    def preprocessed(self, dense: Tensor) -> Tensor:
        return (dense + 1).log()


class InPlace(OutOfPlace):
    """Does so in the field's own memory."""

    def preprocessed(self, dense: Tensor) -> Tensor:
        return dense.add_(1).log_()


class Reentrant(InPlace):
    reentrant = True


class Annealed(Reentrant):
    """Scales by a count of its calls, which its first batch must not make twice."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def logits(self, batch: AnyBatch) -> Tensor:
        self.number += 1
        return super().logits(batch) * 0.9**self.number


def in_place(ranks: Ranks) -> None:
    signal.alarm(600)
    data = batches(ranks, 8)
    expected, weights, _ = train(ranks, OutOfPlace, EAGER, data)
    assert train(ranks, InPlace, EAGER, data)[0] == expected
    dense_graph_on_cpu()
    for kind in (InPlace, Reentrant):
        losses, trained, pipeline = train(ranks, kind, DENSE, data)
        assert pipeline._graph.captured is (kind is InPlace)
        assert losses == expected
        torch.testing.assert_close(trained, weights, rtol=0, atol=0)
    assert train(ranks, Annealed, DENSE, data)[0] == train(ranks, Annealed, EAGER, data)[0]


def test_a_batch_that_is_changed_in_place_is_changed_once(run_ranks):
    run_ranks(1, in_place)
