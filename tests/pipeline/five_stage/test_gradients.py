"""Gradients in flat buffers: of parameters without one, other ranks read zeros; their buckets, in the order of a
backward."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dlrm_bench.pipeline.five_stage.gradients
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.five_stage.gradients import FlatGradients


def unused(ranks: Ranks) -> None:
    assert dist.group.WORLD is not None
    parameters = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))]
    gradients = FlatGradients(parameters, ranks.device, dist.group.WORLD)
    gradients.keep([torch.ones(2), torch.ones(3)], [0, 1])
    gradients.keep([None, torch.full((2,), 2.0)], [1, 0])
    assert gradients.used == [True, False]
    assert not gradients.views[1].any()
    gradients.publish()
    assert parameters[0].grad is not None
    assert parameters[0].grad.tolist() == [2.0, 2.0]
    assert parameters[1].grad is None
    gradients.restore([False])
    gradients.publish()
    assert [p.grad for p in parameters] == [None, None]


def test_a_parameter_without_a_gradient_has_zeros_and_none(run_ranks):
    run_ranks(1, unused)


SIZES = (300, 40, 1000, 8, 200, 5)
HALVES = {1, 3}
BUCKET = 2**10
LATE = 2


def in_buckets(ranks: Ranks) -> list[list[int]]:
    """Members of the buckets, whose means are those of all gradients at once."""
    assert dist.group.WORLD is not None
    parameters = [
        nn.Parameter(torch.ones(size, dtype=torch.float16 if i in HALVES else torch.float32))
        for i, size in enumerate(SIZES)
    ]
    with patch.object(dlrm_bench.pipeline.five_stage.gradients, "_BUCKET", BUCKET):
        made = [FlatGradients(parameters, ranks.device, dist.group.WORLD, late=LATE) for _ in range(2)]
    values = [
        torch.full((size,), ranks.rank + i, dtype=p.dtype)
        for i, (size, p) in enumerate(zip(SIZES, parameters, strict=True))
    ]
    at_once, by_bucket = made
    at_once.keep(values, range(len(SIZES)))
    at_once.mean()
    for bucket in by_bucket.buckets:
        by_bucket.keep([values[i] for i in bucket.members], bucket.members)
        by_bucket.mean(bucket=bucket)
    for one, other in zip(at_once.flat, by_bucket.flat, strict=True):
        assert torch.equal(one, other)
    for i, view in enumerate(by_bucket.views):
        assert (view == i + (ranks.world_size - 1) / 2).all()
    for bucket in by_bucket.buckets:
        within = sum(by_bucket.views[i].numel() for i in bucket.members)
        assert within <= bucket.flat.numel()
        assert all(bucket.flat.dtype == by_bucket.views[i].dtype for i in bucket.members)
    return [bucket.members for bucket in by_bucket.buckets]


@pytest.mark.parametrize("world_size", [1, 2])
def test_buckets_have_the_last_gradients_first_and_late_ones_last(run_ranks, world_size):
    for members in run_ranks(world_size, in_buckets):
        # fp32 first, which are 0, 2, 4, 5: the last two parameters are late, 2 alone is more than a bucket.
        assert members == [[2], [0], [3, 1], [5, 4]]


def test_a_bucket_ends_with_the_gradient_that_fills_it(run_ranks):
    run_ranks(1, of_one_dtype)


def of_one_dtype(ranks: Ranks) -> None:
    assert dist.group.WORLD is not None
    parameters = [nn.Parameter(torch.ones(128)) for _ in range(5)]  # 512 bytes each
    with patch.object(dlrm_bench.pipeline.five_stage.gradients, "_BUCKET", BUCKET):
        gradients = FlatGradients(parameters, ranks.device, dist.group.WORLD)
    assert [bucket.members for bucket in gradients.buckets] == [[4, 3], [2, 1], [0]]
    assert [bucket.flat.data_ptr() for bucket in gradients.buckets] == [
        gradients.views[i].data_ptr() for i in (4, 2, 0)
    ]
    assert FlatGradients(parameters, ranks.device, dist.group.WORLD).buckets[0].members == [4, 3, 2, 1, 0]


def test_few_gradients_are_left_for_the_end(run_ranks):
    run_ranks(1, ever_smaller)


def ever_smaller(ranks: Ranks) -> None:
    assert dist.group.WORLD is not None
    module = dlrm_bench.pipeline.five_stage.gradients
    parameters = [nn.Parameter(torch.ones(128)) for _ in range(13)]  # 512 bytes each
    with patch.object(module, "_BUCKET", 4 * 512), patch.object(module, "_LEAST", 512 + 1):
        gradients = FlatGradients(parameters, ranks.device, dist.group.WORLD)
    # 9 and 5 follow the first two, more than a bucket; then 2 follow 3, and 1 alone would be less than the least.
    assert [len(bucket.members) for bucket in gradients.buckets] == [4, 4, 3, 2]


SOME = (128, 128, 100, 128, 0, 128, 7)
"""Numbers of elements of parameters, of which one is padded, one is nothing, and the last is late."""


def in_another_order(ranks: Ranks) -> None:
    assert dist.group.WORLD is not None
    parameters = [nn.Parameter(torch.ones(size, device=ranks.device)) for size in SOME]
    values = [torch.full((size,), ranks.rank + i + 0.0, device=ranks.device) for i, size in enumerate(SOME)]
    with patch.object(dlrm_bench.pipeline.five_stage.gradients, "_BUCKET", BUCKET):
        gradients = FlatGradients(parameters, ranks.device, dist.group.WORLD, late=1)
        gradients.keep(values, range(len(SOME)))
        gradients.order([3, 0, 2, 5, 1, 4])
    assert all(map(torch.equal, gradients.views, values))
    gradients.publish()
    assert all(p.grad is view for p, view in zip(parameters, gradients.views, strict=True))
    assert [bucket.members for bucket in gradients.buckets] == [[3, 0], [2, 5], [1, 4], [6]]
    assert [len(bucket.flat) for bucket in gradients.buckets] == [256, 256, 128, 32]
    for bucket in gradients.buckets:
        assert bucket.flat.data_ptr() == gradients.views[bucket.members[0]].data_ptr()
        gradients.mean(bucket=bucket)
    for i, view in enumerate(gradients.views):
        assert (view == i + (ranks.world_size - 1) / 2).all()


@pytest.mark.parametrize("world_size", [1, 2])
def test_gradients_move_to_the_order_of_a_backward(run_ranks, world_size):
    run_ranks(world_size, in_another_order)


@pytest.mark.multi_gpu
def test_gradients_on_gpus_move_too(run_ranks):
    run_ranks(2, in_another_order, gpu=True)
