"""Cross-cutting: within the graphs of training and evaluation the host reads nothing, where rows move or are made."""

from typing import Any

import pytest
import torch

from dlrm_bench.dlrm.runtime.ranks import Ranks
from tests.pipeline.cpu_graphs import Unread, capture_on_cpu
from tests.pipeline.static.test_tiers import CONFIG, PEERS, STEPS, batches_of
from tests.pipelines import changed, static_pipeline

CASES = (
    changed(CONFIG, table_memory="0.5"),
    changed(PEERS, table_memory="0.5"),
    changed(CONFIG, dynamic_rows=6000),
    changed(CONFIG, dynamic_rows=2000, evict_rows=True, presort_ids=False),
    changed(PEERS, dynamic_rows=2000, evict_rows=True),
)


def replays(ranks: Ranks) -> list[int]:
    """Trains and evaluates in graphs, which assert that nothing is read; returns iterations run by each case."""
    capture_on_cpu(graph=Unread)
    counts = []
    for case in CASES:
        pipeline = static_pipeline(changed(case, cuda_graph="iteration"), ranks)
        pipeline.warm_up(evaluates=True)
        batches = batches_of(case, ranks, hot=0)
        training = iter(batches[:STEPS])
        for _ in range(STEPS):
            pipeline.train_step(training)
        counts.append(len(list(pipeline.evaluate(iter(batches[STEPS:])))))
        graphs = pipeline.describe()["cuda_graphs"].values()
        assert [graph["captures"] for graph in graphs] == [1, 1]
        pipeline.close()
    return counts


def test_no_graph_reads_the_device(run_ranks: Any) -> None:
    assert run_ranks(2, replays) == [[2] * len(CASES)] * 2


def test_a_read_a_mask_and_a_number_of_the_host_are_found() -> None:
    values = torch.arange(4)
    for work in (
        lambda: values.sum().item(),
        lambda: values[values > 2],
        lambda: torch.tensor([1, 2]),
        lambda: values.unique_consecutive(),
    ):
        with pytest.raises(AssertionError, match="within a graph"):
            Unread(work).replay()  # type: ignore[arg-type]
    Unread(lambda: values.mul_(torch.where(values > 2, 1, values))).replay()  # type: ignore[arg-type]
