"""Adam over one flat buffer of dense weights, with gradient clipping by norm; can be captured into a CUDA graph."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from dlrm_bench.kernels._triton import cdiv, jit, tl
from dlrm_bench.kernels.non_finite import Watch, flag_words, is_stopped

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
    rounded: Tensor | None = None,
) -> None:
    """Takes one step of torch.optim.Adam on all weights, in place, with gradient / parts clipped as by torch.nn.utils.
    clip_grad_norm_. Nothing waits for the device.

    weights, gradient: fp32 [n], contiguous. learning_rate: fp32, one element, on the device. watch: see non_finite.py;
    if a flag is raised or the gradient's norm is not finite, nothing changes, not even the step; a non-finite norm is
    reported in `bad`. rounded: bf16 [n], the weights in bf16, which become the new weights', if given.
    """
    assert weights.dtype == gradient.dtype == torch.float32, "weights and gradient: fp32"
    assert weights.shape == gradient.shape == state.mean.shape == state.mean_square.shape, "flat buffers: [n]"
    assert all(t.dim() == 1 and t.is_contiguous() for t in (weights, gradient, state.mean, state.mean_square))
    if rounded is not None:
        assert rounded.shape == weights.shape and rounded.dtype == torch.bfloat16, "rounded: bf16 [n]"
        assert rounded.is_contiguous(), "rounded: contiguous"
    norm = torch.linalg.vector_norm(gradient)
    numbers = step_numbers(norm, state.step, parts, learning_rate, options, watch.stopped)
    update = triton_flat_adam if weights.is_cuda else plain_flat_adam
    update(weights, state, gradient, numbers, options, watch.bad, rounded)


def step_numbers(
    norm: Tensor, step: Tensor, parts: int, learning_rate: Tensor, options: AdamOptions, stopped: Tensor
) -> Tensor:
    """Counts a step in `step` if it is taken, and returns the numbers of a pass over the weights, fp32 [5]: whether to
    update, the gradient's factor, rate / (1 - beta^step) for the mean, the square root of 1 - beta^step for the mean
    square, and whether to set `bad`, see Watch.

    norm: of the gradient, fp32 []. stopped: flags, int32 [2^k]. The other arguments: of `flat_adam`. Numbers that
    depend on the step mean nothing without an update.
    """
    numbers_of = triton_step_numbers if norm.is_cuda else plain_step_numbers
    return numbers_of(norm, step, parts, learning_rate, options, stopped)


def plain_step_numbers(
    norm: Tensor, step: Tensor, parts: int, learning_rate: Tensor, options: AdamOptions, stopped: Tensor
) -> Tensor:
    """Computes `step_numbers` in PyTorch."""
    norm = norm / parts
    is_stopped = (stopped != 0).any()
    bad = norm.isfinite().logical_not()
    goes = ~(is_stopped | bad)
    step.add_(goes)
    shortened = torch.clamp(options.clip_norm / (norm + 1e-6), max=1.0) if options.clip_norm else torch.ones_like(norm)
    # 1 - 0.999 has five digits in fp32.
    of_mean, of_square = ((1 - beta ** step.double()).float() for beta in options.betas)
    of_step = ((learning_rate / of_mean)[0], of_square[0].sqrt())
    return torch.stack([goes.float(), shortened / parts, *of_step, (bad & ~is_stopped).float()])


def triton_step_numbers(
    norm: Tensor, step: Tensor, parts: int, learning_rate: Tensor, options: AdamOptions, stopped: Tensor
) -> Tensor:
    """Computes `step_numbers` in one kernel, after PyTorch's powers of both betas."""
    numbers = torch.empty(5, device=norm.device)
    powers = torch.pow(_betas(options.betas, norm.device), step + 1)
    sizes = (float(parts), float(options.clip_norm), flag_words(stopped))
    _step_numbers_kernel[(1,)](norm, step, powers, learning_rate, stopped, numbers, *sizes, num_warps=1)
    return numbers


@functools.cache
def _betas(betas: tuple[float, float], device: torch.device) -> Tensor:
    return torch.tensor(betas, dtype=torch.float64, device=device)


def plain_flat_adam(
    weights: Tensor,
    state: AdamState,
    gradient: Tensor,
    numbers: Tensor,
    options: AdamOptions,
    bad: Tensor,
    rounded: Tensor | None = None,
) -> None:
    """Runs the pass of `flat_adam` over all weights, in PyTorch. numbers: from `step_numbers`."""
    goes, factor, rate, root, is_bad = numbers.unbind()
    torch.maximum(bad, is_bad.long(), out=bad)
    g = gradient * factor
    mean = state.mean + (g - state.mean) * (1 - options.betas[0])
    square = options.betas[1] * state.mean_square + (1 - options.betas[1]) * g * g
    changed = goes != 0
    new = weights - rate * mean / (square.sqrt() / root + options.eps)
    for of, value in ((weights, new), (state.mean, mean), (state.mean_square, square)):
        of.copy_(torch.where(changed, value, of))
    if rounded is not None:
        rounded.copy_(weights)


def triton_flat_adam(
    weights: Tensor,
    state: AdamState,
    gradient: Tensor,
    numbers: Tensor,
    options: AdamOptions,
    bad: Tensor,
    rounded: Tensor | None = None,
) -> None:
    """Computes `plain_flat_adam` in one kernel. It writes `bad` only to set it: a concurrent table update may too."""
    if weights.numel():
        (of_mean, of_square), eps = options.betas, options.eps
        tensors = (weights, state.mean, state.mean_square, gradient, numbers, bad, rounded)
        sizes = (1 - of_mean, of_square, 1 - of_square, eps, weights.numel(), _BLOCK)
        _flat_adam_kernel[(cdiv(weights.numel(), _BLOCK),)](*tensors, *sizes, num_warps=8)


@jit
def _step_numbers_kernel(norm, step, powers, learning_rate, stopped, numbers, parts, clip_norm, flags: tl.constexpr):
    mean = tl.div_rn(tl.load(norm), parts)
    stops, finite = is_stopped(stopped, flags), tl.abs(mean) < float("inf")  # false for NaN too
    goes = tl.where(stops | (finite == 0), 0.0, 1.0)
    tl.store(step, tl.load(step) + goes)
    # PyTorch divides a number by a tensor in two steps.
    shortened = tl.minimum(tl.div_rn(1.0, mean + 1e-6) * clip_norm, 1.0)
    shortened = tl.where(clip_norm > 0, shortened, 1.0)
    of_mean, of_square = (1.0 - tl.load(powers)).to(tl.float32), (1.0 - tl.load(powers + 1)).to(tl.float32)
    tl.store(numbers, goes)
    tl.store(numbers + 1, tl.div_rn(shortened, parts))
    tl.store(numbers + 2, tl.div_rn(tl.load(learning_rate), of_mean))
    tl.store(numbers + 3, tl.sqrt_rn(of_square))
    tl.store(numbers + 4, tl.where(stops | finite, 0.0, 1.0))


@jit
def _flat_adam_kernel(
    weights,
    means,
    squares,
    gradient,
    numbers,
    bad,
    rounded,
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
    if rounded is not None:
        tl.store(rounded + at, new.to(tl.bfloat16), mask)
    tl.store(means + at, mean, mask)
    tl.store(squares + at, square, mask)
