"""Operations, weights and bytes of DLRMv4, against counts made otherwise."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from dlrm_bench.dlrm.dlrmv4.batch import batch_of
from dlrm_bench.dlrm.dlrmv4.config import ModelConfig
from dlrm_bench.dlrm.dlrmv4.counts import (
    EARLY,
    LATER,
    LONGEST,
    Lengths,
    activation_bytes,
    dense_weights,
    flop_per_sample,
    lookups_per_sample,
    memory_bytes,
    table_bytes,
)
from dlrm_bench.dlrm.dlrmv4.network import DenseNetwork
from dlrm_bench.dlrm.dlrmv4.presets import training
from tests.dlrm.dlrmv4.cases import LENGTHS, STILL, make_samples, small_model

BENCHMARK = training("mlperf-dlrmv4").model


@pytest.mark.parametrize(
    ("lengths", "whole", "candidates", "distinct"),
    [(EARLY, 135.7, 100.3, 90.4), (LATER, 193.8, 141.8, 129.2), (LONGEST, 335.2, 242.8, 223.3)],
)
def test_operations_of_a_sample(lengths: Lengths, whole: float, candidates: float, distinct: float) -> None:
    """Figures in 10^9, computed by hand before from the same widths."""
    assert flop_per_sample(BENCHMARK, lengths).total / 1e9 == pytest.approx(whole, rel=2e-3)
    last = flop_per_sample(BENCHMARK, lengths, last_layer_candidates=True)
    assert last.total / 1e9 == pytest.approx(candidates, rel=2e-3)
    once = flop_per_sample(BENCHMARK, lengths, last_layer_candidates=True, content_rows=17)
    assert once.total / 1e9 == pytest.approx(distinct, rel=2e-3)
    assert once.linear == last.linear
    assert once.attention == last.attention


def test_a_last_layer_of_candidates_sees_each_token_once() -> None:
    """A candidate sees its whole sequence, in two products of `inner` columns forward and five backward."""
    alone = flop_per_sample(replace(BENCHMARK, layers=1), EARLY, last_layer_candidates=True)
    assert alone.attention == 2 * 7 * BENCHMARK.inner * EARLY.mean


def test_operations_are_the_references_formula() -> None:
    """_hstu_layer_flops at 4,096 tokens: its README's 315.7 (10^9) for three layers."""
    flop = flop_per_sample(BENCHMARK, LONGEST)
    assert (flop.linear + flop.attention) / 1e9 == pytest.approx(315.7, abs=0.1)


@pytest.mark.parametrize("trained", [False, True])
def test_operations_are_those_that_torch_counts(trained: bool) -> None:
    """All but attention, which torch sees padded to squares, in forward and backward pass."""
    model = small_model(STILL)
    batch = batch_of(make_samples(STILL, LENGTHS, seed=1), STILL)
    with FlopCounterMode(display=False) as counter:
        loss, _ = model(batch)
        if trained:
            loss.backward()
    counted = counter.get_flop_counts()["Global"]
    square = (max(LENGTHS) + 9) ** 2 * len(LENGTHS)
    products = 8 if trained else 2  # the plain backward pass pays for the queries' and keys' product again
    flop = flop_per_sample(STILL, Lengths.of(list(LENGTHS)), trained=trained)
    expected = (flop.total - flop.attention) * len(LENGTHS)
    attention = counted_attention(counted, expected)
    assert attention % (2 * square * STILL.inner * STILL.layers) == 0
    assert attention // (2 * square * STILL.inner * STILL.layers) <= products


def counted_attention(counted: dict[object, int], expected: float) -> float:
    """What torch counts beyond `expected`."""
    return sum(counted.values()) - expected


@pytest.mark.parametrize("model", [BENCHMARK, STILL, replace(STILL, embedding_dim=8, layers=1)])
def test_dense_weights_are_those_of_the_network(model: ModelConfig) -> None:
    with torch.device("meta"):
        dense = DenseNetwork(model)
    assert dense_weights(model) == sum(weight.numel() for weight in dense.parameters())


def test_memory_of_the_benchmark() -> None:
    memory = memory_bytes(BENCHMARK)
    assert memory["tables"] == 600_169_906_176
    assert memory["table_states"] == 4 * 293_051_712
    assert memory["dense"] == 16 * dense_weights(BENCHMARK)


def test_lookups_of_a_gpus_batch() -> None:
    """6.4 million for 1,024 samples, as counted on the reference's runs."""
    assert 1024 * lookups_per_sample(BENCHMARK, EARLY) == pytest.approx(6.4e6, rel=0.01)
    assert table_bytes(BENCHMARK, 50_000).lookup == 2 * 50_000 * 2048
    assert table_bytes(BENCHMARK, 50_000).update == 50_000 * (2048 + 2 * 2052)


@pytest.mark.parametrize(("recompute", "last_alone", "every"), [(False, 32.7e9, 39.3e9), (True, 10.9e9, 13.1e9)])
def test_activations_of_a_gpus_batch(recompute: bool, last_alone: float, every: float) -> None:
    """1,024 samples in bf16: figures of fused_stu.py, whose last layer is for candidates, and of three whole layers."""
    for last_layer, expected in (("candidates", last_alone), ("all", every)):
        model = replace(BENCHMARK, last_layer=last_layer)
        assert activation_bytes(model, 1024 * EARLY.mean, recompute=recompute) == pytest.approx(expected, rel=2e-3)
