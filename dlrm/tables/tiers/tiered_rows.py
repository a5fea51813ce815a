"""The rows of a rank's tables in two tiers of memory, each row at its place."""

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from dlrm_bench.dlrm.tables.tiers.host_memory import host_zeros
from dlrm_bench.dlrm.tables.tiers.placement import Placement, PlacementSizes, pieces
from dlrm_bench.kernels.embedding._placement_state import Moves
from dlrm_bench.kernels.embedding.tiered_rows import Tiers, copy_rows, exchange_rows

_PIECE_ELEMENTS = 1 << 24  # of rows that are copied in the order of the rows


class TieredRows:
    """Weights and state of R rows, of which the device holds P.

    A batch's rows come to the device by `bring`, as far as they may while the batch before trains, and by `bring_late`
    once that has changed its rows for the last time. Both change no row that the batch before names, nor the place of
    one; so lookup and update of it may run beside `bring`.
    """

    def __init__(
        self,
        sizes: PlacementSizes,
        columns: int,
        device: torch.device,
        expected: NDArray[np.float32],
    ) -> None:
        """expected: as Placement takes it. Collective. ValueError, on every rank, where any cannot have the memory."""
        memory, error = None, None
        try:
            host = host_zeros(sizes.rows - sizes.device_rows, columns, device)
            memory = Tiers(torch.zeros(sizes.device_rows, 2, columns, device=device), host)
        except (OSError, torch.OutOfMemoryError) as caught:
            error = str(caught).splitlines()[0]
        _raise_on_all_ranks(error)
        assert memory is not None
        self.memory = memory
        self.placement = Placement(sizes, device, expected)
        self._moves: Moves | None = None

    def bring(self, rows: Tensor) -> None:
        """Gives the rows of a batch their places, and brings those that the batch before does not name. rows: as
        Placement.plan takes them."""
        self._moves = self.placement.plan(rows)
        exchange_rows(self.memory, self._moves.device, self._moves.host, self._moves.early)

    def bring_late(self) -> None:
        """Brings the rows that the batch before names too, after its update."""
        assert self._moves is not None, "after `bring`"
        exchange_rows(self.memory, self._moves.device, self._moves.host, self._moves.late)

    def of_table(self, first: int, rows: int) -> tuple["StoredRows", "StoredRows"]:
        """Returns weights and state of `rows` rows from `first` on."""
        columns = range(self.memory.device.shape[2])
        weights, state = (StoredRows(self, which, range(first, first + rows), columns) for which in (0, 1))
        return weights, state

    def describe(self) -> dict[str, int | float]:
        """Returns rows and gigabytes (10^9 bytes) of each tier, and of all batches so far what Placement.counters has.
        Waits for the device."""
        device, host = self.memory
        return {
            "device_rows": len(device),
            "host_rows": len(host),
            "device_gb": float(f"{device.nbytes / 1e9:.4g}"),
            "host_gb": float(f"{host.nbytes / 1e9:.4g}"),
            **dict(zip(Placement.COUNTED, self.placement.state.counters.tolist(), strict=True)),
        }


class StoredRows:
    """A matrix of weights or state, whose rows are in two tiers: as much of a Tensor as checkpoints need.

    Slices are matrices over the same memory. Nothing may move rows while one is read or written.
    """

    dtype = torch.float32

    def __init__(self, rows: TieredRows, which: int, of_rows: range, columns: range) -> None:
        """which: 0 of weights, 1 of state."""
        assert columns.step == 1, "adjacent columns"
        self._rows, self._which, self._of_rows, self._columns = rows, which, of_rows, columns

    @property
    def device(self) -> torch.device:
        """The device of the tensors that it reads and takes."""
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
        """Returns the matrix in pieces of at most so many elements, each with its rows."""
        size = max(1, elements // max(1, len(self._columns)))
        return [(rows, self[rows]) for rows in pieces(len(self._of_rows), size)]


def _raise_on_all_ranks(error: str | None) -> None:
    errors: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    for rank, of_rank in enumerate(errors):
        if of_rank is not None:
            raise ValueError(
                f"--table-memory: rank {rank}: {of_rank}; give another share, or use more GPUs or a host of more memory"
            )
