"""A user's constraints on the placement of single tables, like TorchRec's ParameterConstraints: the words of the flag
`--constraints`.

A word is TABLES=WISH[,WISH]. TABLES are numbers, ranges of numbers or names of tables, separated by commas. A WISH is a
sharding type (table-wise, column-wise, column-wise:COLUMNS, row-wise or data-parallel), or hbm:SHARE, the share of the
rows in device memory:

    --constraints 0,9=column-wise:64 20-21=table-wise,hbm:0.2
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, get_args

from dlrm_bench.dlrm.tables.tables import Tables

FLAG = "--constraints"
ShardingKind = Literal["table-wise", "column-wise", "row-wise", "data-parallel"]
KINDS: tuple[ShardingKind, ...] = get_args(ShardingKind)
_FORM = f"write {FLAG} 0,9=column-wise:64 20=table-wise"


@dataclass(frozen=True, slots=True, kw_only=True)
class TableConstraint:
    """The constraints on one table; None leaves the choice to the planner."""

    kind: ShardingKind | None = None
    """table-wise: whole on one rank. column-wise: all rows, in shards of fewer columns. row-wise: all columns, the rows
    spread over all ranks. data-parallel: whole on every rank."""
    columns: int | None = None
    """Columns of each shard of a column-wise table."""
    device_share: float | None = None
    """Share of the rows that device memory holds; host memory holds the others."""

    def __str__(self) -> str:
        """Returns the constraints in the flag's syntax."""
        kind = f"{self.kind}:{self.columns}" if self.columns else self.kind
        share = None if self.device_share is None else f"hbm:{self.device_share:g}"
        return ",".join(filter(None, (kind, share)))


Constraints = Mapping[int, TableConstraint]
"""The constraints by table number."""
NO_CONSTRAINTS: Constraints = MappingProxyType({})


def parse_constraints(words: Sequence[str], tables: Tables) -> Constraints:
    """Returns the constraints that these words describe. ValueError names a malformed word, a table that is constrained
    twice, or columns that do not divide a table's, and rejects constraints on tables that are not pooled."""
    constraints: dict[int, TableConstraint] = {}
    for word in words:
        named, equals, wishes = word.partition("=")
        if not (named and equals and wishes):
            raise ValueError(f"{FLAG} {word} is not TABLES=SHARDING: {_FORM}")
        constraint = _wishes(word, wishes.split(","), tables.columns)
        for table in _tables(word, named.split(","), tables):
            if table in constraints:
                raise ValueError(f"{FLAG} {word}: {tables.names[table]} is already constrained: name it once")
            constraints[table] = constraint
    if constraints and not tables.pooled:
        raise ValueError(f"{FLAG}: every pipeline splits the tables of this model by rows over all ranks; leave it out")
    return dict(sorted(constraints.items()))


def described(constraints: Constraints, tables: Tables) -> str:
    """Returns the constraints in the flag's syntax, one word per distinct constraint, with its tables."""
    of_wish: dict[str, list[str]] = {}
    for table, constraint in constraints.items():
        of_wish.setdefault(str(constraint), []).append(tables.names[table])
    return " ".join(f"{','.join(names)}={wish}" for wish, names in of_wish.items())


def _tables(word: str, names: Sequence[str], tables: Tables) -> list[int]:
    """Returns the numbers of the tables that a word names."""
    numbers: list[int] = []
    for name in names:
        if name in tables.names:
            numbers.append(tables.names.index(name))
            continue
        digits = re.fullmatch(r"(\d+)(?:-(\d+))?", name)
        first, last = (int(digits[1]), int(digits[2] or digits[1])) if digits else (0, -1)
        if not first <= last < tables.count:
            raise ValueError(
                f"{FLAG} {word}: there is no table {name}: tables are 0 to {tables.count - 1}, or "
                f"{tables.names[0]} to {tables.names[-1]}"
            )
        numbers += range(first, last + 1)
    return numbers


def _wishes(word: str, wishes: Sequence[str], columns: int) -> TableConstraint:
    """Returns the constraint on the right side of a word, for tables with this number of columns."""
    kind: ShardingKind | None = None
    narrow: int | None = None
    share: float | None = None
    for wish in wishes:
        name, colon, value = wish.partition(":")
        if name == "hbm" and share is None:
            share = _share(word, value)
        elif name in KINDS and kind is None and (name == "column-wise" or not colon):
            kind = name
            narrow = _columns(word, value, columns) if colon else None
        elif name in KINDS and kind is None:
            raise ValueError(f"{FLAG} {word}: {name} takes no number, only column-wise:COLUMNS does")
        elif name == "hbm" or name in KINDS:
            raise ValueError(f"{FLAG} {word}: give each table one sharding type and one hbm:SHARE: leave {wish} out")
        else:
            raise ValueError(f"{FLAG} {word}: {wish!r} is none of {', '.join(KINDS)} and hbm:SHARE: {_FORM}")
    if kind == "data-parallel" and share is not None:
        raise ValueError(f"{FLAG} {word}: a data-parallel table is in device memory: leave hbm:{share:g} out")
    return TableConstraint(kind=kind, columns=narrow, device_share=share)


def _share(word: str, value: str) -> float:
    share = float(value) if re.fullmatch(r"\d*\.?\d+|\d+\.", value) else -1.0
    if not 0 <= share <= 1:
        raise ValueError(f"{FLAG} {word}: hbm:{value} is not a share of a table's rows: choose 0 to 1")
    return share


def _columns(word: str, value: str, columns: int) -> int:
    narrow = int(value) if value.isdecimal() else 0
    if not (0 < narrow < columns and columns % narrow == 0 and narrow % 4 == 0):
        raise ValueError(
            f"{FLAG} {word}: column-wise:{value} cannot split tables of {columns} columns: choose a multiple of 4 "
            f"that divides {columns}"
        )
    return narrow
