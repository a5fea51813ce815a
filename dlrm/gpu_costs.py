"""Costs of work on a type of GPU: the measured constants from which plans are made, one value for each type."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuCosts:
    """Measured costs of one type of GPU. Times are microseconds, sizes bytes."""

    measured_on: str
    """The GPU, and the measurement, that the constants come from, for tables and records."""
    memory_bytes: int
    """The memory of one GPU."""
    memory_bytes_per_us: float
    """How fast a kernel moves memory, read plus write."""
    us_per_million_ids: dict[int, float]
    """Lookup, sort and update of a million ids of distinct rows, by shard width in columns."""
    us_per_call: float
    """The fixed part of each rank's lookup, sort and update, whatever their ids."""
    repeated_id: float
    """The cost of an id whose row another id of the batch names as well, relative to an id of a row of its own: rows
    come from the cache, one update serves both."""
    picking_us: float
    """The fixed part of finding the ids whose rows this rank has, where a table is split by rows."""
    picking_us_per_million_ids: float
    """Finding those of a million ids."""
    all_to_all_us: float
    """The fixed part of an all-to-all, whatever its bytes."""
    all_to_all_bytes_per_us: float
    """How fast bytes leave a rank in an all-to-all."""
    peer_exchange_us: float
    """The fixed part of an exchange through peer memory: a kernel that writes to the other ranks, and a barrier."""
    peer_bytes_per_us: float
    """How fast bytes leave a rank through peer memory."""


H200 = GpuCosts(
    measured_on="NVIDIA H200",
    memory_bytes=141_000_000_000,
    # An addition in place over 1 GiB, as `dlrm-bench limits` times it.
    memory_bytes_per_us=4.23e6,
    # One H200, fbgemm-gpu 1.6.0, exact Adagrad, bf16 output: FBGEMM's forward and backward on a 40M-row table at 5.5
    # million uniform ids. Single tables of 0.4 to 1.5 million ids are predicted within 10 %.
    us_per_million_ids={16: 196.0, 32: 228.0, 64: 376.0, 128: 674.0},
    us_per_call=180.0,
    # Ten one-hot tables of 3 to 17295 rows in one call: 396 us at 55296 samples.
    repeated_id=0.57,
    # kernels/input_dist/pick_rows.py as a graph, an eighth of the rows: 17 us for 0.10 million ids, 24 for 0.82, 55 for
    # 6.55, and of six tables 25 for 1.30 and 81 for 10.4.
    picking_us=17.0,
    picking_us_per_million_ids=6.0,
    # NCCL's all-to-all of pooled vectors on 8 x H200, by what leaves a rank: 34 us for 3.0 MB, 157 us for 40 MB.
    all_to_all_us=24.0,
    all_to_all_bytes_per_us=303e3,
    # kernels/embedding/push_columns.py and a barrier as a graph, bf16, on 2 and 4 x H200, by what leaves a rank: 9.1 us
    # for 1.7 MB, 68.9 for 23.0, 11.7 for 2.6 and 103 for 34.5. A barrier alone takes 3.0.
    peer_exchange_us=4.4,
    peer_bytes_per_us=353e3,
)

_KNOWN = {H200.measured_on: H200}
DEFAULT = H200


def costs_of(gpu_name: str | None) -> GpuCosts:
    """Returns the costs of the GPU that CUDA calls `gpu_name`; of an unknown one, or of none, DEFAULT.

    A plan of wrong costs is as correct as another, but may be less balanced; `note` says so.
    """
    return _KNOWN.get(gpu_name or "", DEFAULT)


def note(costs: GpuCosts, gpu_name: str | None) -> str:
    """Says for a reader where predicted times come from, and that they are another GPU's where they are."""
    if gpu_name is None or gpu_name in costs.measured_on:
        return costs.measured_on
    return f"{costs.measured_on}, as there are no costs of {gpu_name}: run `dlrm-bench limits` on it"
