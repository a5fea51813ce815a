"""Cross-cutting: the drop-in over two nodes, ranks without ids or with fewer batches than others: no rank hangs."""

import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torchrec import KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.five_stage.options import FiveStageOptions
from dlrm_bench.pipeline.five_stage.pipeline import FiveStagePipeline
from tests.pipeline.five_stage.torchrec_models import FEATURES, batches, build, drain

STEPS = 4


def without_ids(batch: Batch) -> Batch:
    """The batch with empty bags."""
    lengths = torch.zeros_like(batch.sparse_features.lengths())
    values = batch.sparse_features.values()[:0]
    return replace(batch, sparse_features=KeyedJaggedTensor(keys=FEATURES, values=values, lengths=lengths))


def train(ranks: Ranks) -> dict[str, Any]:
    """Losses by pipeline and plan, where one node's second rank never has an id; how unequal data end."""
    signal.alarm(600)
    assert (ranks.nodes, ranks.local_world_size) == (2, 2)
    mine = batches(ranks, STEPS)
    if ranks.rank == 3:
        mine = [without_ids(batch) for batch in mine]
    results: dict[str, Any] = {}
    for plan in ("TW", "RW"):
        for name in ("stock", "ours"):
            model, optimizer = build(ranks, plan)
            if name == "stock":
                trained = drain(TrainPipelineSparseDist(model, optimizer, ranks.device), iter(mine))
            else:
                with FiveStagePipeline(model, optimizer, ranks.device, FiveStageOptions()) as pipeline:
                    trained = drain(pipeline, iter(mine))
            results[f"{name} {plan}"] = [output[0].item() for output in trained.outputs]
    for mode in ("stop", "error"):
        model, optimizer = build(ranks, "TW")
        with FiveStagePipeline(model, optimizer, ranks.device, FiveStageOptions(uneven_end=mode)) as pipeline:
            try:
                ended = len(drain(pipeline, iter(batches(ranks, 2 if ranks.rank == 2 else 5))).outputs)
            except ValueError as error:
                ended = str(error)
        results[mode] = ended
    return results


def test_empty_batches_train_as_in_stock_and_unequal_data_end_everywhere(run_ranks: Callable[..., list[Any]]) -> None:
    per_rank = run_ranks(4, train, nodes=2)
    for results in per_rank:
        for plan in ("TW", "RW"):
            assert len(results[f"ours {plan}"]) == STEPS
            torch.testing.assert_close(
                torch.tensor(results[f"ours {plan}"]), torch.tensor(results[f"stock {plan}"]), rtol=1e-6, atol=0
            )
        assert results["stop"] == 2
        assert results["error"].startswith("the data of rank 2 ended after 2 batches, rank 0, 1, 3 had more")
