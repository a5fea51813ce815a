"""The rows of all tables that one rank owns and that some batch has named: memory for a fixed number of them.

A row is made when its id is first named, with the weights that it would have in a table of full size, and state 0. So a
training is, to the bit, that of tables in full, as long as no row loses its place. What nobody has named takes no
memory: an evaluation reads the weights with which such a row would be made.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.dlrm.tables.dynamic.id_map import Entries, IdMap
from dlrm_bench.dlrm.tables.initial_weights import distribution, table_key
from dlrm_bench.dlrm.tables.sequence.owned_rows import RowNumbers
from dlrm_bench.dlrm.tables.tables import Tables
from dlrm_bench.kernels.embedding.initial_rows import RowsOfTables, initial_rows

COLUMNS = 4
"""Numbers of 32 bits that a saved row has beside weights and state, see `DynamicRows.entries`."""


class DynamicRows:
    """The memory of one rank's rows. Its methods launch work and never wait for it, but for those under Entries."""

    def __init__(self, tables: Tables, ranks: Ranks, seed: int, places: int, evicts: bool) -> None:
        """places: rows that there is memory for. evicts: whether rows lose their places to new ones. ValueError where
        the tables have more rows than int32 counts."""
        self._part, self._parts, device = ranks.rank, ranks.world_size, ranks.device
        numbers = RowNumbers(tables, ranks)
        self.count, self.first_rows = numbers.count, numbers.first_rows
        """Numbers as in RowNumbers; a row's is its id in the map."""
        self.map = IdMap(places, evicts, device)
        self.weights = torch.zeros(places, tables.columns, device=device)
        """fp32 [places, columns]."""
        self._state = torch.zeros(places + 1, 1, device=device)  # the last is nobody's
        self.state = self._state[:places]
        """fp32 [places, 1]: row-wise Adagrad's sum of mean squared gradients."""
        scales, bounds = zip(*map(distribution, tables.rows), strict=True)
        self._of_tables = RowsOfTables(
            torch.tensor(self.first_rows, device=device),
            torch.tensor([table_key(seed, table) for table in range(tables.count)], device=device),
            torch.tensor(scales, dtype=torch.float32, device=device),
            torch.tensor(bounds, dtype=torch.float32, device=device),
            self._part,
            self._parts,
        )

    def place(self, numbers: Tensor, places: Tensor) -> Tensor:
        """places[n] = the place of row numbers[n], which is made where it is new; -1 of numbers below 0, and where no
        place is left. Returns how many distinct rows have none, int64 [1].

        numbers, places: int32 [N], equal numbers next to each other.
        """
        new, lacking = self.map.place(numbers, places)
        initial_rows(self.weights, new, numbers, self._of_tables)
        self._state.index_fill_(0, torch.where(new < 0, len(self.weights), new).long(), 0.0)
        return lacking

    def write_unnamed(self, numbers: Tensor, places: Tensor, out: Tensor, targets: Tensor) -> None:
        """out[targets[n]] = the weights with which row numbers[n] would be made, where places[n] is below 0 and
        numbers[n] is not. numbers, places, targets: int32 [N]; out: fp32, bf16 or fp16 [R, columns]."""
        initial_rows(out, torch.where((places < 0) & (numbers >= 0), targets, -1), numbers, self._of_tables)

    @contextmanager
    def unchanged(self, numbers: Tensor) -> Iterator[None]:
        """Restores all rows bit for bit after training inside on no other rows than `numbers`, int32 [N]. What trains
        has ended when it ends."""
        places = torch.empty_like(numbers)
        self.map.find(numbers, places)
        known = places[places >= 0].long()
        kept = [tensor.clone() for tensor in self.map.memory()]
        rows = self.weights[known], self.state[known]
        yield
        for tensor, copy in zip(self.map.memory(), kept, strict=True):
            tensor.copy_(copy)
        self.weights[known], self.state[known] = rows

    # Entries: these wait for the device

    def entries(self) -> Tensor:
        """Returns what places 0 .. n - 1 hold; the others hold nothing: int32 [n, COLUMNS], of each the lower and the
        upper half of the id in its table, the table, and the batch that last named it."""
        held = self.map.entries()
        table = torch.searchsorted(self._of_tables.first_rows, held.ids, right=True) - 1
        ids = self._part + (held.ids - self._of_tables.first_rows[table]) * self._parts
        out = torch.empty(len(ids), COLUMNS, dtype=torch.int32, device=ids.device)
        out[:, :2] = ids.view(torch.int32).view(-1, 2)
        out[:, 2], out[:, 3] = table, held.last
        return out

    def choose(self, entries: Tensor) -> Tensor:
        """Returns which of all ranks' saved rows become those of places 0, 1, ... here, int64 [n], ascending; the map
        then holds them. Their weights and states are the caller's to write.

        entries: int32 [N, COLUMNS] on the host, of `entries` of all ranks, of any number. ValueError where there are
        more than places.
        """
        ids = entries[:, :2].contiguous().view(torch.int64).view(-1)
        rows = (ids % self._parts == self._part).nonzero().flatten()
        if len(rows) > len(self.weights):
            raise ValueError(
                f"--dynamic-rows is {len(self.weights)}, and of the saved rows {len(rows)} are this rank's: give as "
                "many, or use more GPUs"
            )
        numbers = torch.tensor(self.first_rows)[entries[rows, 2].long()] + ids[rows] // self._parts
        device = self.weights.device
        self.map.load(Entries(numbers.to(device), entries[rows, 3].to(device)))
        return rows
