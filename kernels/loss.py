"""Binary cross-entropy with logits and its gradient, in one launch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from kernels._triton import jit, next_power_of_2, tl

_BLOCK = 8192  # one program does it all: samples are few, and its sum has one order


def bce_with_logits(
    logits: Tensor, labels: Tensor, loss: Tensor, dlogits: Tensor, global_batch: int, scale: float = 1.0
) -> None:
    """loss = the local batch's mean BCE(sigmoid(z), label); dlogits = (sigmoid(z) - label) / global_batch * scale.

    logits, dlogits: bf16 or fp32 [batch], contiguous, of dtypes of their own; dlogits may be logits. labels: fp32
    [batch]. loss: fp32, one element. With scale 1, summing weight gradients over ranks gives the global mean's.
    """
    assert logits.shape == labels.shape == dlogits.shape and logits.dim() == 1 and len(logits), "[batch], not empty"
    assert logits.is_contiguous() and labels.is_contiguous() and dlogits.is_contiguous(), "contiguous tensors only"
    assert labels.dtype == loss.dtype == torch.float32 and loss.numel() == 1, "labels and loss: fp32"
    bce = triton_bce_with_logits if logits.is_cuda else plain_bce_with_logits
    bce(logits, labels, loss, dlogits, global_batch, scale)


def plain_bce_with_logits(
    logits: Tensor, labels: Tensor, loss: Tensor, dlogits: Tensor, global_batch: int, scale: float = 1.0
) -> None:
    """What `bce_with_logits` does, in PyTorch."""
    z = logits.float()
    loss.copy_(functional.binary_cross_entropy_with_logits(z, labels))
    dlogits.copy_((z.sigmoid() - labels) * (scale / global_batch))


def triton_bce_with_logits(
    logits: Tensor, labels: Tensor, loss: Tensor, dlogits: Tensor, global_batch: int, scale: float = 1.0
) -> None:
    """What `bce_with_logits` does, in one kernel of one program."""
    block = min(max(next_power_of_2(len(logits)), 512), _BLOCK)
    _bce[(1,)](logits, labels, loss, dlogits, len(logits), scale / global_batch, block, num_warps=block // 512)


@jit
def _bce(logits, labels, loss, dlogits, batch: tl.constexpr, factor, block: tl.constexpr) -> None:
    total = tl.zeros([block], tl.float32)
    for start in range(0, batch, block):
        at = start + tl.arange(0, block)
        mask = at < batch
        z = tl.load(logits + at, mask, other=0.0).to(tl.float32)
        y = tl.load(labels + at, mask, other=0.0)
        e = tl.exp(-tl.abs(z))
        # log(1 + e) without the digits that 1 + e rounds off (Kahan).
        u = 1.0 + e
        log1p = tl.where(u == 1.0, e, tl.log(u) * e / tl.where(u == 1.0, 1.0, u - 1.0))
        total += tl.where(mask, tl.maximum(z, 0.0) - z * y + log1p, 0.0)
        sigmoid = tl.where(z >= 0, 1.0, e) / u
        tl.store(dlogits + at, (sigmoid - y) * factor, mask)
    tl.store(loss, tl.sum(total, 0) / batch)
