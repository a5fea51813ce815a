"""Counts the rows of each table that training names, and the memory of these rows: dlrm-bench data rows --preset
mlperf-dlrmv4 DIR

Samples of the first windows are read for a quarter of all users, for half of them, then for all. The number of named
rows grows by a power of the number of users; the last doubling determines the power, which extrapolates the number of
rows to --samples of the same windows. For a hashed table, the number of distinct keys grows that way, and n keys fall
into R * (1 - exp(-n / R)) of its R rows.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro
from numpy.typing import NDArray

from dlrm_bench.dlrm.dlrmv4.config import CONTEXT_TABLES, EVENT_TABLES, ModelConfig
from dlrm_bench.dlrm.dlrmv4.data.builder import BatchBuilder
from dlrm_bench.dlrm.dlrmv4.data.cache import Cache, find_cache
from dlrm_bench.dlrm.dlrmv4.data.item_maps import ItemMaps
from dlrm_bench.dlrm.dlrmv4.data.limits import Rows
from dlrm_bench.dlrm.dlrmv4.data.packed import CANDIDATE, CONTEXT_ROWS, Packed
from dlrm_bench.dlrm.dlrmv4.data.windows import WindowIndex
from dlrm_bench.dlrm.runtime.command_line import exit_status
from dlrm_bench.dlrm.runtime.parsed import options_of
from dlrm_bench.dlrm.tables.dynamic.memory import bytes_of

_GROUPS = 4
_BATCH = 4096
_OF_IDS = len(EVENT_TABLES) + 1
"""Tables whose rows are ids as they are; the others' are hashes."""


@dataclass(kw_only=True, slots=True, frozen=True)
class NamedRowsConfig:
    """Data whose rows are counted, and the training that they are extrapolated to."""

    directory: Annotated[Path, tyro.conf.Positional]
    """Folder of data."""
    windows: int = 75
    """Number of first windows, of one day each: MLPerf's runs reach their target within about 75."""
    samples: float = 70e6
    """Number of samples to extrapolate to: with MLPerf's data, the samples until the target."""
    world_size: int = 8
    """Number of ranks over which the rows are distributed."""

    def __post_init__(self) -> None:
        for flag in ("windows", "samples", "world_size"):
            if not getattr(self, flag) > 0:
                raise ValueError(f"--{flag.replace('_', '-')} is {getattr(self, flag)}: choose more than 0")


@dataclass(frozen=True, slots=True)
class NamedRows:
    """Numbers of rows after some samples."""

    samples: int
    rows: tuple[int, ...]
    """Number of each table's."""


def count_rows(config: NamedRowsConfig, model: ModelConfig) -> list[NamedRows]:
    """Returns the rows that samples of a quarter, half and all of the users name, of the first windows; ValueError if
    there are fewer to train on."""
    cache = Cache.open(find_cache(config.directory))
    index, rows = WindowIndex.open(cache), Rows(*model.rows)
    windows = len(index) - 1  # the last one evaluates
    if config.windows > windows:
        raise ValueError(
            f"--windows is {config.windows}, and {config.directory} has only {windows} windows to train on: "
            + (f"add --windows {windows}" if windows else "choose data of more days")
        )
    maps = ItemMaps.open(config.directory, rows)
    builder = BatchBuilder(cache, maps, rows)
    named = [np.zeros(count, dtype=np.bool_) for count in model.rows]
    found, samples = [], 0
    for group in range(_GROUPS):
        for window in range(config.windows):
            anchors = index.select(window, np.arange(index.anchors_of(window)))
            of_group = anchors[cache.uid[cache.positions[anchors]] % _GROUPS == group]
            for first in range(0, len(of_group), _BATCH):
                _name(builder.build(of_group[first : first + _BATCH]), maps, named)
            samples += len(of_group)
        if group + 1 in (_GROUPS // 4, _GROUPS // 2, _GROUPS):
            found.append(NamedRows(samples, tuple(int(of.sum()) for of in named)))
    return found


def _name(packed: Packed, maps: ItemMaps, named: list[NDArray[np.bool_]]) -> None:
    """Marks the rows that a batch names: of all its events, as the static pipeline looks them up."""
    table = packed.samples.numpy()
    items = np.unique(np.concatenate([packed.item.numpy(), table[CANDIDATE]]))
    for number, of in enumerate((items, maps.artist[items], maps.album[items])):
        named[number][of] = True
    for number in range(len(CONTEXT_TABLES)):
        named[len(EVENT_TABLES) + number][table[CONTEXT_ROWS + number]] = True


def extrapolated(half: NamedRows, whole: NamedRows, samples: float, model: ModelConfig) -> NamedRows:
    """Returns the rows at a number of samples, by the growth from half of the users to all. ValueError where one half
    has no samples."""
    if not 0 < half.samples < whole.samples:
        raise ValueError(
            f"half of the users have {half.samples} of {whole.samples} samples: too few users to extrapolate from: "
            "raise --windows, or choose data of more users"
        )
    doubling, growth = whole.samples / half.samples, samples / whole.samples
    found = []
    for table, (few, many, rows) in enumerate(zip(half.rows, whole.rows, model.rows, strict=True)):
        hashed = table >= _OF_IDS
        a, b = (_keys(count, rows) if hashed else count for count in (few, many))
        power = min(1.0, math.log(b / a) / math.log(doubling)) if a else 1.0
        keys = b * growth**power
        found.append(min(rows, round(-rows * math.expm1(-keys / rows) if hashed else keys)))
    return NamedRows(round(samples), tuple(found))


def _keys(named: int, rows: int) -> float:
    """Returns the number of keys whose hashes name so many of a table's rows."""
    return -rows * math.log1p(-min(named, rows - 0.5) / rows)


def main(args: Sequence[str] | None, model: ModelConfig) -> int:
    """Command line entry; returns the exit status."""
    return exit_status(lambda: _run(args, model))


def _run(args: Sequence[str] | None, model: ModelConfig) -> int:
    config = options_of(NamedRowsConfig, args, "data rows", __doc__)
    found = count_rows(config, model)
    if not found[0].samples:
        raise ValueError(f"{config.directory}: a quarter of the users has no sample in {config.windows} windows")
    found.append(extrapolated(found[-2], found[-1], config.samples, model))
    heads = [f"{of.samples:,}" for of in found]
    print(f"{'samples':>22} {heads[0]:>13} {heads[1]:>13} {heads[2]:>13} {heads[3] + ' *':>15} {'of':>13}")
    names = (*EVENT_TABLES, *CONTEXT_TABLES)
    for table, name in enumerate((*names, "all")):
        counts = [sum(of.rows) if name == "all" else of.rows[table] for of in found]
        of_table = sum(model.rows) if name == "all" else model.rows[table]
        print(f"{name:>22} {counts[0]:>13,} {counts[1]:>13,} {counts[2]:>13,} {counts[3]:>13,} * {of_table:>13,}")
    places = [-(-sum(of.rows) // config.world_size) for of in found]
    memory = [f"{bytes_of(of, model.embedding_dim) / 1e9:.3g}" for of in places]
    full = f"{4 * sum(model.rows) * (model.embedding_dim + 1) / config.world_size / 1e9:.3g}"
    print(f"{f'GB on each of {config.world_size}':>22} " + " ".join(f"{gb:>13}" for gb in memory) + f" * {full:>13}")
    print("* extrapolated from the growth between half of the users and all")
    return 0


if __name__ == "__main__":
    sys.exit(main(None, ModelConfig()))
