"""The time of each rank's tables, predicted by the planner and measured."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from dlrm_bench.dlrm.config import TrainingConfig
from dlrm_bench.dlrm.runtime.gpu_types import costs_of, note
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.dlrm.runtime.topology import Topology
from dlrm_bench.dlrm.tables.plan.costs import imbalance, rank_loads
from dlrm_bench.dlrm.tables.pooled.distributed_ids import DistributedIds
from dlrm_bench.dlrm.tables.pooled.static_ebc import StaticEBC

_REPETITIONS = 10
# GPU clock cycles, some 20 ms, in which the host launches all repetitions, so that the GPU never waits for a launch.
_HEAD_START = 40_000_000


def embedding_load(
    config: TrainingConfig, ebc: StaticEBC, batches: Sequence[DistributedIds], ranks: Ranks, gpu: str | None
) -> dict[str, Any]:
    """Returns, for the record, each rank's microseconds per iteration, and the ratio of maximum to mean. Collective.

    tables: lookup, sort and update; embedding: these and the rank's own all-to-alls. Predicted with the costs of `gpu`,
    the name of these GPUs, or with default costs, as `predicted_by` says; measured on this machine, on the ids of
    `batches`.
    """
    costs = costs_of(gpu)
    global_batch_size = config.local_batch_size * ranks.world_size
    topology = Topology.of(ranks.world_size, ranks.local_world_size)
    sizes = (global_batch_size, config.pooled_bytes, costs, topology, config.data.id_statistics, ebc.in_tiers)
    loads = rank_loads(ebc.plan, config.model.tables, config.optimizer.tables, *sizes)
    times: dict[str, list[float]] = {
        "predicted_embedding_us": [round(load.embedding_us) for load in loads],
        "predicted_tables_us": [round(load.tables_us) for load in loads],
        "measured_tables_us": measure_tables_us(ebc, batches, ranks),
    }
    ratios = {name.removesuffix("_us"): round(imbalance(us), 3) for name, us in times.items()}
    return {**times, "imbalance": ratios, "predicted_by": note(costs, gpu)}


def measure_tables_us(ebc: StaticEBC, batches: Sequence[DistributedIds], ranks: Ranks) -> list[float]:
    """Returns the microseconds of lookup, sort and update of each rank's sharded tables, alone and without collectives.
    Collective.

    batches: ids to use in turn; they stay unchanged. So do weights and optimizer state, bitwise: the update gets zero
    gradients, which cost as much as others and change nothing under Adagrad, row-wise Adagrad and SGD. With peer memory
    the measurement includes the lookup's writes to the other ranks, which write at the same time.
    """
    ebc.gradients.zero_()

    def work(ids: DistributedIds) -> None:
        ebc.sort(ids)
        pooled = [ebc.lookup(ids, part) for part in range(ebc.shape.parts)]
        ebc.update(ids, pooled[0])

    works = [partial(work, batches[i % len(batches)]) for i in range(_REPETITIONS)]
    for first in works[: len(batches)]:
        first()
    dist.barrier()
    us = round((_gpu_us if ranks.device.type == "cuda" else _cpu_us)(works), 1)
    of_ranks = [us] * ranks.world_size
    dist.all_gather_object(of_ranks, us)
    return of_ranks


def _cpu_us(works: Sequence[Callable[[], None]]) -> float:
    start = time.perf_counter()
    for work in works:
        work()
    return (time.perf_counter() - start) * 1e6 / len(works)


def _gpu_us(works: Sequence[Callable[[], None]]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(_HEAD_START)
    start.record()
    for work in works:
        work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / len(works)
