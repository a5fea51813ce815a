"""The flags of dlrm-bench scale, apart from what it imports when it runs."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tyro.conf import Positional

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(kw_only=True, slots=True, frozen=True)
class Scale:
    """Says what an iteration would take on many nodes, by a model fitted to records; no measurement.

    Each record, of the torchrec, five-stage or static pipeline, gives a table: milliseconds, what bounds them, stages,
    and the network that would be needed. The local batch is the record's, unless a global one is given.
    """

    records: Positional[tuple[Path, ...]]
    """Records of one node, best of the machine that the limits are of."""
    limits: Path
    """Limits record of these GPUs: dlrm-bench limits."""
    check: tuple[Path, ...] = ()
    """Further records, to set beside what the model says of them."""
    nodes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128)
    """Numbers of nodes."""
    gpus_per_node: int = 8
    """GPUs of a node."""
    network: Literal["infiniband-400g", "p2p"] = "infiniband-400g"
    """What joins the nodes: an adapter of 400 Gb/s for each GPU (stated), or NCCL's P2P between GPUs of one machine,
    each of which stands for a node (by record 40)."""
    network_gb_s: float | None = None
    """GB/s between nodes, of one GPU in one direction, in place of the network's."""
    network_us: float | None = None
    """Microseconds of a collective between two nodes, however few its bytes, in place of the network's."""
    global_batch_size: int | None = None
    """Global batch on all numbers of nodes."""
    published: bool = False
    """Set the static pipeline, with an H100's figures, beside published results of several nodes."""
    picture: Path | None = None
    """File for a picture of milliseconds over nodes: .svg, .png or .pdf."""

    def run(self, console: "Console", forwarded: Sequence[str]) -> int:
        """Prints the model; returns the exit status."""
        from dlrm_bench.bench.scale.command import scale

        given = {field.name: getattr(self, field.name) for field in fields(self)}
        given |= {"limits_path": given.pop("limits"), "checks": given.pop("check")}
        return scale(console, **given)
