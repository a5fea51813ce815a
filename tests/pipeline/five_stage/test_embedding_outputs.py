"""What the model does in place with looked-up vectors is refused with the remedy."""

import signal

import pytest
import torch
from torch import Tensor

from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.five_stage.pipeline import FiveStagePipeline
from tests.pipeline.five_stage.any_models import PLANS, AnyBatch, TwoTower, batches, build


class Clamped(TwoTower):
    def logits(self, batch: AnyBatch) -> Tensor:
        return (self.user(batch.bags) * self.item.mlp(self.item.tables(batch.bags).values().clamp_(-1, 1))).sum(1)


class Rectified(TwoTower):
    """Changes a view."""

    def logits(self, batch: AnyBatch) -> Tensor:
        user = torch.nn.functional.relu(self.user.tables(batch.bags)["u0"], inplace=True)
        return (user * self.item(batch.bags)).sum(1)


def changes(ranks: Ranks) -> None:
    signal.alarm(600)
    for kind in (Clamped, Rectified):
        pipeline = FiveStagePipeline(*build(ranks, kind, PLANS["TW"]), ranks.device)
        with pytest.raises(
            ValueError, match=r"in place what user\.tables or item\.tables gave it.* write it out of place"
        ):
            pipeline.progress(iter(batches(ranks, 1)))


def test_vectors_that_are_changed_in_place_are_named(run_ranks):
    run_ranks(1, changes)
