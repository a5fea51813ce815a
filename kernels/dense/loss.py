"""The end of the top MLP in training: the last layer's forward, the loss, and the backward of both, in one launch.

What it sums over samples, the loss and the gradients of two biases, it leaves as partial sums, which `add_up` finishes:
no GEMM waits for these.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from dlrm_bench.kernels._triton import cdiv, jit, next_power_of_2, tl
from dlrm_bench.kernels.dense.column_sums import sum_columns

_ROWS, _COLUMNS = 16, 256  # of one program's block; 512 rows still give 32 programs
_SUM_ROWS, _SUM_COLUMNS = 64, 32  # of a block of partial sums


def partial_rows(batch: int) -> int:
    """How many rows of partial sums `logit_loss_backward` leaves for so many samples."""
    return cdiv(batch, _ROWS)


def partial_columns(width: int, relu: bool) -> int:
    """Returns how many columns these rows have: the loss, the gradient by the logits, and after a ReLU those of dz."""
    return 2 + width * relu


def logit_loss_backward(
    h: Tensor,
    weight: Tensor,
    bias: Tensor,
    labels: Tensor,
    dlogits: Tensor,
    dz: Tensor,
    partials: Tensor,
    global_batch: int,
    relu: bool,
) -> None:
    """The gradients by logits = h @ weight.T + bias, and by h, of the global batch's mean BCE(sigmoid(logits), labels).

    dlogits = (sigmoid(logits) - labels) / global_batch: summing weight gradients over ranks gives the global mean's. dz
    = dlogits @ weight, and 0 where h <= 0 comes after a ReLU. partials: partial sums of the losses, of dlogits
    and of dz, before these are rounded.

    h, dz: bf16 or fp32 [batch, width], contiguous, of any width. weight: [1, width], bias: [1], dlogits: [batch], of
    h's dtype. labels: fp32 [batch]. partials: fp32 [partial_rows(batch), partial_columns(width, relu)]. Outputs are
    overwritten. Computed in fp32; logits and dlogits are rounded to h's dtype before they are used.
    """
    batch, width = h.shape
    assert batch > 0 and dz.shape == h.shape and labels.shape == dlogits.shape == (batch,), "[batch, width], not empty"
    assert weight.shape == (1, width) and bias.shape == (1,), "weight: [1, width], bias: [1]"
    assert partials.shape == (partial_rows(batch), partial_columns(width, relu)), (
        "partials: [partial_rows, partial_columns]"
    )
    assert all(t.is_contiguous() for t in (h, weight, labels, dlogits, dz, partials)), "contiguous tensors only"
    assert h.dtype == weight.dtype == bias.dtype == dlogits.dtype == dz.dtype, "one dtype"
    assert labels.dtype == partials.dtype == torch.float32, "labels and partials: fp32"
    backward = triton_logit_loss_backward if h.is_cuda else plain_logit_loss_backward
    backward(h, weight, bias, labels, dlogits, dz, partials, global_batch, relu)


def plain_logit_loss_backward(
    h: Tensor,
    weight: Tensor,
    bias: Tensor,
    labels: Tensor,
    dlogits: Tensor,
    dz: Tensor,
    partials: Tensor,
    global_batch: int,
    relu: bool,
) -> None:
    """What `logit_loss_backward` does, in PyTorch."""
    logits = torch.mv(h.float(), weight[0].float()).add_(bias.float()).to(h.dtype).float()
    gradient = (logits.sigmoid() - labels) / global_batch
    dlogits.copy_(gradient)
    dh = torch.outer(dlogits.float(), weight[0].float())
    sums = partials.zero_()[0]
    sums[0] = functional.binary_cross_entropy_with_logits(logits, labels, reduction="sum")
    sums[1] = gradient.sum()
    if relu:
        dh.masked_fill_(h <= 0, 0)
        sums[2:] = dh.sum(0)
    dz.copy_(dh)


def triton_logit_loss_backward(
    h: Tensor,
    weight: Tensor,
    bias: Tensor,
    labels: Tensor,
    dlogits: Tensor,
    dz: Tensor,
    partials: Tensor,
    global_batch: int,
    relu: bool,
) -> None:
    """What `logit_loss_backward` does, in one kernel."""
    batch, width = h.shape
    tensors = (h, weight, bias, labels, dlogits, dz, partials)
    columns = min(next_power_of_2(width), _COLUMNS)
    _logit_loss_backward_kernel[(len(partials),)](*tensors, batch, 1 / global_batch, width, relu, _ROWS, columns)


def add_up(
    partials: Tensor, losses: Tensor, step: Tensor, dbias: Tensor, dbias_hidden: Tensor | None, batch: int
) -> None:
    """losses[step % n] = the mean over `batch` samples, dbias and dbias_hidden = the biases' gradients, from the
    partial sums; step += 1.

    partials: those of `logit_loss_backward`, of one or of several ranges of the samples, one below the other. losses:
    fp32 [n], a ring, so that the host copies none. step: int64, one element, on its device. dbias: bf16 or fp32 [1],
    dbias_hidden: [width], None where there is no ReLU. Without atomics: equal inputs give equal bits.
    """
    assert losses.dim() == 1 and losses.dtype == torch.float32 and losses.is_contiguous(), "losses: fp32 [n]"
    assert step.numel() == dbias.numel() == 1 and step.dtype == torch.int64, "step, int64, and dbias: one element"
    hidden = 0 if dbias_hidden is None else dbias_hidden.numel()
    assert partials.shape[1] == 2 + hidden and partials.is_contiguous(), "partials: [rows, 2 + width]"
    add = triton_add_up if partials.is_cuda else plain_add_up
    add(partials, losses, step, dbias, dbias_hidden, batch)


def plain_add_up(
    partials: Tensor, losses: Tensor, step: Tensor, dbias: Tensor, dbias_hidden: Tensor | None, batch: int
) -> None:
    """What `add_up` does, in PyTorch."""
    sums = partials.sum(0)
    losses[step % len(losses)] = sums[0] / batch
    step += 1
    dbias.fill_(sums[1])
    if dbias_hidden is not None:
        dbias_hidden.copy_(sums[2:])


def triton_add_up(
    partials: Tensor, losses: Tensor, step: Tensor, dbias: Tensor, dbias_hidden: Tensor | None, batch: int
) -> None:
    """What `add_up` does, in one kernel."""
    rows, columns = partials.shape
    grid = (cdiv(columns, _SUM_COLUMNS),)
    tensors = (partials, losses, step, dbias, dbias_hidden)
    _add_up_kernel[grid](*tensors, len(losses), batch, rows, columns, _SUM_ROWS, _SUM_COLUMNS)


@jit
def _logit_loss_backward_kernel(
    h,
    weight,
    bias,
    labels,
    dlogits,
    dz,
    partials,
    batch,
    factor,
    width: tl.constexpr,
    relu: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
) -> None:
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    exists = row < batch
    first = row.to(tl.int64)[:, None] * width
    y = tl.load(labels + row, exists, other=0.0)
    b = tl.load(bias).to(tl.float32)

    products = tl.zeros([rows, columns], tl.float32)
    for start in range(0, width, columns):
        column = start + tl.arange(0, columns)
        w = tl.load(weight + column, column < width, other=0.0).to(tl.float32)[None, :]
        mask = exists[:, None] & (column < width)[None, :]
        products += tl.load(h + first + column[None, :], mask, other=0.0).to(tl.float32) * w
    z = (tl.sum(products, 1) + b).to(h.dtype.element_ty).to(tl.float32)

    e = tl.exp(-tl.abs(z))
    # log(1 + e) without the digits that 1 + e rounds off (Kahan).
    u = 1.0 + e
    log1p = tl.where(u == 1.0, e, tl.log(u) * e / tl.where(u == 1.0, 1.0, u - 1.0))
    loss = tl.where(exists, tl.maximum(z, 0.0, propagate_nan=tl.PropagateNan.ALL) - z * y + log1p, 0.0)
    gradient = tl.where(exists, (tl.where(z >= 0, 1.0, e) / u - y) * factor, 0.0)
    dlogit = gradient.to(h.dtype.element_ty)
    tl.store(dlogits + row, dlogit, exists)
    sums = partials + tl.program_id(0).to(tl.int64) * (2 + width * relu)
    tl.store(sums, tl.sum(loss, 0))
    tl.store(sums + 1, tl.sum(gradient, 0))

    for start in range(0, width, columns):
        column = start + tl.arange(0, columns)
        w = tl.load(weight + column, column < width, other=0.0).to(tl.float32)[None, :]
        mask = exists[:, None] & (column < width)[None, :]
        dh = dlogit.to(tl.float32)[:, None] * w
        if relu:
            closed = tl.load(h + first + column[None, :], mask, other=0.0).to(tl.float32) <= 0
            dh = tl.where(closed, 0.0, dh)
            tl.store(sums + 2 + column, tl.sum(dh, 0), column < width)
        tl.store(dz + first + column[None, :], dh, mask)


@jit
def _add_up_kernel(
    partials,
    losses,
    step,
    dbias,
    dbias_hidden,
    size,
    batch,
    rows: tl.constexpr,
    columns: tl.constexpr,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
) -> None:
    column = tl.program_id(0) * block_columns + tl.arange(0, block_columns)
    sums = sum_columns(partials, column, rows, columns, block_rows, block_columns)
    if tl.program_id(0) == 0:  # which has the loss' column
        now = tl.load(step)
        tl.store(losses + now % size + column, sums / batch, column == 0)
        tl.store(step, now + 1)
    tl.store(dbias + column - 1, sums, column == 1)
    if columns > 2:
        tl.store(dbias_hidden + column - 2, sums, (column >= 2) & (column < columns))
