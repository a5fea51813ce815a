"""A module's weights in one flat buffer: what torch's Adam makes of the ranks' mean gradient."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dlrm_bench.dlrm.dense.adam_bucket import AdamBucket
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.kernels.dense.flat_adam import AdamOptions
from dlrm_bench.kernels.non_finite import Watch

STEPS = 4


def gradients(module: nn.Module, rank: int, step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    made = [torch.randn(weight.shape, generator=generator) for weight in module.parameters()]
    return [made[0].t().contiguous().t(), *made[1:]]  # a product's gradient may be transposed


def made() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))


def update(ranks: Ranks) -> tuple[list[Tensor], dict[str, dict[str, Tensor]]]:
    module, rate = made().to(ranks.device), torch.full((1,), 0.1, device=ranks.device)
    bucket = AdamBucket(module, AdamOptions((0.95, 0.999), 1e-8, 1.0), ranks)
    watch = Watch(torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64))
    for step in range(STEPS):
        bucket.update([of.to(ranks.device) for of in gradients(module, ranks.rank, step)], rate, watch)
    assert all(tensor.isfinite().all() for tensor in bucket.memory())
    return [weight.detach() for weight in module.parameters()], bucket.state_views()


@pytest.mark.parametrize("world_size", [1, 2])
def test_equals_torch_adam(run_ranks: Callable[..., list[Any]], world_size: int) -> None:
    module = made()
    adam = torch.optim.Adam(module.parameters(), lr=0.1, betas=(0.95, 0.999), eps=1e-8)
    for step in range(STEPS):
        of_ranks = [gradients(module, rank, step) for rank in range(world_size)]
        for weight, *grads in zip(module.parameters(), *of_ranks, strict=True):
            weight.grad = torch.stack(grads).mean(0)
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        adam.step()
    for weights, state in run_ranks(world_size, update):
        for (name, parameter), weight in zip(module.named_parameters(), weights, strict=True):
            torch.testing.assert_close(weight, parameter.detach(), rtol=1e-5, atol=1e-6)
            assert state[name].keys() == adam.state[parameter].keys()
            for kind, value in adam.state[parameter].items():
                torch.testing.assert_close(state[name][kind].view_as(value), value, rtol=1e-5, atol=1e-6)


def test_parameters_in_bf16_are_the_rounded_weights() -> None:
    """Of a bucket that gets the gradients of one in fp32 alone, some in bf16; also of weights that were written to, and
    unchanged where a flag stops an update."""
    ranks = Ranks(rank=0, local_rank=0, world_size=1, local_world_size=1, device=torch.device("cpu"))
    rate, options = torch.full((1,), 0.1), AdamOptions((0.95, 0.999), 1e-8, 1.0)
    watch = Watch(torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64))
    modules, names = (made(), made()), ("0.weight", "1.bias")
    bucket, exact = AdamBucket(modules[0], options, ranks, names), AdamBucket(modules[1], options, ranks)
    assert len(bucket.memory()) == len(exact.memory()) + 1

    def check() -> None:
        assert torch.equal(bucket.weights, exact.weights)
        for name, parameter in modules[0].named_parameters():
            kind = torch.bfloat16 if name in names else torch.float32
            assert parameter.dtype == bucket.parameters[name].dtype == kind
            assert torch.equal(parameter, bucket.views[name].to(kind))

    check()
    before = bucket.weights.clone()
    for step in range(STEPS):
        of_all = zip(bucket.parameters.values(), gradients(modules[0], 0, step), strict=True)
        given = [gradient.to(parameter.dtype) for parameter, gradient in of_all]
        bucket.update(given, rate, watch)
        exact.update([gradient.float() for gradient in given], rate, watch)
        check()
    assert not torch.equal(before, bucket.weights)
    for each in (bucket, exact):
        each.views["0.weight"].mul_(3.1)
        each.round_weights()
    check()
    watch.stopped.fill_(1)
    bucket.update(given, rate, watch)
    check()
