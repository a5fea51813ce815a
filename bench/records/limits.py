"""The form of limits.json, reading it, and the floor that its ceilings give."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypedDict

from dlrm_bench.bench.profile.kernel_names import STAGES
from dlrm_bench.bench.records.json_file import read_form
from dlrm_bench.bench.records.schema import Git, Machine

LIMITS_JSON = "limits.json"
LIMITS_SCHEMA = 1


class Limits(TypedDict):
    """The content of limits.json."""

    schema: int
    id: str
    created: str
    command: str
    git: Git
    machine: Machine
    config: dict[str, Any]
    """The configuration that determines the sizes: preset, world_size, local_batch_size, precision, model and, except
    in older files, table_optimizer."""
    ceilings: "list[Ceiling]"
    floor_ms: dict[str, float]
    """Least time of each stage, and of the whole under 'iteration': see floor()."""


class Ceiling(TypedDict):
    """One piece of work, alone on the machine."""

    name: str
    stage: str | None
    """The stage of the work; None for rates that belong to no stage."""
    ms: float
    """Time in one iteration, on the slowest rank."""
    amount: float
    """Bytes or FLOP that one rank moves or computes in that time."""
    unit: str
    """B, FLOP or launches."""


# Names of ceilings.
BATCH_COPY = "host to device: one batch"
IDS = "all-to-all: ids"
POOLED = "all-to-all: pooled vectors"
GRADIENTS = "all-to-all: their gradients"
ALL_REDUCE = "all-reduce: dense gradients"
REDUCE_SCATTER = "reduce-scatter: dense gradients"
ALL_GATHER = "all-gather: dense weights"
LOOKUP = "memory traffic: table lookup"
UPDATE = "memory traffic: table update"
ADAGRAD = "memory traffic: dense update"
# Of benchmarks whose work has them.
ACTIVATIONS = "memory traffic: activations kept for the backward"
ATTENTION = "attention: its operations, as a large product"
# Peak rates of the hardware, at sizes that no iteration has.
LARGE_PRODUCT = "large matrix product"
LARGE_COPY = "large copy, host to device"
MEMORY_RATE = "memory: "
"""Common beginning of the names of memory rates."""
ALL_TO_ALLS = (IDS, POOLED, GRADIENTS)
MEMORY = (LOOKUP, UPDATE, ADAGRAD)


def read_limits(path: Path) -> Limits:
    """Returns limits.json in folder `path`, or the file itself. ValueError, naming the file, if it is missing or
    damaged."""
    file = path / LIMITS_JSON if path.is_dir() else path
    return read_form(file, Limits, (LIMITS_SCHEMA,), "`dlrm-bench limits` makes one")


def best_rate(limits: Limits, name: str) -> float | None:
    """Returns the largest rate of ceilings whose names begin with `name`, in their unit per second; None if there are
    none."""
    rates = [c["amount"] / c["ms"] * 1e3 for c in limits["ceilings"] if c["name"].startswith(name)]
    return max(rates, default=None)


def floor(ceilings: Sequence[Ceiling]) -> dict[str, float]:
    """Returns the least time of each stage, and of an iteration: {stage: ms, ..., 'iteration': ms}.

    A stage takes at least the sum of its pieces, except that the all-reduce of the dense gradients can overlap the
    GEMMs: the longer of the two counts. In an iteration, input dist and dense update can overlap other stages entirely;
    embedding forward, dense stage and embedding backward depend on each other. But overlapped work still uses the links
    and the memory: an iteration takes at least as long as all its collectives together, as all its memory traffic, and
    as its copy of a batch.
    """
    ms = dict.fromkeys(STAGES, 0.0)
    for ceiling in ceilings:
        if ceiling["stage"] is not None and ceiling["name"] != ALL_REDUCE:
            ms[ceiling["stage"]] += ceiling["ms"]
    links = sum(c["ms"] for c in ceilings if c["name"] in (ALL_REDUCE, *ALL_TO_ALLS))
    memory = sum(c["ms"] for c in ceilings if c["name"] in MEMORY)
    all_reduce = sum(c["ms"] for c in ceilings if c["name"] == ALL_REDUCE)
    ms["dense_forward_backward"] = max(ms["dense_forward_backward"], all_reduce)
    chain = ms["embedding_forward"] + ms["dense_forward_backward"] + ms["embedding_backward"]
    copies = sum(c["ms"] for c in ceilings if c["name"] == BATCH_COPY)
    return ms | {"iteration": max(chain, links, memory, copies)}
