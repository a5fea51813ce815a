"""Types of GPU: measured and data-sheet figures of each. Another GPU is a `GpuType` in `_KNOWN`."""

from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRates:
    """Maximum rates of a GPU, per second."""

    flop: Mapping[str, float]
    """FLOP, by precision of the run."""
    memory: float
    """Bytes, read plus written."""
    links: float
    """Bytes that leave a GPU for others of its node."""
    pcie: float
    """Bytes from the host."""
    cache: float
    """Bytes that the L2 cache holds."""
    source: str
    """The source of the rates, in a sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuCosts:
    """Measured costs of one type of GPU. Times are microseconds, sizes bytes."""

    measured_on: str
    """The GPU and the measurement that the constants come from, for tables and records."""
    memory_bytes: int
    """The memory of one GPU."""
    memory_bytes_per_us: float
    """Rate at which a kernel moves memory, read plus write."""
    cache_bytes_per_us: float
    """Rate at which a kernel reads rows from the cache, such as the row of a repeated id of the batch."""
    lookup_us: float
    """The fixed part of a rank's lookup."""
    sort_us: float
    """The fixed part of a rank's sort of ids; it keeps few multiprocessors busy, so other streams' work can overlap."""
    sort_us_per_million_ids: float
    """Time that each million of ids adds to the sort."""
    update_us: float
    """The fixed part of a rank's table update, with the same property as that of the sort."""
    update_us_per_million_ids: float
    """Time that each million of ids adds to the update, in addition to the bytes that it moves."""
    picking_us: float
    """The fixed part of finding the ids whose rows this rank has, if a table is split by rows."""
    picking_us_per_million_ids: float
    """Time that each million of ids adds to it."""
    all_to_all_us: float
    """The fixed part of an all-to-all."""
    all_to_all_bytes_per_us: float
    """Rate at which bytes leave a rank in an all-to-all."""
    peer_exchange_us: float
    """The fixed part of an exchange through peer memory: a kernel that writes to the other ranks, and a barrier."""
    peer_bytes_per_us: float
    """Rate at which bytes leave a rank through peer memory."""
    host_memory_bytes: int
    """A GPU's share of the host's memory."""
    host_rows_per_us: float
    """Rate at which kernels exchange table rows of at most 1 KB, weights and state, with the host's memory."""

    @property
    def tables_us(self) -> float:
        """The fixed part of lookup, sort and update together."""
        return self.lookup_us + self.sort_us + self.update_us

    def at_memory_rate(self, bytes_per_us: float, measured_on: str) -> "GpuCosts":
        """Returns the costs of a GPU with another memory rate, with cache and kernel rates scaled alike."""
        slower = self.memory_bytes_per_us / bytes_per_us
        return replace(
            self,
            measured_on=measured_on,
            memory_bytes_per_us=bytes_per_us,
            cache_bytes_per_us=self.cache_bytes_per_us / slower,
            sort_us_per_million_ids=self.sort_us_per_million_ids * slower,
            update_us_per_million_ids=self.update_us_per_million_ids * slower,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuType:
    """One type of GPU."""

    name: str
    """The GPU's name in CUDA."""
    data_sheet_flop: Mapping[str, float]
    """Data-sheet FLOP/s, dense, by precision of the products: the denominator of an MFU."""
    rates: GpuRates
    """Rates for the lower bound of an iteration (`dlrm-bench limits --above`)."""
    costs: GpuCosts
    """Costs for the placement of tables."""


_H200_COSTS = GpuCosts(
    measured_on="NVIDIA H200",
    memory_bytes=141_000_000_000,
    # An in-place addition over 1 GiB, as `dlrm-bench limits` times it.
    memory_bytes_per_us=4.23e6,
    # Fitted to lookup, sort and update, each alone as a graph, for 60 sets of tables (one hot table, several, all 26)
    # at 1024 to 55296 samples with MLPerf-like ids and 16 to 128 columns: tests/dlrm/tables/plan/test_costs.py.
    cache_bytes_per_us=7.9e6,
    lookup_us=4.5,
    sort_us=33.0,
    sort_us_per_million_ids=60.0,
    update_us=20.0,
    update_us_per_million_ids=20.0,
    # kernels/input_dist/pick_rows.py as a graph, an eighth of the rows: 17 us for 0.10 million ids, 24 for 0.82, 55 for
    # 6.55; for six tables 25 for 1.30 and 81 for 10.4.
    picking_us=17.0,
    picking_us_per_million_ids=6.0,
    # NCCL's all-to-all of pooled vectors on 8 x H200, by bytes that leave a rank: 34 us for 3.0 MB, 157 us for 40 MB.
    all_to_all_us=24.0,
    all_to_all_bytes_per_us=303e3,
    # kernels/embedding/push_columns.py and a barrier as a graph, bf16, on 2 and 4 x H200, by bytes that leave a rank:
    # 9.1 us for 1.7 MB, 68.9 for 23.0, 11.7 for 2.6 and 103 for 34.5. A barrier alone takes 3.0.
    peer_exchange_us=4.4,
    peer_bytes_per_us=353e3,
    # A GPU's share on the measured machines.
    host_memory_bytes=128 << 30,
    # For 512 bytes as for 1 KB, at random places of 40 GB, in one direction as in both, by 8 blocks as by 132.
    host_rows_per_us=28.0,
)

H200 = GpuType(
    name="NVIDIA H200",
    data_sheet_flop={"bf16": 989.4e12, "tf32": 494.7e12, "fp32": 67e12, "fp8": 1978.9e12},  # SXM
    rates=GpuRates(
        # bf16: the best rate of an 8192-cubed product of random numbers; tf32 and fp32: the data sheet.
        flop={"bf16": 798e12, "tf32": 494.7e12, "fp32": 67e12},
        memory=4.3e12,  # a copy; an addition in place over 1 GiB reaches 4.23e12
        links=478.8e9,  # 18 NVLinks of 26.6 GB/s
        pcie=64e9,  # generation 5, 16 lanes, before its encoding
        cache=60e6,
        source="rates known of NVIDIA H200 (dlrm/runtime/gpu_types.py)",
    ),
    costs=_H200_COSTS,
)

# Stated, not measured: by the data sheets an H100 differs from an H200 in memory rate, 3.35
# versus 4.8 TB/s, and in memory size; multiprocessors and NVLink are the same.
_H100_COSTS = replace(
    H200.costs.at_memory_rate(
        H200.costs.memory_bytes_per_us * 3.35 / 4.8,
        "NVIDIA H100 80GB HBM3, stated: an H200's by the memory rates of the data sheets",
    ),
    memory_bytes=80_000_000_000,
)

H100 = GpuType(
    name="NVIDIA H100 80GB HBM3",
    data_sheet_flop=H200.data_sheet_flop,  # SXM
    rates=replace(
        H200.rates,
        memory=H200.rates.memory * 3.35 / 4.8,
        cache=50e6,
        source="rates of NVIDIA H200, and by the data sheets the memory rate and cache of NVIDIA H100",
    ),
    costs=_H100_COSTS,
)

_KNOWN = {gpu.name: gpu for gpu in (H200, H100)}
DEFAULT_COSTS = H200.costs


def gpu_type(gpu_name: str | None) -> GpuType | None:
    """Returns the type of the GPU with this CUDA name; None for an unknown GPU or no GPU."""
    return _KNOWN.get(gpu_name or "")


def costs_of(gpu_name: str | None) -> GpuCosts:
    """Returns the costs of the GPU with this CUDA name; DEFAULT_COSTS for an unknown GPU or no GPU.

    A plan made with another GPU's costs is correct, but may be less balanced; `note` names the source of the costs.
    """
    known = gpu_type(gpu_name)
    return known.costs if known else DEFAULT_COSTS


def note(costs: GpuCosts, gpu_name: str | None) -> str:
    """Returns the source of predicted times, for a reader; if it is another GPU, also how to measure this one."""
    if gpu_name is None or gpu_name in costs.measured_on:
        return costs.measured_on
    return f"{costs.measured_on}, because there are no costs of {gpu_name}: run `dlrm-bench limits` on it"
