"""The rows of a rank's tables in two tiers of memory, each row at its place."""

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from dlrm_bench.dlrm.runtime.host_memory import free_memory_bytes
from dlrm_bench.dlrm.tables.tiers.host_memory import host_zeros
from dlrm_bench.dlrm.tables.tiers.placement import Placement, Pool, pieces
from dlrm_bench.kernels.embedding._placement_state import Moves
from dlrm_bench.kernels.embedding.tiered_rows import Tiers, copy_rows, exchange_rows

_PIECE_ELEMENTS = 1 << 24  # elements copied at a time, in row order


def check_host_memory(needed: int) -> None:
    """Raises ValueError, on every rank, unless each node has host memory for the rows of its ranks together: the kernel
    would promise more to each of them, and kill one when pages are written. Comes before any of them allocates its own.
    Collective.

    needed: bytes, of all ranks of this node.
    """
    free = free_memory_bytes()
    words = f"its node's ranks need {needed / 1e9:.1f} GB of host memory, but {free / 1e9:.1f} GB are free"
    _raise_on_all_ranks(words if needed > free else None)


class TieredRows:
    """Weights and state of R rows, of which the device holds P.

    `bring` moves a batch's rows to the device as far as possible while the previous batch trains, `bring_late` the rest
    after the previous batch's last update. Both change no row that the previous batch names, nor its place; so that
    batch's lookup and update may overlap with `bring`.
    """

    def __init__(
        self, pools: Sequence[Pool], columns: int, device: torch.device, expected: NDArray[np.float32]
    ) -> None:
        """pools, expected: as for Placement. Collective. ValueError, on every rank, if any cannot allocate the
        memory."""
        memory, error = None, None
        try:
            self.placement = Placement(pools, device, expected)
            host = host_zeros(self.placement.host_rows, columns, device)
            memory = Tiers(torch.zeros(self.placement.device_rows, 2, columns, device=device), host)
        except (OSError, torch.OutOfMemoryError) as caught:
            error = str(caught).splitlines()[0]
        _raise_on_all_ranks(error)
        assert memory is not None
        self.memory = memory
        self._moves: Sequence[Moves] | None = None

    def bring(self, rows: Tensor) -> None:
        """Assigns places to the rows of a batch, and moves those that the previous batch does not name. rows: as for
        Placement.plan."""
        self._moves = self.placement.plan(rows)
        for moves in self._moves:
            exchange_rows(self.memory, moves.device, moves.host, moves.early)

    def bring_late(self) -> None:
        """Moves the rows that the previous batch names too, after its update."""
        assert self._moves is not None, "after `bring`"
        for moves in self._moves:
            exchange_rows(self.memory, moves.device, moves.host, moves.late)

    def of_table(self, first: int, rows: int) -> tuple["StoredRows", "StoredRows"]:
        """Returns weights and state of `rows` rows from `first` on."""
        columns = range(self.memory.device.shape[2])
        weights, state = (StoredRows(self, which, range(first, first + rows), columns) for which in (0, 1))
        return weights, state

    def describe(self) -> dict[str, int | float]:
        """Returns rows and gigabytes (10^9 bytes) of each tier, the rows that stay in host memory whatever names them,
        and Placement.COUNTED over all batches so far. Waits for the device."""
        device, host = self.memory
        return {
            "device_rows": len(device),
            "host_rows": len(host),
            "fixed_host_rows": self.placement.fixed_host_rows,
            "device_gb": float(f"{device.nbytes / 1e9:.4g}"),
            "host_gb": float(f"{host.nbytes / 1e9:.4g}"),
            **dict(zip(Placement.COUNTED, self.placement.state.counters.tolist(), strict=True)),
        }


class StoredRows:
    """A matrix of weights or state with rows in two tiers: the subset of Tensor's interface that checkpoints need.

    Slices are matrices over the same memory. No rows may move while it is read or written.
    """

    dtype = torch.float32

    def __init__(self, rows: TieredRows, which: int, of_rows: range, columns: range) -> None:
        """which: 0 for weights, 1 for state."""
        assert columns.step == 1, "adjacent columns"
        self._rows, self._which, self._of_rows, self._columns = rows, which, of_rows, columns

    @property
    def device(self) -> torch.device:
        """The device of the tensors that it returns and accepts."""
        return self._rows.memory.device.device

    @property
    def shape(self) -> torch.Size:
        """[rows, columns]."""
        return torch.Size((len(self._of_rows), len(self._columns)))

    def detach(self) -> "StoredRows":
        """Returns itself: there is no gradient."""
        return self

    def numel(self) -> int:
        """Returns the number of elements."""
        return self.shape.numel()

    def __getitem__(self, index: slice | tuple[slice, ...]) -> "StoredRows":
        rows, columns = (*index, slice(None))[:2] if isinstance(index, tuple) else (index, slice(None))
        return StoredRows(self._rows, self._which, self._of_rows[rows], self._columns[columns])

    def clone(self) -> Tensor:
        """Returns its values, fp32 [rows, columns], on the device."""
        values = torch.empty(self.shape, device=self.device)
        self._copy(values, writes=False)
        return values

    def copy_(self, values: Tensor, non_blocking: bool = False) -> None:
        """Writes values, [rows, columns], from any memory."""
        self._copy(values.to(self.device, self.dtype, non_blocking=non_blocking).contiguous(), writes=True)

    def _copy(self, values: Tensor, writes: bool) -> None:
        of_rows = self._of_rows
        places = self._rows.placement.place[: of_rows.stop][of_rows.start :: of_rows.step].contiguous()
        copy_rows(self._rows.memory, places, self._which, self._columns.start, values, writes)

    def pieces(self, elements: int = _PIECE_ELEMENTS) -> "list[tuple[slice, StoredRows]]":
        """Returns the matrix in pieces of at most `elements` elements, each with its rows."""
        size = max(1, elements // max(1, len(self._columns)))
        return [(rows, self[rows]) for rows in pieces(range(len(self._of_rows)), size)]


def _raise_on_all_ranks(error: str | None) -> None:
    errors: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    for rank, of_rank in enumerate(errors):
        if of_rank is not None:
            raise ValueError(
                f"--table-memory: rank {rank}: {of_rank}; give another share, more GPUs, or a host with more memory"
            )
