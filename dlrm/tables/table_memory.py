"""Checks that the tables fit, before anything is allocated."""

import torch
import torch.distributed as dist

from dlrm_bench.dlrm.optimizers import TableOptimizer
from dlrm_bench.dlrm.runtime.host_memory import free_memory_bytes
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.dlrm.tables.dynamic.memory import bytes_of
from dlrm_bench.dlrm.tables.tables import Tables
from dlrm_bench.dlrm.tables.tiers.table_memory import TableMemory

# The remaining share is for activations, communication buffers and the dense network.
HEADROOM = 0.95


def device_memory_bytes(ranks: Ranks) -> int:
    """Returns the memory that one rank may use for its tables: its GPU's free bytes, or its share of the host's
    available bytes."""
    if ranks.device.type == "cuda":
        return torch.cuda.mem_get_info(ranks.device)[0]
    return host_memory_bytes(ranks)


def host_memory_bytes(ranks: Ranks) -> int:
    """Returns a rank's share of the available bytes of its host's memory."""
    return free_memory_bytes() // ranks.local_world_size


def rank_memory_bytes(ranks: Ranks, memory: TableMemory | None) -> int:
    """Returns the memory that one rank may use for its tables: of its device and, if `memory` lets host memory hold
    some of the rows, of its share of the host's available bytes."""
    return tier_bytes(memory, device_memory_bytes(ranks), host_memory_bytes(ranks), ranks.device.type == "cuda")


def tier_bytes(memory: TableMemory | None, device_bytes: int, host_bytes: int, on_gpu: bool) -> int:
    """Computes `rank_memory_bytes` of a rank with this memory."""
    if memory is None or not on_gpu:  # without a GPU both tiers are the same memory
        return device_bytes
    return memory.capacity(device_bytes, host_bytes)


def table_memory_bytes(ranks: Ranks, memory: TableMemory | None = None) -> int:
    """Returns the bytes that tables and optimizer state may use on every rank: the minimum over ranks. Collective."""
    least = torch.tensor([rank_memory_bytes(ranks, memory)], dtype=torch.int64, device=ranks.device)
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    return int(int(least) * HEADROOM)


def check_places_fit(
    tables: Tables, places: int, available_bytes: int, device: torch.device, states: int = 1, unnamed: int = 0
) -> None:
    """Raises ValueError, on every rank, if memory for `places` dynamic fp32 rows exceeds the memory of any rank.

    available_bytes: this rank's. states, unnamed: as for bytes_of, unnamed of this rank.
    """
    own = [available_bytes, -bytes_of(places, tables.columns, states, unnamed, tables.raw_ids)]
    least = torch.tensor(own, dtype=torch.int64, device=device)
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    refuse_places(places, -int(least[1]), int(least[0]))


def refuse_places(places: int, needed: int, rank_bytes: int) -> None:
    """Raises ValueError if `places` dynamic rows, which take `needed` bytes of a rank, exceed its `rank_bytes`."""
    available = rank_bytes * HEADROOM
    if needed > available:
        raise ValueError(
            f"--dynamic-rows {places} does not fit: rows, state and map need {needed / 1e9:.1f} GB per rank, but only "
            f"{available / 1e9:.1f} GB are available; use more GPUs with fewer rows each"
        )


def own_memory(device: torch.device) -> bool:
    """Whether each rank has memory of its own: on the CPU, the ranks of a node share the host's."""
    return device.type == "cuda"


def check_tables_fit(tables: Tables, optimizer: TableOptimizer, available_bytes: int, device: torch.device) -> None:
    """Raises ValueError, on every rank, if tables and optimizer state exceed the memory of all ranks together, or if
    tables are whole and those of one GPU exceed the least memory of a GPU.

    available_bytes: this rank's; the process group sums it.
    """
    total = torch.tensor([available_bytes], dtype=torch.int64, device=device)
    dist.all_reduce(total)
    refuse_tables(tables, optimizer, int(total), dist.get_world_size())
    if tables.whole and own_memory(device):
        least = torch.tensor([available_bytes], dtype=torch.int64, device=device)
        dist.all_reduce(least, op=dist.ReduceOp.MIN)
        refuse_whole_tables(tables, optimizer, int(least), dist.get_world_size())


def refuse_tables(tables: Tables, optimizer: TableOptimizer, total_bytes: int, world_size: int) -> None:
    """Raises ValueError if tables and optimizer state exceed the memory of all ranks, `total_bytes` together."""
    state_bytes = sum(tables.rows) * optimizer.state_columns(tables.columns) * 4
    needed, available = tables.bytes + state_bytes, total_bytes * HEADROOM
    if needed > available:
        raise ValueError(
            f"the embedding tables do not fit: tables and optimizer state need {needed / 1e9:.1f} GB, but the "
            f"{world_size} rank(s) have {available / 1e9:.1f} GB; use more GPUs or "
            f"{_smaller(tables, available / needed)}"
        )


def whole_table_bytes(tables: Tables, optimizer: TableOptimizer, world_size: int) -> list[tuple[int, int]]:
    """Returns the bytes of each rank's tables, and of their optimizer state, if tables are whole."""
    rows = [0] * world_size
    for owner, of_table in zip(tables.owners(world_size), tables.rows, strict=True):
        rows[owner] += of_table
    states = optimizer.state_columns(tables.columns)
    return [(4 * own * tables.columns, 4 * own * states) for own in rows]


def refuse_whole_tables(tables: Tables, optimizer: TableOptimizer, rank_bytes: int, world_size: int) -> None:
    """Raises ValueError if a rank's whole tables and their optimizer state exceed `rank_bytes`, a rank's memory."""
    needed, available = [sum(both) for both in whole_table_bytes(tables, optimizer, world_size)], rank_bytes * HEADROOM
    most = max(needed)
    if most > available:
        rank = needed.index(most)
        names = [name for name, owner in zip(tables.names, tables.owners(world_size), strict=True) if owner == rank]
        largest = max(tables.rows) * (tables.columns + optimizer.state_columns(tables.columns)) * 4
        more_gpus = "use more GPUs or " if largest <= available else ""  # no number of them splits a table
        raise ValueError(
            f"the embedding tables do not fit: of {world_size} rank(s), rank {rank} holds {', '.join(names)}, each of "
            f"them whole, which need {most / 1e9:.1f} GB with optimizer state, but a rank has {available / 1e9:.1f} "
            f"GB; {more_gpus}{_smaller(tables, available / most)}"
        )


def _smaller(tables: Tables, share: float) -> str:
    """Returns the advice for tables that are to take at most this share of their bytes."""
    return tables.advice or f"shrink the tables with --model.table-scale {max(tables.scale * share * 0.95, 1e-6):.2g}"
