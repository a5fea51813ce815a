"""Adam over one flat buffer of dense weights, with gradient clipping by norm; can be captured into a CUDA graph."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dlrm_bench.kernels._triton import cdiv, jit, tl
from dlrm_bench.kernels.non_finite import Watch

_BLOCK = 2048


class AdamState(NamedTuple):
    """Adam's state for weights [n]; all fp32."""

    step: Tensor
    """[1], number of steps taken."""
    mean: Tensor
    """[n], running mean of gradients."""
    mean_square: Tensor
    """[n], running mean of squared gradients."""


class AdamOptions(NamedTuple):
    """Adam's constants (Kingma and Ba 2015, arXiv 1412.6980)."""

    betas: tuple[float, float]
    eps: float
    clip_norm: float
    """Maximum norm of the gradient; 0 disables clipping."""


def flat_adam(
    weights: Tensor,
    state: AdamState,
    gradient: Tensor,
    parts: int,
    learning_rate: Tensor,
    options: AdamOptions,
    watch: Watch,
) -> None:
    """Takes one step of torch.optim.Adam on all weights, in place, with gradient / parts clipped as by torch.nn.utils.
    clip_grad_norm_. Nothing waits for the device.

    weights, gradient: fp32 [n], contiguous. learning_rate: fp32, one element, on the device. watch: see non_finite.py;
    if a flag is raised or the gradient's norm is not finite, nothing changes, not even the step; a non-finite norm is
    reported in `bad`.
    """
    assert weights.dtype == gradient.dtype == torch.float32, "weights and gradient: fp32"
    assert weights.shape == gradient.shape == state.mean.shape == state.mean_square.shape, "flat buffers: [n]"
    assert all(t.dim() == 1 and t.is_contiguous() for t in (weights, gradient, state.mean, state.mean_square))
    norm = torch.linalg.vector_norm(gradient) / parts
    stopped = (watch.stopped != 0).any()
    bad = norm.isfinite().logical_not()
    goes = ~(stopped | bad)
    state.step.add_(goes)
    shortened = torch.clamp(options.clip_norm / (norm + 1e-6), max=1.0) if options.clip_norm else torch.ones_like(norm)
    # 1 - 0.999 has five digits in fp32.
    of_mean, of_square = ((1 - beta ** state.step.double()).float() for beta in options.betas)
    # The kernel's input: whether to update, the gradient's factor, and two factors that depend on the step.
    of_step = ((learning_rate / of_mean)[0], of_square[0].sqrt())
    numbers = torch.stack([goes.float(), shortened / parts, *of_step, (bad & ~stopped).float()])
    update = triton_flat_adam if weights.is_cuda else plain_flat_adam
    update(weights, state, gradient, numbers, options, watch.bad)


def plain_flat_adam(
    weights: Tensor, state: AdamState, gradient: Tensor, numbers: Tensor, options: AdamOptions, bad: Tensor
) -> None:
    """Runs the pass of `flat_adam` over all weights, in PyTorch.

    numbers: fp32 [5]: whether to update, the gradient's factor, rate / (1 - beta^step) for the mean, the square root of
    1 - beta^step for the mean square, and whether to set `bad`, see Watch.
    """
    goes, factor, rate, root, is_bad = numbers.unbind()
    torch.maximum(bad, is_bad.long(), out=bad)
    g = gradient * factor
    mean = state.mean + (g - state.mean) * (1 - options.betas[0])
    square = options.betas[1] * state.mean_square + (1 - options.betas[1]) * g * g
    changed = goes != 0
    new = weights - rate * mean / (square.sqrt() / root + options.eps)
    for of, value in ((weights, new), (state.mean, mean), (state.mean_square, square)):
        of.copy_(torch.where(changed, value, of))


def triton_flat_adam(
    weights: Tensor, state: AdamState, gradient: Tensor, numbers: Tensor, options: AdamOptions, bad: Tensor
) -> None:
    """Computes `plain_flat_adam` in one kernel. It writes `bad` only to set it: a concurrent table update may too."""
    if weights.numel():
        (of_mean, of_square), eps = options.betas, options.eps
        tensors = (weights, state.mean, state.mean_square, gradient, numbers, bad)
        sizes = (1 - of_mean, of_square, 1 - of_square, eps, weights.numel(), _BLOCK)
        _flat_adam_kernel[(cdiv(weights.numel(), _BLOCK),)](*tensors, *sizes, num_warps=8)


@jit
def _flat_adam_kernel(
    weights,
    means,
    squares,
    gradient,
    numbers,
    bad,
    rest_of_mean,
    of_square,
    rest_of_square,
    eps,
    count,
    block: tl.constexpr,
) -> None:
    tl.store(bad, 1, (tl.program_id(0) == 0) & (tl.load(numbers + 4) > 0))
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    mask = (at < count) & (tl.load(numbers + at * 0) > 0)
    g = tl.load(gradient + at, mask, other=0.0) * tl.load(numbers + 1)
    mean = tl.load(means + at, mask, other=0.0)
    mean += (g - mean) * rest_of_mean
    square = of_square * tl.load(squares + at, mask, other=0.0) + rest_of_square * g * g
    divisor = tl.div_rn(tl.sqrt_rn(square), tl.load(numbers + 3)) + eps
    new = tl.load(weights + at, mask, other=0.0) - tl.div_rn(tl.load(numbers + 2) * mean, divisor)
    tl.store(weights + at, new, mask)
    tl.store(means + at, mean, mask)
    tl.store(squares + at, square, mask)
