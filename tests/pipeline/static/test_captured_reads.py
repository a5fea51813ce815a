"""Cross-cutting: within the graphs of training and evaluation the host reads nothing, where rows move or are made."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dlrm_bench.dlrm.dlrmv4.data.generate import generate, smoke_config
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.build import build_pipeline
from dlrm_bench.pipeline.static_sequences.lane import EAGER
from tests.pipeline.cpu_graphs import Unread, capture_on_cpu
from tests.pipeline.static.test_tiers import CONFIG, MODEL, PEERS, STEPS, batches_of
from tests.pipeline.static_sequences.test_pipeline import drawn, evaluated, small
from tests.pipelines import changed, static_pipeline

CASES = (
    changed(CONFIG, table_memory="0.5"),
    changed(PEERS, table_memory="0.5", constraints=("0=hbm:0.3", "2=hbm:0")),
    changed(CONFIG, dynamic_rows=6000),
    changed(CONFIG, dynamic_rows=2000, evict_rows=True, presort_ids=False),
    changed(PEERS, dynamic_rows=2000, evict_rows=True),
    changed(PEERS, model=replace(MODEL, raw_ids=True), dynamic_rows=2000, evict_rows=True),
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


def replays_of_sequences(ranks: Ranks, folder: Path) -> list[Any]:
    """Trains and evaluates on unpooled rows, as `replays`; returns the captures of each case's graphs."""
    capture_on_cpu(graph=Unread)
    captures = []
    for options, model in (
        ({}, {}),
        ({"dynamic_rows": 6000}, {"kernels": "fused", "content": "items", "last_layer": "candidates"}),
    ):
        config = small(folder, "static", cuda_graph="iteration", **options)
        config = replace(config, model=replace(config.model, input_dropout=0.1, layer_dropout=0.1, **model))
        pipeline: Any = build_pipeline(config, config.pipeline, ranks)
        training = map(pipeline.prepare, drawn(config, ranks))
        for _ in range(EAGER + 3):
            pipeline.train_step(training)
        for _ in range(2):
            list(pipeline.evaluate(map(pipeline.prepare, evaluated(config, ranks))))
        captures.append([graph["captures"] for graph in pipeline.describe()["cuda_graphs"].values()])
        pipeline.close()
    return captures


def test_no_graph_of_sequences_reads_the_device(run_ranks: Any, tmp_path: Path) -> None:
    generate(replace(smoke_config(tmp_path), users=300, days=5))
    for captures in run_ranks(2, replays_of_sequences, tmp_path):
        assert all(count >= 1 for case in captures for count in case), captures


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
