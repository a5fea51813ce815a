"""Rows of tables in two memory tiers: reading, writing and exchanging them.

A row is its weights followed by its optimizer state. Rows at places 0 .. P - 1 are on the device, those at places from
P on in host memory. Both are in one address space, so one kernel reaches either: the offset from the device's memory of
a row at place p is p * stride, plus `host_offset` if it is in host memory.

Exchanges over the host link move some 28 rows per microsecond, for 512 bytes as for 1 KB, in one direction as in both
(one H200, rows at random places of 40 GB; 40 rows per microsecond in place order). Pages of 4 KB, of 2 MB and of
hugetlbfs make no difference, nor do 8, 16, 32 or 132 programs. But programs that occupy multiprocessors make products
wait for them: the fewer multiprocessors, the less. Beside bf16 products on one H200, 20,159 rows of 1 KB:

| blocks x warps | rows/us | products slower | lost, ms per million rows |
|----------------|---------|-----------------|---------------------------|
| 132 x 1        | 28.6    | 23.9 %          | 6.75                      |
| 16 x 16        | 22.9    | 6.7 %           | 2.76                      |
| 8 x 32         | 23.0    | 6.0 %           | 2.45                      |
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from dlrm_bench.kernels._call import function
from dlrm_bench.kernels._cuda import Kernel, available
from dlrm_bench.kernels._triton import cdiv, jit, next_power_of_2, tl

_TILE_ELEMENTS = 4096  # that a program has in flight
_PROGRAMS = 8  # of an exchange in Triton
_BLOCKS, _WARPS = 8, 32  # of an exchange in CUDA C++
_SOURCE = Path(__file__).with_name("exchange_rows.cu")


class Tiers(NamedTuple):
    """The memory of both tiers."""

    device: Tensor
    """fp32 [P, 2, C], contiguous: weights and state of the rows at places 0 .. P - 1."""
    host: Tensor
    """fp32 [H, 2, C], contiguous: of the rows at places P .. P + H - 1; in pinned memory if `device` is on a GPU."""

    @property
    def weights(self) -> Tensor:
        """Weights of the device's rows, [P, C] with a row stride of 2 * C."""
        return self.device[:, 0]

    @property
    def state(self) -> Tensor:
        """State of the device's rows, shaped like `weights`."""
        return self.device[:, 1]


def check_host(weights: Tensor, host: Tensor) -> None:
    """Asserts that `host`, [H, 2, C], has the row stride of `weights`, which is [:, 0] of [P, 2, C] on the device."""
    assert host.dtype == weights.dtype == torch.float32 and host.is_contiguous(), "rows: fp32, contiguous"
    assert host.shape[1:] == (2, weights.shape[1]) and host.stride(0) == weights.stride(0), "equal row strides"
    assert not weights.is_cuda or len(host) == 0 or host.is_pinned(), "rows in host memory must be pinned"


def host_offset(weights: Tensor, host: Tensor | None) -> int:
    """Returns the number of fp32 elements to add to the offset of a row at place P or higher; see above. 0 if no rows
    are in host memory."""
    if host is None or len(host) == 0:
        return 0
    assert (host.data_ptr() - weights.data_ptr()) % 4 == 0
    return (host.data_ptr() - weights.data_ptr()) // 4 - len(weights) * weights.stride(0)


def rows_at(device: Tensor, host: Tensor | None, places: Tensor) -> Tensor:
    """Returns the rows at `places`, for plain functions: [..., C] for integers [...].

    device: [P, C], host: [H, C], both weights or both state; host None if all places are on the device.
    """
    if host is None:
        return device[places]
    on_device = places < len(device)
    rows = device[torch.where(on_device, places, 0)]
    rows[~on_device] = host[(places[~on_device] - len(device)).to(host.device)].to(device.device)
    return rows


def put_rows(device: Tensor, host: Tensor | None, places: Tensor, rows: Tensor) -> None:
    """Writes rows [N, C] to `places`, [N], each at most once; other arguments as for `rows_at`."""
    if host is None:
        device[places] = rows
        return
    on_device = places < len(device)
    device[places[on_device]] = rows[on_device]
    host[(places[~on_device] - len(device)).to(host.device)] = rows[~on_device].to(host.device)


class CopyRows(NamedTuple):
    """rows[n] = columns of weights, or state, at places[n]; or the reverse."""

    tiers: Tiers
    places: Tensor
    """int32 [N], contiguous, each of 0 .. P + H - 1 (not checked); for writing, each at most once."""
    which: int
    """0: weights, 1: state."""
    column: int
    """Index of the first of c columns."""
    rows: Tensor
    """fp32 [N, c], contiguous, on the device."""
    writes: bool
    """Whether to copy rows to the tiers instead of from them."""

    def launch(self) -> None:
        """Checks the arguments and copies."""
        device, host = self.tiers
        check_host(self.tiers.weights, host)
        assert self.rows.dim() == 2 and len(self.rows) == len(self.places), "rows: [N, c]"
        assert self.rows.dtype == torch.float32 and self.column + self.rows.shape[1] <= device.shape[2], "fp32 columns"
        assert self.rows.is_contiguous() and self.places.is_contiguous(), "contiguous rows and places"
        assert self.places.dtype == torch.int32 and self.which in (0, 1), "places: int32"
        if device.is_cuda:
            self.triton()
        else:
            self.plain()

    def plain(self) -> None:
        """Copies in PyTorch."""
        columns = slice(self.column, self.column + self.rows.shape[1])
        device, host = (tier[:, self.which, columns] for tier in self.tiers)
        if self.writes:
            put_rows(device, host, self.places.long(), self.rows)
        else:
            self.rows.copy_(rows_at(device, host, self.places.long()))

    def triton(self) -> None:
        """Copies in one kernel."""
        device, host = self.tiers
        count, columns = self.rows.shape
        if count:
            width = next_power_of_2(columns)
            tile, first = max(1, _TILE_ELEMENTS // width), self.which * device.shape[2] + self.column
            of_tiers = (len(device), host_offset(self.tiers.weights, host), device.stride(0))
            sizes = (*of_tiers, first, count, columns, self.writes, width, tile)
            _copy_rows_kernel[(cdiv(count, tile),)](device, self.places, self.rows, *sizes)


copy_rows = function(CopyRows, CopyRows.launch)
plain_copy_rows = function(CopyRows, CopyRows.plain)
triton_copy_rows = function(CopyRows, CopyRows.triton)


class ExchangeRows(NamedTuple):
    """Exchanges weights and state of device[on_device[k]] with those of host[in_host[k]], for k from bounds[0] to
    bounds[1] - 1."""

    tiers: Tiers
    on_device: Tensor
    """int32 [W], distinct, in 0 .. P - 1."""
    in_host: Tensor
    """int32 [W], distinct, in 0 .. H - 1."""
    bounds: Tensor
    """int32 [2], on the device."""

    def launch(self) -> None:
        """Checks the arguments and exchanges."""
        check_host(self.tiers.weights, self.tiers.host)
        assert self.on_device.shape == self.in_host.shape, "on_device and in_host: of equal length"
        assert all(t.dtype == torch.int32 and t.is_contiguous() for t in self[1:4]), "int32, contiguous"
        if len(self.tiers.host) == 0:
            return
        if not self.tiers.device.is_cuda:
            self.plain()
        elif available():
            self.cuda()
        else:
            self.triton()

    def plain(self) -> None:
        """Exchanges in PyTorch."""
        first, last = self.bounds.tolist()
        on_device, in_host = self.on_device[first:last].long(), self.in_host[first:last].long()
        device, host = self.tiers
        in_host = in_host.to(host.device)
        leaving = device[on_device].to(host.device)
        device[on_device] = host[in_host].to(device.device)
        host[in_host] = leaving

    def triton(self) -> None:
        """Exchanges in one kernel."""
        elements = self.tiers.device[0].numel()
        tile = max(1, _TILE_ELEMENTS // elements)
        _exchange_rows_kernel[(_PROGRAMS,)](
            *self.tiers, self.on_device, self.in_host, self.bounds, _PROGRAMS, elements, tile
        )

    def cuda(self, blocks: int = _BLOCKS, warps: int = _WARPS) -> None:
        """Exchanges in one kernel. warps: of each block."""
        device = self.tiers.device.device
        tensors = (*self.tiers, self.on_device, self.in_host, self.bounds)
        arguments = _Arguments(*(tensor.data_ptr() for tensor in tensors))
        kernel = _kernel(self.tiers.device[0].numel(), warps, device)
        kernel.launch(blocks, arguments)


exchange_rows = function(ExchangeRows, ExchangeRows.launch)
plain_exchange_rows = function(ExchangeRows, ExchangeRows.plain)
triton_exchange_rows = function(ExchangeRows, ExchangeRows.triton)
cuda_exchange_rows = function(ExchangeRows, ExchangeRows.cuda)


class _Arguments(ctypes.Structure):
    """exchange_rows.cu's struct Arguments."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("device", "host", "on_device", "in_host", "bounds"))


@functools.cache
def _kernel(elements: int, warps: int, device: torch.device) -> Kernel:
    with torch.cuda.device(device):
        return Kernel(_SOURCE, "exchange_rows", {"ELEMENTS": elements}, 32 * warps, 0)


@jit
def _copy_rows_kernel(
    device,
    places,
    rows,
    device_rows,
    offset,
    stride,
    first,
    count,
    columns,
    writes: tl.constexpr,
    width: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    at = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    place = tl.load(places + at, at < count, other=0).to(tl.int64)
    column = tl.arange(0, width)[None, :]
    inside = (at < count)[:, None] & (column < columns)
    in_tiers = (place * stride + tl.where(place >= device_rows, offset, 0))[:, None] + first + column
    in_rows = at[:, None] * columns + column
    if writes:
        tl.store(device + in_tiers, tl.load(rows + in_rows, inside), inside)
    else:
        tl.store(rows + in_rows, tl.load(device + in_tiers, inside), inside)


@jit
def _exchange_rows_kernel(
    device, host, on_device, in_host, bounds, programs, elements: tl.constexpr, tile: tl.constexpr
) -> None:
    element = tl.arange(0, elements)[None, :]
    first = tl.load(bounds) + tl.program_id(0) * tile
    last = tl.load(bounds + 1)
    while first < last:
        at = first + tl.arange(0, tile)
        inside = at < last
        in_device = tl.load(on_device + at, inside, other=0).to(tl.int64)[:, None] * elements + element
        beside = tl.load(in_host + at, inside, other=0).to(tl.int64)[:, None] * elements + element
        incoming = tl.load(host + beside, inside[:, None])
        leaving = tl.load(device + in_device, inside[:, None])
        tl.debug_barrier()  # the threads that load an element may differ from those that store it
        tl.store(device + in_device, incoming, inside[:, None])
        tl.store(host + beside, leaving, inside[:, None])
        first += programs * tile
