"""The end of the top MLP in training: the last layer's forward, the loss, and the backward of both, in one launch.

The sums over samples (the loss and two bias gradients) are partial; `add_up` finishes them. No GEMM waits for these
sums.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from dlrm_bench.kernels._call import function
from dlrm_bench.kernels._triton import cdiv, jit, next_power_of_2, tl
from dlrm_bench.kernels.dense.column_sums import sum_columns

_ROWS, _COLUMNS = 16, 256  # block of one program; 512 rows still give 32 programs
_SUM_ROWS, _SUM_COLUMNS = 64, 32  # block of partial sums


def partial_rows(batch: int) -> int:
    """Returns the number of rows of partial sums that `logit_loss_backward` writes for `batch` samples."""
    return cdiv(batch, _ROWS)


def partial_columns(width: int, relu: bool) -> int:
    """Returns the number of columns of partial sums: loss, logit gradient, and after a ReLU the columns of dz."""
    return 2 + width * relu


class LogitLossBackward(NamedTuple):
    """Computes the gradients by logits = h @ weight.T + bias, and by h, of the global batch's mean
    BCE(sigmoid(logits), labels).

    dlogits = (sigmoid(logits) - labels) / global_batch, so that weight gradients summed over ranks are those of the
    global mean. dz = dlogits @ weight, zeroed after a ReLU where h <= 0. Outputs are overwritten. Computed in fp32;
    logits and dlogits are rounded to h's dtype before use. All tensors are contiguous.
    """

    h: Tensor
    """bf16 or fp32 [batch, width], of any width."""
    weight: Tensor
    """[1, width], of h's dtype; likewise bias and dlogits."""
    bias: Tensor
    """[1]."""
    labels: Tensor
    """fp32 [batch]."""
    dlogits: Tensor
    """[batch]."""
    dz: Tensor
    """[batch, width], of h's dtype."""
    partials: Tensor
    """fp32 [partial_rows(batch), partial_columns(width, relu)]: partial sums of the losses, of dlogits and of dz,
    before rounding."""
    global_batch: int
    relu: bool
    predictions: Tensor | None = None
    """fp32 [batch], for sigmoid(logits); None if nothing reads them."""

    def launch(self) -> None:
        """Checks the arguments and computes the gradients."""
        h, weight, dlogits, dz, partials = self.h, self.weight, self.dlogits, self.dz, self.partials
        batch, width = h.shape
        assert batch > 0 and dz.shape == h.shape, "h and dz: [batch, width], not empty"
        assert self.labels.shape == dlogits.shape == (batch,), "labels, dlogits: [batch]"
        assert weight.shape == (1, width) and self.bias.shape == (1,), "weight: [1, width], bias: [1]"
        assert partials.shape == (partial_rows(batch), partial_columns(width, self.relu)), (
            "partials: [partial_rows, partial_columns]"
        )
        assert all(t.is_contiguous() for t in (h, weight, self.labels, dlogits, dz, partials)), (
            "contiguous tensors only"
        )
        assert h.dtype == weight.dtype == self.bias.dtype == dlogits.dtype == dz.dtype, "one dtype"
        assert self.labels.dtype == partials.dtype == torch.float32, "labels and partials: fp32"
        kept = self.predictions
        if kept is not None:
            assert kept.shape == (batch,) and kept.dtype == torch.float32 and kept.is_contiguous(), "predictions: fp32"
        (self.triton if h.is_cuda else self.plain)()

    def plain(self) -> None:
        """Computes the gradients in PyTorch."""
        h, row = self.h, self.weight[0].float()
        logits = torch.mv(h.float(), row).add_(self.bias.float()).to(h.dtype).float()
        predictions = logits.sigmoid()
        gradient = (predictions - self.labels) / self.global_batch
        if self.predictions is not None:
            self.predictions.copy_(predictions)
        self.dlogits.copy_(gradient)
        dh = torch.outer(self.dlogits.float(), row)
        sums = self.partials.zero_()[0]
        sums[0] = functional.binary_cross_entropy_with_logits(logits, self.labels, reduction="sum")
        sums[1] = gradient.sum()
        if self.relu:
            dh.masked_fill_(h <= 0, 0)
            sums[2:] = dh.sum(0)
        self.dz.copy_(dh)

    def triton(self) -> None:
        """Computes the gradients in one kernel."""
        batch, width = self.h.shape
        *tensors, global_batch, relu, predictions = self
        columns = min(next_power_of_2(width), _COLUMNS)
        sizes = (batch, 1 / global_batch, width, relu, _ROWS, columns)
        _logit_loss_backward_kernel[(len(self.partials),)](*tensors, predictions, *sizes)


class AddUp(NamedTuple):
    """Sets losses[step % n] to the mean over `batch` samples, and dbias and dbias_hidden to the bias gradients, from
    the partial sums; step += 1. No atomics: equal inputs give equal bits."""

    partials: Tensor
    """Partial sums of `logit_loss_backward`, for one or several ranges of samples, stacked."""
    losses: Tensor
    """fp32 [n], a ring, so that the host copies no loss per iteration."""
    step: Tensor
    """int64, one element, on the losses' device."""
    dbias: Tensor
    """bf16 or fp32 [1]."""
    dbias_hidden: Tensor | None
    """bf16 or fp32 [width]; None if there is no ReLU."""
    batch: int

    def launch(self) -> None:
        """Checks the arguments and adds up."""
        partials, losses, step = self.partials, self.losses, self.step
        assert losses.dim() == 1 and losses.dtype == torch.float32 and losses.is_contiguous(), "losses: fp32 [n]"
        assert step.numel() == self.dbias.numel() == 1 and step.dtype == torch.int64, "step (int64), dbias: one element"
        hidden = 0 if self.dbias_hidden is None else self.dbias_hidden.numel()
        assert partials.shape[1] == 2 + hidden and partials.is_contiguous(), "partials: [rows, 2 + width]"
        (self.triton if partials.is_cuda else self.plain)()

    def plain(self) -> None:
        """Adds up in PyTorch."""
        sums = self.partials.sum(0)
        self.losses[self.step % len(self.losses)] = sums[0] / self.batch
        self.step.add_(1)
        self.dbias.fill_(sums[1])
        if self.dbias_hidden is not None:
            self.dbias_hidden.copy_(sums[2:])

    def triton(self) -> None:
        """Adds up in one kernel."""
        rows, columns = self.partials.shape
        *tensors, batch = self
        sizes = (len(self.losses), batch, rows, columns, _SUM_ROWS, _SUM_COLUMNS)
        _add_up_kernel[(cdiv(columns, _SUM_COLUMNS),)](*tensors, *sizes)


logit_loss_backward = function(LogitLossBackward, LogitLossBackward.launch)
plain_logit_loss_backward = function(LogitLossBackward, LogitLossBackward.plain)
triton_logit_loss_backward = function(LogitLossBackward, LogitLossBackward.triton)
add_up = function(AddUp, AddUp.launch)
plain_add_up = function(AddUp, AddUp.plain)
triton_add_up = function(AddUp, AddUp.triton)


@jit
def _logit_loss_backward_kernel(
    h,
    weight,
    bias,
    labels,
    dlogits,
    dz,
    partials,
    predictions,
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
    # log(1 + e), corrected for the digits that 1 + e rounds off (Kahan).
    u = 1.0 + e
    log1p = tl.where(u == 1.0, e, tl.log(u) * e / tl.where(u == 1.0, 1.0, u - 1.0))
    loss = tl.where(exists, tl.maximum(z, 0.0, propagate_nan=tl.PropagateNan.ALL) - z * y + log1p, 0.0)
    prediction = tl.where(z >= 0, 1.0, e) / u
    if predictions is not None:
        tl.store(predictions + row, prediction, exists)
    gradient = tl.where(exists, (prediction - y) * factor, 0.0)
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
    if tl.program_id(0) == 0:  # this program has the loss column
        now = tl.load(step)
        tl.store(losses + now % size + column, sums / batch, column == 0)
        tl.store(step, now + 1)
    tl.store(dbias + column - 1, sums, column == 1)
    if columns > 2:
        tl.store(dbias_hidden + column - 2, sums, (column >= 2) & (column < columns))
