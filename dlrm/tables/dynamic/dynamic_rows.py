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
from dlrm_bench.dlrm.tables.dynamic.memory import RowPlaces
from dlrm_bench.dlrm.tables.initial_weights import distribution, table_key
from dlrm_bench.dlrm.tables.row_numbers import RowNumbers
from dlrm_bench.dlrm.tables.tables import Tables
from dlrm_bench.kernels.embedding.initial_rows import RowsOfTables, initial_rows

COLUMNS = 4
"""Numbers of 32 bits that a saved row has beside weights and state, see `DynamicRows.entries`."""
NO_PLACE = 1 << 30
"""Number that ranks agree on in place of an excess where a new row has no place on any of them: above any excess."""


class DynamicRows:
    """The memory of one rank's rows. Its methods launch work and never wait for it; those under Entries do."""

    def __init__(
        self, numbers: RowNumbers, tables: Tables, seed: int, places: RowPlaces, memory: tuple[Tensor, Tensor]
    ) -> None:
        """numbers: of the rank's rows of `tables`; a row's is its id in the map. memory: fp32 weights, [R, columns],
        and optimizer state, [R, any], with R above `places`: the rows beyond all places are nobody's."""
        self.numbers, weights = numbers, memory[0]
        assert len(weights) == len(memory[1]) > places.count, "a row of weights and state for each place, and more"
        device = weights.device
        self.map = IdMap(places.count, places.evicts, device)
        self.weights, self.state = weights[: places.count], memory[1][: places.count]
        """fp32 [places, columns] and [places, any], the optimizer's: of row-wise Adagrad the sum of mean squared
        gradients, [places, 1]."""
        self._memory = memory
        scales, bounds = zip(*(distribution(tables.rows[table]) for table in numbers.tables), strict=True)
        self._of_tables = RowsOfTables(
            torch.tensor(numbers.first_rows, device=device),
            torch.tensor([table_key(seed, table) for table in numbers.tables], device=device),
            torch.tensor(scales, dtype=torch.float32, device=device),
            torch.tensor(bounds, dtype=torch.float32, device=device),
            numbers.part,
            numbers.parts,
        )

    @classmethod
    def in_parts(cls, tables: Tables, ranks: Ranks, seed: int, places: RowPlaces) -> "DynamicRows":
        """Returns the rows of a rank that owns every W-th row of each table, with row-wise Adagrad's state. ValueError
        where the tables have more rows than int32 counts."""
        memory = tuple(torch.zeros(places.count + 1, n, device=ranks.device) for n in (tables.columns, 1))
        return cls(RowNumbers.of_parts(tables, ranks), tables, seed, places, (memory[0], memory[1]))

    def place(self, numbers: Tensor, places: Tensor) -> Tensor:
        """places[n] = the place of row numbers[n], which is made where it is new; -1 of numbers below 0, and where no
        place is left. Returns what ranks agree on by Overflows, int32 [1]: NO_PLACE where a row has none, else -1.

        numbers, places: int32 [N], equal numbers next to each other.
        """
        weights, state = self._memory
        new, lacking = self.map.place(numbers, places)
        initial_rows(weights, new, numbers, self._of_tables)
        state.index_fill_(0, torch.where(new < 0, self.map.places, new).long(), 0.0)
        return torch.where(lacking > 0, NO_PLACE, -1).int()

    def check_places(self, agreed: int) -> None:
        """ValueError where the ranks have agreed on NO_PLACE for a batch."""
        if agreed >= NO_PLACE:
            raise ValueError(
                f"--dynamic-rows {self.map.places}: a batch names rows that are new, and a rank has no place left for "
                "them; give more places, use more GPUs, or let rows that were not named for long lose theirs "
                "(--evict-rows)"
            )

    def write_unnamed(self, numbers: Tensor, places: Tensor, out: Tensor, targets: Tensor) -> None:
        """out[targets[n]] = the weights with which row numbers[n] would be made, where places[n] is below 0 and
        numbers[n] is not. numbers, places, targets: int32 [N]; out: fp32, bf16 or fp16 [R, columns]."""
        initial_rows(out, torch.where((places < 0) & (numbers >= 0), targets, -1), numbers, self._of_tables)

    def place_unnamed(self, numbers: Tensor, places: Tensor) -> None:
        """Gives the rows that nobody has named places to read their weights from, until the next call: rows of the
        memory beyond all places, of which there are as many as `numbers` or more.

        numbers: int32 [N], 0 or more. places: int32 [N], of which those below 0 are written.
        """
        beyond = torch.arange(len(numbers), dtype=torch.int32, device=numbers.device) + self.map.places
        self.write_unnamed(numbers, places, self._memory[0], beyond)
        places.copy_(torch.where(places < 0, beyond, places))

    @contextmanager
    def unchanged(self, numbers: Tensor) -> Iterator[None]:
        """Restores all rows bit for bit after training inside on no other rows than `numbers`, int32 [N] of any device,
        which have places even where all are taken. What trains has ended when it ends."""
        kept = [tensor.clone() for tensor in self.map.memory()]
        rows = slice(0, len(numbers))  # those of the places that an empty map gives out
        weights, state = self.weights[rows].clone(), self.state[rows].clone()
        self.map.load(Entries(self._of_tables.first_rows[:0], torch.zeros(0, dtype=torch.int32, device=weights.device)))
        yield
        for tensor, copy in zip(self.map.memory(), kept, strict=True):
            tensor.copy_(copy)
        self.weights[rows], self.state[rows] = weights, state

    # Entries: these wait for the device

    def entries(self) -> Tensor:
        """Returns what places 0 .. n - 1 hold; the others hold nothing: int32 [n, COLUMNS], of each the lower and the
        upper half of the id in its table, the table, and the batch that last named it."""
        held, of = self.map.entries(), self.numbers
        nth = torch.searchsorted(self._of_tables.first_rows, held.ids, right=True) - 1
        ids = of.part + (held.ids - self._of_tables.first_rows[nth]) * of.parts
        out = torch.empty(len(ids), COLUMNS, dtype=torch.int32, device=ids.device)
        out[:, :2] = ids.view(torch.int32).view(-1, 2)
        out[:, 2], out[:, 3] = torch.tensor(of.tables, dtype=torch.int32, device=ids.device)[nth], held.last
        return out

    def choose(self, entries: Tensor) -> Tensor:
        """Returns which of all ranks' saved rows become those of places 0, 1, ... here, int64 [n], ascending; the map
        then holds them. Their weights and states are the caller's to write.

        entries: int32 [N, COLUMNS] on the host, of `entries` of all ranks, of any number. ValueError where there are
        more than places.
        """
        of = self.numbers
        ids, table = entries[:, :2].contiguous().view(torch.int64).view(-1), entries[:, 2].contiguous()
        own = (ids % of.parts == of.part) & torch.isin(table, torch.tensor(of.tables, dtype=torch.int32))
        rows = own.nonzero().flatten()
        if len(rows) > len(self.weights):
            raise ValueError(
                f"--dynamic-rows is {len(self.weights)}, and of the saved rows {len(rows)} are this rank's: give as "
                "many, or use more GPUs"
            )
        firsts = torch.zeros(max(of.tables) + 1, dtype=torch.int64)
        firsts[list(of.tables)] = torch.tensor(of.first_rows)
        numbers = firsts[table[rows].long()] + ids[rows] // of.parts
        device = self.weights.device
        self.map.load(Entries(numbers.to(device), entries[rows, 3].to(device)))
        return rows
