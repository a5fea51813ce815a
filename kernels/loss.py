"""The end of the top MLP in training: the last layer's forward, the loss, and the backward of both, in two launches."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from kernels._triton import cdiv, jit, next_power_of_2, tl

_ROWS, _COLUMNS = 16, 256  # of one program's block; 512 rows still give 32 programs
_SUM_ROWS, _SUM_COLUMNS = 64, 32  # of a block of partial sums


def logit_loss_backward(
    h: Tensor,
    weight: Tensor,
    bias: Tensor,
    labels: Tensor,
    loss: Tensor,
    dlogits: Tensor,
    dbias: Tensor,
    dz: Tensor,
    dbias_hidden: Tensor | None,
    global_batch: int,
) -> None:
    """From h, a last hidden layer behind its ReLU: loss = mean BCE(sigmoid(h @ weight.T + bias), labels), and backward.

    dlogits = (sigmoid(logits) - labels) / global_batch: summing weight gradients over ranks gives the global mean's.
    dz = dlogits @ weight * (h > 0). dbias = sum of dlogits, dbias_hidden = column sums of dz, both before they are
    rounded. Without a dbias_hidden, h is behind no ReLU, and dz = dlogits @ weight.

    h, dz: bf16 or fp32 [batch, width], contiguous, of any width. weight: [1, width], bias: [1], dlogits: [batch], of
    h's dtype. labels: fp32 [batch]. loss: fp32, one element. dbias: bf16 or fp32 [1], dbias_hidden: [width]. All
    outputs are overwritten. Computed in fp32; logits and dlogits are rounded to h's dtype before they are used.
    """
    batch, width = h.shape
    assert batch > 0 and dz.shape == h.shape and labels.shape == dlogits.shape == (batch,), "[batch, width], not empty"
    assert weight.shape == (1, width) and bias.shape == dbias.shape == (1,), "weight: [1, width], bias, dbias: [1]"
    assert dbias_hidden is None or dbias_hidden.shape == (width,), "dbias_hidden: [width]"
    assert all(t.is_contiguous() for t in (h, weight, labels, dlogits, dz)), "contiguous tensors only"
    assert h.dtype == weight.dtype == bias.dtype == dlogits.dtype == dz.dtype, "one dtype"
    assert labels.dtype == loss.dtype == torch.float32 and loss.numel() == 1, "labels and loss: fp32"
    backward = triton_logit_loss_backward if h.is_cuda else plain_logit_loss_backward
    backward(h, weight, bias, labels, loss, dlogits, dbias, dz, dbias_hidden, global_batch)


def plain_logit_loss_backward(
    h: Tensor,
    weight: Tensor,
    bias: Tensor,
    labels: Tensor,
    loss: Tensor,
    dlogits: Tensor,
    dbias: Tensor,
    dz: Tensor,
    dbias_hidden: Tensor | None,
    global_batch: int,
) -> None:
    """What `logit_loss_backward` does, in PyTorch."""
    logits = torch.mv(h.float(), weight[0].float()).add_(bias.float()).to(h.dtype).float()
    loss.copy_(functional.binary_cross_entropy_with_logits(logits, labels))
    gradient = (logits.sigmoid() - labels) / global_batch
    dlogits.copy_(gradient)
    dbias.copy_(gradient.sum())
    dh = torch.outer(dlogits.float(), weight[0].float())
    if dbias_hidden is not None:
        dh *= h > 0
        dbias_hidden.copy_(dh.sum(0))
    dz.copy_(dh)


def triton_logit_loss_backward(
    h: Tensor,
    weight: Tensor,
    bias: Tensor,
    labels: Tensor,
    loss: Tensor,
    dlogits: Tensor,
    dbias: Tensor,
    dz: Tensor,
    dbias_hidden: Tensor | None,
    global_batch: int,
) -> None:
    """What `logit_loss_backward` does, in two kernels: rows with their partial sums, then the sums of these.

    Without atomics: equal inputs give equal bits.
    """
    batch, width = h.shape
    relu = dbias_hidden is not None
    # Of each program: the loss, dlogits, and behind a ReLU the columns of dz.
    partials = torch.empty(cdiv(batch, _ROWS), 2 + width * relu, dtype=torch.float32, device=h.device)
    programs, columns = partials.shape
    tensors = (h, weight, bias, labels, dlogits, dz, partials)
    _bce[(programs,)](*tensors, batch, 1 / global_batch, width, relu, _ROWS, min(next_power_of_2(width), _COLUMNS))
    grid = (cdiv(columns, _SUM_COLUMNS),)
    _sum_partials[grid](partials, loss, dbias, dbias_hidden, batch, programs, columns, _SUM_ROWS, _SUM_COLUMNS)


@jit
def _bce(
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
    loss = tl.where(exists, tl.maximum(z, 0.0) - z * y + log1p, 0.0)
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
            active = tl.load(h + first + column[None, :], mask, other=0.0).to(tl.float32) > 0
            dh = tl.where(active, dh, 0.0)
            tl.store(sums + 2 + column, tl.sum(dh, 0), column < width)
        tl.store(dz + first + column[None, :], dh, mask)


@jit
def _sum_partials(
    partials,
    loss,
    dbias,
    dbias_hidden,
    batch,
    rows: tl.constexpr,
    columns: tl.constexpr,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
) -> None:
    column = tl.program_id(0) * block_columns + tl.arange(0, block_columns)
    total = tl.zeros([block_rows, block_columns], tl.float32)
    for start in range(0, rows, block_rows):
        row = start + tl.arange(0, block_rows)[:, None]
        mask = (row < rows) & (column < columns)[None, :]
        total += tl.load(partials + row * columns + column[None, :], mask, other=0.0)
    sums = tl.sum(total, 0)
    tl.store(loss + column, sums / batch, column == 0)
    tl.store(dbias + column - 1, sums, column == 1)
    if columns > 2:
        tl.store(dbias_hidden + column - 2, sums, (column >= 2) & (column < columns))
