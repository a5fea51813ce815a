"""The flags of dlrm-bench scale, apart from what it imports when it runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tyro.conf import Positional

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(kw_only=True, slots=True, frozen=True)
class Scale:
    """Predicts an iteration's time on many nodes by a model fitted to records; not a measurement.

    Each record of the torchrec, five-stage or static pipeline gives a table: milliseconds, their bound, stages, and the
    network bandwidth that would be needed. The local batch size is the record's, unless --global-batch-size is given.
    If tables are not pooled, a record of the static pipeline also gives the minutes to the target, beside published
    runs.
    """

    records: Positional[tuple[Path, ...]]
    """Records of one node, preferably of the machine on which the limits were measured."""
    limits: Path | None = None
    """Limits record of these GPUs, made by dlrm-bench limits; records whose tables are pooled need it."""
    check: tuple[Path, ...] = ()
    """Further records to compare with the model's predictions."""
    nodes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128)
    """Numbers of nodes."""
    gpus_per_node: int = 8
    """Number of GPUs of a node."""
    network: Literal["infiniband-400g", "p2p"] = "infiniband-400g"
    """Network between the nodes: an adapter of 400 Gb/s for each GPU (nominal), or NCCL's P2P between GPUs of one
    machine, each of which represents a node (record 40)."""
    network_gb_s: float | None = None
    """Bandwidth in GB/s from one GPU to other nodes, in one direction; replaces the value of --network."""
    network_us: float | None = None
    """Latency in microseconds of a collective between two nodes; replaces the value of --network."""
    global_batch_size: int | None = None
    """Global batch size for every number of nodes; by default the record's local batch size is kept."""
    published: bool = False
    """Compare the static pipeline, with an H100's rates, with published results on several nodes."""
    picture: Path | None = None
    """File for a plot of milliseconds over nodes: .svg, .png or .pdf."""

    def run(self, console: "Console", forwarded: Sequence[str]) -> int:
        """Prints the model; returns the exit status."""
        from dlrm_bench.bench.scale.command import scale

        return scale(console, self)
