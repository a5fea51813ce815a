"""Cross-cutting: in a graph of iterations gradients are reduced in the order in which the backward makes them."""

from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import dlrm_bench.pipeline.five_stage.gradients
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.five_stage.dense_run import DenseRun
from tests.pipeline.five_stage.test_iteration_graph import BITS, assert_equal, prepare, stock, whole
from tests.pipeline.five_stage.torchrec_models import batches


def order_of(ranks: Ranks, turns_of_rank_1: Callable[[Sequence[int]], Sequence[int]]) -> list[str]:
    """Names of the dense parameters in the order of their buckets, after a training like stock's to the bit.
    turns_of_rank_1: what rank 1 takes for the order of its backward."""
    prepare(ranks)
    names: list[str] = []
    agree = DenseRun._agree_on_order

    def noted(run: Any, turns: Sequence[int]) -> None:
        agree(run, turns_of_rank_1(turns) if ranks.rank == 1 else turns)
        names.extend(run._names[i] for bucket in run._gradients.buckets for i in bucket.members)

    data = batches(ranks, 12, fixed=True)
    with (
        patch.object(DenseRun, "_agree_on_order", noted),
        patch.object(dlrm_bench.pipeline.five_stage.gradients, "_BUCKET", 256),
    ):
        run = whole(ranks, data)
    assert run.described["replays"] > 5
    assert_equal(run.trained, stock(ranks, data), BITS)
    return names


def same(turns: Sequence[int]) -> Sequence[int]:
    return turns


def backwards(turns: Sequence[int]) -> Sequence[int]:
    return [-turn for turn in turns]


def test_layers_of_a_cross_network_take_turns(run_ranks: Callable[..., Any]) -> None:
    """Although the network has registered all W before all V."""
    for names in run_ranks(2, order_of, same):
        crosses = [name for name in names if "_kernels" in name]
        layers = [name.rpartition(".")[2] for name in crosses]
        assert layers == sorted(layers, reverse=True)
        assert len(set(layers)) > 1
        over = [place for place, name in enumerate(names) if "over_arch" in name]
        dense = [place for place, name in enumerate(names) if "dense_arch" in name]
        assert max(over) < names.index(crosses[0])
        assert min(dense) > names.index(crosses[-1])


def test_ranks_that_differ_keep_the_order_of_the_parameters(run_ranks: Callable[..., Any]) -> None:
    """All of them: NCCL reduces buckets in the order of their calls."""
    for names in run_ranks(2, order_of, backwards):
        kernels = [name.split("_kernels")[0][-1] for name in names if "_kernels" in name]
        assert kernels == sorted(kernels)  # V before W: those of the last registered parameters first
