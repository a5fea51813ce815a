"""All obstacles between a machine and a run, in one error, before anything is made."""

from typing import Protocol, runtime_checkable

import torch

from dlrm_bench.bench.checkpoints.restarts import check_restarts
from dlrm_bench.bench.config import RunConfig
from dlrm_bench.bench.machine.description import largest_gpu_bytes
from dlrm_bench.dlrm.benchmarks import named
from dlrm_bench.dlrm.config import TrainingConfig
from dlrm_bench.dlrm.runtime.host_memory import node_memory_bytes
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.dlrm.tables.dynamic.memory import bytes_of
from dlrm_bench.dlrm.tables.table_memory import (
    check_places_fit,
    check_tables_fit,
    device_memory_bytes,
    host_memory_bytes,
    refuse_places,
    refuse_tables,
    refuse_whole_tables,
    tier_bytes,
)
from dlrm_bench.pipeline.interface import check_device
from dlrm_bench.pipeline.static.options import StaticOptions
from dlrm_bench.pipeline.torchrec.options import FiveStageSwitches


@runtime_checkable
class ChecksElements(Protocol):
    """Parts of a benchmark whose unpooled vectors may be too many for TorchRec's output dist."""

    def check_elements(self, config: TrainingConfig, world_size: int, trimmed: bool) -> None:
        """Raises ValueError, naming the flags, if a rank sends too many. trimmed: whether sharders may trim the input
        dist."""
        ...


def check_machine(config: RunConfig, ranks: Ranks) -> None:
    """Raises a ValueError that names every obstacle between these ranks and the run of `config`. Collective."""
    obstacles = []
    checks = (
        lambda: check_precision(config, ranks.device),
        lambda: check_device(config.pipeline, ranks.device),
        lambda: _check_batches_fit(config, ranks),
        lambda: _check_tables_fit(config, ranks),
        lambda: _check_elements(config, ranks.world_size),
        lambda: check_restarts(config),
    )
    for check in checks:
        try:
            check()
        except ValueError as error:
            obstacles.append(str(error))
    if len(obstacles) > 1 and ranks.device.type != "cuda" and config.preset != "smoke":
        obstacles.append("--preset smoke trains on any machine")
    if obstacles:
        raise ValueError("; ".join(obstacles))


def check_precision(config: RunConfig, device: torch.device) -> None:
    """Raises ValueError if `device` lacks the precision."""
    if config.precision == "tf32" and device.type != "cuda":
        raise ValueError("--precision tf32 needs a GPU: on this machine choose fp32 or bf16")


def _check_batches_fit(config: RunConfig, ranks: Ranks) -> None:
    """Raises ValueError if the batches that wait on a node exceed its memory."""
    batches, flag = config.data.batches_in_memory
    needed = named(config.benchmark).parts().batch_bytes(config) * ranks.local_world_size * batches
    memory = node_memory_bytes()
    if needed > memory:
        raise ValueError(
            f"{batches} batches of --local-batch-size {config.local_batch_size} on {ranks.local_world_size} rank(s) "
            f"take {needed / 1e9:.1f} GB, but this node has {memory / 1e9:.1f} GB: lower it, or {flag}"
        )


def _check_tables_fit(config: RunConfig, ranks: Ranks) -> None:
    tables, optimizer, pipeline = config.model.tables, config.optimizer.tables, config.pipeline
    device = ranks.device
    memory = _rank_bytes(config, device_memory_bytes(ranks), host_memory_bytes(ranks), device.type == "cuda")
    if isinstance(pipeline, StaticOptions) and pipeline.dynamic_rows is not None:
        check_places_fit(tables, pipeline.dynamic_rows, memory, device, optimizer.state_columns(tables.columns))
    else:
        check_tables_fit(tables, optimizer, memory, device)


def _check_elements(config: RunConfig, world_size: int) -> None:
    """Raises ValueError if a rank sends more elements of unpooled vectors than TorchRec counts."""
    parts, pipeline = named(config.benchmark).parts(), config.pipeline
    if isinstance(parts, ChecksElements):
        trimmed = isinstance(pipeline, FiveStageSwitches) and pipeline.trim_input_dist
        parts.check_elements(config, world_size, trimmed)


def check_tables_fit_node(config: RunConfig, processes: int, on_gpus: bool) -> None:
    """Raises ValueError if the tables of a run of `config` exceed the memory of this node, with all its ranks on it.

    Needs no ranks, and takes no memory of a GPU. Memory that other programs use counts too, unlike in `check_machine`.
    """
    tables, optimizer, pipeline = config.model.tables, config.optimizer.tables, config.pipeline
    host = node_memory_bytes() // processes
    device = largest_gpu_bytes() if on_gpus else host
    if device is None:  # unknown until the run asks CUDA
        return
    memory = _rank_bytes(config, device, host, on_gpus)
    if isinstance(pipeline, StaticOptions) and pipeline.dynamic_rows is not None:
        states = optimizer.state_columns(tables.columns)
        needed = bytes_of(pipeline.dynamic_rows, tables.columns, states, raw_ids=tables.raw_ids)
        refuse_places(pipeline.dynamic_rows, needed, memory)
    else:
        refuse_tables(tables, optimizer, memory * processes, processes)
        if tables.whole and on_gpus:
            refuse_whole_tables(tables, optimizer, memory, processes)


def _rank_bytes(config: RunConfig, device_bytes: int, host_bytes: int, on_gpu: bool) -> int:
    """Returns the bytes that tables and optimizer state may take on a rank with these bytes of its device and of its
    host."""
    if isinstance(config.pipeline, StaticOptions):
        return tier_bytes(config.pipeline.tiers(config.model.tables), device_bytes, host_bytes, on_gpu)
    return device_bytes + (0 if config.pipeline.in_host_memory() is None else host_bytes)
