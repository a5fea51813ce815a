"""torch.optim.Adagrad's update of a list of tensors in one kernel, which reads and writes each number once, with the
bits of torch's five foreach kernels.

Of each element, with one rounding per line:

    sum       = g * g + sum            (an FMA: torch's addcmul on CUDA has one for a value of 1, since 2.11)
    root      = sqrt(sum)
    deviation = root + eps
    step      = g * -lr
    parameter = parameter + step / deviation     (the quotient is rounded too)
"""

import logging
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adagrad import adagrad

from ._triton import jit, tl, triton

logger = logging.getLogger(__name__)

_BLOCK = 2048
"""Elements of a program."""
_VECTOR = 16
"""Bytes that a thread loads or stores at once."""
_PLAIN = (Tensor, nn.Parameter)
"""Types that torch updates by foreach kernels without being asked to."""


def one_kernel(
    parameters: Sequence[Tensor], grads: Sequence[Tensor], sums: Sequence[Tensor], options: dict[str, Any]
) -> Callable[[], None] | None:
    """Returns a function that launches the update of one parameter group; None where torch's own functions must do it.

    options: those of torch's `adagrad` without lr_decay, differentiable and fused set; `lr` is a number, or a tensor on
    the device, which every update reads. The function keeps addresses, not tensors: whoever has it keeps the tensors.
    Must not be called in a capture: it copies a table to the device, and tries the kernel once per device.
    """
    if not _is_taken([*parameters, *grads, *sums], options) or not all(
        one.shape == grad.shape == total.shape for one, grad, total in zip(parameters, grads, sums, strict=True)
    ):
        return None
    device, lr = parameters[0].device, options["lr"]
    if not has_torchs_bits(device):
        return None
    rate = lr if isinstance(lr, Tensor) else torch.tensor(lr, dtype=torch.float32, device=device)
    return partial(adagrad_of_tensors, blocks_of(parameters, grads, sums), rate, options["eps"])


def runs_on(device: torch.device) -> bool:
    """Whether the kernel replaces torch's on this device. CPUs have no graph to put it in."""
    return device.type == "cuda" and triton is not None


def _is_taken(tensors: list[Tensor], options: dict[str, Any]) -> bool:
    # torch's update of single tensors rounds otherwise, as lr multiplies the quotient there. With `fused` given, torch
    # takes its foreach kernels only if asked to.
    foreach = options["foreach"] or (options["foreach"] is None and options["fused"] is None)
    # These change the gradient in memory first, in kernels of their own.
    if not tensors or not foreach or options["weight_decay"] or options["maximize"] or not runs_on(tensors[0].device):
        return False
    device, lr = tensors[0].device, options["lr"]
    # Complex numbers, bf16, sparse gradients and DTensors have other kernels. Contiguous tensors have their elements in
    # one order; others, which torch does not pass to foreach kernels together, could be laid out each in its own.
    of_kernel = all(
        type(of) in _PLAIN
        and (of.dtype, of.device, of.layout) == (torch.float32, device, torch.strided)
        and of.is_contiguous()
        for of in tensors
    )
    # Triton would compile another binary for a rate elsewhere, which a capture may not load.
    of_rate = not isinstance(lr, Tensor) or (
        (lr.dtype, lr.device, lr.dim()) == (torch.float32, device, 0) and lr.data_ptr() % _VECTOR == 0
    )
    return of_kernel and of_rate


def blocks_of(parameters: Sequence[Tensor], grads: Sequence[Tensor], sums: Sequence[Tensor]) -> Tensor:
    """Returns the kernel's table on the device, int64 [programs, 4]: addresses of the program's part of a parameter,
    its gradient and its sum, and the part's number of elements. All tensors are fp32, contiguous."""
    rows = []
    for of in zip(parameters, grads, sums, strict=True):
        count = of[0].numel()
        starts = torch.arange(0, count, _BLOCK, dtype=torch.int64)
        addresses = [starts * of[0].itemsize + tensor.data_ptr() for tensor in of]
        rows.append(torch.stack([*addresses, (count - starts).clamp(max=_BLOCK)], dim=1))
    return torch.cat(rows).to(parameters[0].device)


def adagrad_of_tensors(blocks: Tensor, rate: Tensor, eps: float) -> None:
    """Updates parameters and sums in place, in one kernel.

    blocks: as of `blocks_of`. rate: the learning rate, fp32, one element, on the device. eps is rounded to fp32.
    """
    if len(blocks):
        # Without fp_fusion the FMA that is written is the only one.
        _adagrad_of_tensors_kernel[(len(blocks),)](
            blocks, rate, float(eps), _BLOCK, _VECTOR, num_warps=8, enable_fp_fusion=False
        )


@cache
def has_torchs_bits(device: torch.device) -> bool:
    """Whether the kernel's results on this device are torch's, bit by bit, which the log says if not. By a trial of
    numbers of any size, aligned and not, which also loads the kernel: a capture may not."""
    try:
        equal = _try(device)
    except Exception as error:  # of Triton, which may find no C compiler: torch needs none
        logger.warning("Adagrad takes torch's own kernels: trying one in Triton, %s: %s", type(error).__name__, error)
        return False
    if not equal:
        logger.warning(
            "Adagrad takes torch's own kernels: torch %s rounds otherwise than one of them", torch.__version__
        )
    return equal


def _try(device: torch.device) -> bool:
    count, odd = 2 * _BLOCK, 1001
    draw = torch.Generator().manual_seed(0)

    def drawn(smallest: int) -> list[Tensor]:
        """Whole blocks, and a part of one at an odd address. smallest: exponent; some numbers are 0."""
        exponents = torch.randint(smallest, 20, (count + 1 + odd,), generator=draw)
        numbers = torch.ldexp(torch.randn(len(exponents), generator=draw), exponents).to(device)
        numbers[::7] = 0
        return [numbers[:count], numbers[count + 1 :]]

    parameters, grads, sums = drawn(-145), drawn(-75), drawn(-145)
    for total in sums:
        total.abs_()
    eps, rate = 1e-8, torch.tensor(0.1, dtype=torch.float32)
    of_torch, of_torch_sums = ([of.clone() for of in every] for every in (parameters, sums))
    options: dict[str, Any] = {"lr": rate.item(), "eps": eps, "weight_decay": 0, "lr_decay": 0, "maximize": False}
    adagrad(of_torch, grads, of_torch_sums, [torch.zeros(()) for _ in grads], foreach=True, **options)
    adagrad_of_tensors(blocks_of(parameters, grads, sums), rate.to(device), eps)
    pairs = zip([*parameters, *sums], [*of_torch, *of_torch_sums], strict=True)
    return all(torch.equal(ours.view(torch.int32), theirs.view(torch.int32)) for ours, theirs in pairs)


@jit
def _adagrad_of_tensors_kernel(blocks, rate, eps, block: tl.constexpr, vector: tl.constexpr) -> None:
    of = blocks + 4 * tl.program_id(0).to(tl.int64)
    parameter, grad, total, count = tl.load(of), tl.load(of + 1), tl.load(of + 2), tl.load(of + 3)
    minus_rate = -tl.load(rate)
    at = tl.arange(0, block)
    # Alignment is a hint on the pointers, as the cast loses the integers'.
    of_parameter, of_grad, of_total = parameter.to(rate.dtype), grad.to(rate.dtype), total.to(rate.dtype)
    if (count == block) & ((parameter | grad | total) % vector == 0):
        of_parameter, of_grad = tl.multiple_of(of_parameter, vector), tl.multiple_of(of_grad, vector)
        _update(of_parameter + at, of_grad + at, tl.multiple_of(of_total, vector) + at, minus_rate, eps, None)
    else:
        _update(of_parameter + at, of_grad + at, of_total + at, minus_rate, eps, at < count)


@jit
def _update(parameter, grad, total, minus_rate, eps, mask) -> None:
    g, s, p = tl.load(grad, mask), tl.load(total, mask), tl.load(parameter, mask)  # in flight together
    s = tl.fma(g, g, s)
    tl.store(total, s, mask)
    tl.store(parameter, p + tl.div_rn(g * minus_rate, tl.sqrt_rn(s) + eps), mask)
