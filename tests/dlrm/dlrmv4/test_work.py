"""DLRMv4's work as limits and MFU take it: the benchmark's figures, by measured sizes, and sums that must agree."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from dlrm_bench.dlrm.dlrmv4 import counts, work
from dlrm_bench.dlrm.dlrmv4.data.generate import generate, smoke_config
from dlrm_bench.dlrm.dlrmv4.data.packed import PackedLayout, expand
from dlrm_bench.dlrm.dlrmv4.data.sizes import sample_sizes
from dlrm_bench.dlrm.dlrmv4.network import DenseNetwork
from dlrm_bench.dlrm.dlrmv4.parts import open_data
from dlrm_bench.dlrm.dlrmv4.presets import training

MLPERF, SMOKE = training("mlperf-dlrmv4"), training("smoke-dlrmv4")
LATER = {work.TOKENS: 2663.0, work.TOKENS_SQUARED: 2944.0**2, work.EVENTS: 300.0, work.ITEMS: 17.0, work.ROWS: 49.0}


def test_operations_of_a_sample() -> None:
    """The figures of test_counts.py: 90.4 and 129.2 (10^9), whatever the last layer computes beside."""
    assert work.flop_per_sample(MLPERF) / 1e9 == pytest.approx(90.4, rel=2e-3)
    assert work.flop_per_sample(MLPERF, LATER) / 1e9 == pytest.approx(129.2, rel=2e-3)
    candidates = replace(MLPERF, model=replace(MLPERF.model, last_layer="candidates"))
    assert work.flop_per_sample(candidates) == work.flop_per_sample(MLPERF)


@pytest.mark.parametrize("sizes", [{}, LATER])
def test_products_and_attention_are_the_operations(sizes: dict[str, float]) -> None:
    """But for actions, a thousandth of all."""
    shapes = work.products(MLPERF, 1024, sizes)
    of_products = sum(2.0 * m * n * k for m, n, k in shapes.values())
    attention = counts.flop_per_sample(
        MLPERF.model, work.lengths_of(MLPERF.model, sizes), last_layer_candidates=True
    ).attention
    assert of_products / 1024 + attention == pytest.approx(work.flop_per_sample(MLPERF, sizes), rel=1.5e-3)
    pieces = work.pieces(MLPERF, 8, 60e6, sizes)
    assert sum(piece.flop for piece in pieces) == pytest.approx(1024 * work.flop_per_sample(MLPERF, sizes))


def test_dense_weights_are_those_of_the_network() -> None:
    with torch.device("meta"):
        dense = DenseNetwork(SMOKE.model)
    assert work.dense_weights(SMOKE) == sum(weight.numel() for weight in dense.parameters())


def test_pieces_of_the_benchmark() -> None:
    """50,000 distinct rows of 2 KB over eight ranks; what leaves a rank in bf16."""
    pieces = {piece.name: piece for piece in work.pieces(MLPERF, 8, 0.0)}
    rows = 1024 * 49.0
    assert pieces["lookup"].memory == rows / 8 * 2048
    assert pieces["exchange of rows"].links == pytest.approx(rows * 7 / 8 * 1024)
    assert pieces["table update"].memory == pytest.approx(rows / 8 * (2 * 2048 + 8))
    assert pieces["dense update"].memory == pytest.approx(2 * 12 * work.dense_weights(MLPERF) / 8)
    alone = {piece.name: piece for piece in work.pieces(MLPERF, 1, 0.0)}
    assert alone["exchange of rows"].links == alone["exchange of ids"].links == 0
    of_tables = work.table_work(MLPERF, 1024, 4)
    assert (of_tables.ids, of_tables.vectors) == (rows, rows * 512)
    assert of_tables.lookup == 2 * rows * 2048
    assert of_tables.update == rows * (2048 + 2 * 2052)


def test_bytes_of_a_packed_batch() -> None:
    (copy, *_) = work.pieces(replace(MLPERF, local_batch_size=1024), 1, 0.0, {work.EVENTS: 256.0})
    assert copy.pcie == PackedLayout(1024, 1024 * 256).end


def test_sizes_are_those_of_the_samples(tmp_path: Path) -> None:
    generate(replace(smoke_config(tmp_path), users=600))
    config = replace(SMOKE, data=replace(SMOKE.data, path=tmp_path), local_batch_size=32)
    dataset = open_data(config)
    found = sample_sizes(dataset, config, 2, range(5, 7))
    maps = [torch.from_numpy(of) for of in (dataset.maps.artist, dataset.maps.album)]
    samples = [expand(dataset.train_batches(0, 2, 32)[number].packed, *maps) for number in (5, 6)]
    tokens = np.concatenate([of.lengths.numpy() + 9.0 for of in samples])
    assert found[work.TOKENS] == pytest.approx(tokens.mean())
    assert found[work.TOKENS_SQUARED] == pytest.approx((tokens**2).mean())
    items = [set(of.item.tolist()) | set(of.candidate_item.tolist()) for of in samples]
    assert found[work.ITEMS] == pytest.approx(np.mean([len(of) for of in items]) / 32)
    assert found[work.ITEMS] < found[work.ROWS] < 3 * found[work.ITEMS] + 8
    beyond = sample_sizes(dataset, config, 2, range(10**6, 10**6 + 5))
    assert beyond[work.TOKENS] > 9
