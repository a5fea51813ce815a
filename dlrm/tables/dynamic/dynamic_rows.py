"""One rank's rows that some batch has named, of all tables: memory for a fixed number of rows.

A row is made when a batch first names its id, with the initial weights of a full table and state 0. So training is
bit-identical to training with full tables, as long as no row loses its place. Unnamed rows take no memory: an
evaluation reads the weights with which such a row would be made. Ids are row numbers of tables of declared sizes, or
raw: any int64.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.dlrm.tables.dynamic.id_map import Entries, IdMap, chunks
from dlrm_bench.dlrm.tables.dynamic.memory import RowPlaces
from dlrm_bench.dlrm.tables.initial_weights import distribution, table_key
from dlrm_bench.dlrm.tables.row_numbers import RawIds, RowNumbers
from dlrm_bench.dlrm.tables.tables import Tables
from dlrm_bench.kernels.embedding.id_map import Keys
from dlrm_bench.kernels.embedding.initial_rows import RowsOfTables, initial_rows, table_of

COLUMNS = 4
"""Number of int32 values saved with each row beside weights and state, see `DynamicRows.entries`."""
NO_TABLE = -1
"""Value in place of a table, saved with places that have no row."""
NO_PLACE = 1 << 30
"""Value above any excess of a list: ranks agree on it plus the largest number of new rows that a rank has no place for,
if there are any."""


class DynamicRows:
    """The memory of one rank's rows. Its methods launch work and never wait for it; those under Entries do."""

    def __init__(
        self, numbers: RowNumbers | RawIds, tables: Tables, seed: int, places: RowPlaces, memory: tuple[Tensor, Tensor]
    ) -> None:
        """numbers: determine the keys of the rank's rows of `tables` in the map. memory: fp32 weights, [R, columns],
        and optimizer state, [R, any], with R above `places`: no row owns the memory beyond all places."""
        self.numbers, weights, self._raw_ids = numbers, memory[0], isinstance(numbers, RawIds)
        assert self._raw_ids == tables.raw_ids, "numbers of these tables"
        assert len(weights) == len(memory[1]) > places.count, "a row of weights and state for each place, and more"
        device = weights.device
        self.map = IdMap(places.count, places.evicts, device, self._raw_ids)
        self.weights, self.state = weights[: places.count], memory[1][: places.count]
        """fp32 [places, columns] and [places, any], the optimizer's: of row-wise Adagrad the sum of mean squared
        gradients, [places, 1]."""
        self._memory, self._table_rows = memory, tables.rows
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

    def place(self, keys: Keys, places: Tensor) -> Tensor:
        """Writes to places[n] the place of row keys[n], making the row if it is new; -1 for what is no key, and if no
        place is left. Returns the value for Overflows, int32 [1]: NO_PLACE plus the number of rows without a place, or
        -1 if there are none.

        keys: N, of this rank's rows, in any order; places: int32 [N].
        """
        assert 2 * len(places) < NO_PLACE, "NO_PLACE plus the number of rows without a place is an int32"
        weights, state = self._memory
        new, lacking = self.map.place(keys, places)
        initial_rows(weights, new, keys, self._of_tables, zeros=state)
        return torch.where(lacking > 0, lacking + NO_PLACE, -1).int()

    def check_places(self, agreed: int) -> None:
        """ValueError, with the number of places that a batch needs, if the ranks have agreed that it lacks some.

        agreed: the maximum of what `place` returned on all ranks; an excess of a list, or -1, if no rank lacks places.
        """
        if agreed < NO_PLACE:
            return
        lacking = agreed - NO_PLACE
        enough = f"choose at least {self.map.places + lacking} for this batch, and more for later ones"
        fix = f"{enough}, use more GPUs, or replace rows that were not named for long (add --evict-rows)"
        if self.map.most_evicted:
            fix = (
                f"--evict-rows frees at most {self.map.most_evicted} places with a batch, and none of rows that it or "
                f"the batch before names: {enough}, use more GPUs, or smaller batches"
            )
        raise ValueError(
            f"--dynamic-rows {self.map.places}: a batch names new rows, and a rank has no place left for {lacking} of "
            f"them; {fix}"
        )

    def write_unnamed(self, keys: Keys, places: Tensor, out: Tensor, targets: Tensor) -> None:
        """out[targets[n]] = the weights with which row keys[n] would be made, where places[n] is below 0 and keys[n] is
        a key. keys: N; places, targets: int32 [N]; out: fp32, bf16 or fp16 [R, columns]."""
        initial_rows(out, torch.where((places < 0) & keys.valid, targets, -1), keys, self._of_tables)

    def place_unnamed(self, keys: Keys, places: Tensor) -> None:
        """Assigns temporary places to unnamed rows, to read their weights from until the next call: rows of the memory
        beyond all places, of which there are at least as many as keys.

        keys: N, all valid. places: int32 [N]; entries below 0 are overwritten.
        """
        beyond = torch.arange(len(places), dtype=torch.int32, device=places.device) + self.map.places
        self.write_unnamed(keys, places, self._memory[0], beyond)
        places.copy_(torch.where(places < 0, beyond, places))

    @contextmanager
    def unchanged(self, rows: int) -> Iterator[None]:
        """Restores all rows bit for bit after the body, which trains on at most `rows` rows of each table; these have
        places even if all places are taken. The body ends after its training has ended."""
        kept = [tensor.to("cpu", copy=True) for tensor in self.map.memory()]  # a device may have no room for it twice
        used = slice(0, rows * len(self.numbers.tables))  # the places that an empty map gives out first
        weights, state = self.weights[used].clone(), self.state[used].clone()
        nobody = torch.zeros(0, dtype=torch.int32)
        self.map.load(Entries(self._keys(nobody.long(), nobody), nobody))
        yield
        for tensor, copy in zip(self.map.memory(), kept, strict=True):
            tensor.copy_(copy)
        self.weights[used], self.state[used] = weights, state

    def _keys(self, numbers: Tensor, nth: Tensor) -> Keys:
        """Returns the keys of rows in the map. numbers: int64 [N], of rows; nth: integers [N], the places of their
        tables in `numbers.tables`."""
        return Keys(numbers, nth.int() if self._raw_ids else None)

    # Entries: these wait for the device

    def entries(self) -> Tensor:
        """Returns the content of all places, int32 [places, COLUMNS]: for each place the lower and upper half of the id
        in its table, the table, and the last batch that named the row. Those with a row come first; the table of the
        others is NO_TABLE."""
        of, first_rows = self.numbers, self._of_tables.first_rows
        tables = torch.tensor(of.tables, dtype=torch.int32, device=first_rows.device)
        out = torch.full((self.map.places, COLUMNS), NO_TABLE, dtype=torch.int32, device=first_rows.device)
        for some in chunks(self.map.used):
            held = self.map.entries(some)
            nth = table_of(held.keys, first_rows)
            ids = of.part + (held.keys.ids - first_rows[nth]) * of.parts
            out[some, :2] = ids.view(torch.int32).view(-1, 2)
            out[some, 2], out[some, 3] = tables[nth], held.last
        return out

    def choose(self, entries: Tensor) -> Tensor:
        """Returns the indices of the saved rows that this rank owns, int64 [n], ascending, and loads them into the map
        at places 0, 1, ... The caller writes their weights and states.

        entries: int32 [N, COLUMNS] on the host, from `entries` of all ranks of any number of ranks. ValueError if this
        rank owns more rows than it has places, or for ids outside their tables.
        """
        of = self.numbers
        ids, table = entries[:, :2].contiguous().view(torch.int64).view(-1), entries[:, 2].contiguous()
        own = (ids % of.parts == of.part) & torch.isin(table, torch.tensor(of.tables, dtype=torch.int32))
        rows = own.nonzero().flatten()
        outside = (ids[rows] < 0) | (ids[rows] >= torch.tensor(self._table_rows)[table[rows].long()])
        if not self._raw_ids and outside.any():
            raise ValueError(
                f"saved id {int(ids[rows][outside][0])} is outside its table: ids of the saved run were raw; resume "
                "with --model.raw-ids"
            )
        if len(rows) > len(self.weights):
            raise ValueError(
                f"--dynamic-rows is {len(self.weights)}, and this rank owns {len(rows)} of the saved rows: choose at "
                "least that number, or use more GPUs"
            )
        nth_of = torch.zeros(len(self._table_rows), dtype=torch.int64)
        nth_of[list(of.tables)] = torch.arange(len(of.tables))
        nth = nth_of[table[rows].long()]
        numbers = torch.tensor(of.first_rows)[nth] + ids[rows] // of.parts
        self.map.load(Entries(self._keys(numbers, nth), entries[rows, 3]))
        return rows
