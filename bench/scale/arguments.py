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

    Each record, of the torchrec, five-stage or static pipeline, gives a table: milliseconds, what bounds them, stages,
    and the network that would be needed. The local batch is the record's, unless a global one is given.
    """

    records: Positional[tuple[Path, ...]]
    """Records of one node, best of the machine that the limits are of."""
    limits: Path
    """Limits record of these GPUs, as dlrm-bench limits makes it."""
    check: tuple[Path, ...] = ()
    """Further records, to compare with the model's predictions."""
    nodes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128)
    """Numbers of nodes."""
    gpus_per_node: int = 8
    """Number of GPUs of a node."""
    network: Literal["infiniband-400g", "p2p"] = "infiniband-400g"
    """Network between the nodes: an adapter of 400 Gb/s for each GPU (stated), or NCCL's P2P between GPUs of one
    machine, each of which stands for a node (by record 40)."""
    network_gb_s: float | None = None
    """GB/s of one GPU to other nodes, in one direction, in place of the network's."""
    network_us: float | None = None
    """Microseconds of a collective between two nodes, however few its bytes, in place of the network's."""
    global_batch_size: int | None = None
    """Global batch size for every number of nodes; by default the local batch size of the record stays."""
    published: bool = False
    """Compare the static pipeline, by an H100's figures, with published results of several nodes."""
    picture: Path | None = None
    """File for a plot of milliseconds over nodes: .svg, .png or .pdf."""

    def run(self, console: "Console", forwarded: Sequence[str]) -> int:
        """Prints the model; returns the exit status."""
        from dlrm_bench.bench.scale.command import scale

        return scale(console, self)
