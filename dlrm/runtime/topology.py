"""The connections of a run's GPUs: nodes, GPUs of a node, and the network between the nodes."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """The network between nodes: figures per GPU when all GPUs of its node use it at once."""

    name: str
    """The source of the figures, for tables and records."""
    bytes_per_us: float
    """Rate at which bytes leave a GPU for other nodes and, at the same time, arrive."""
    latency_us: float
    """The fixed part of a collective between nodes, independent of its size."""
    message_us: float = 0.0
    """Time that each further node of an exchange adds to the fixed part."""


# Figures of a data sheet, not measured: 400 Gb/s for each of a DGX's eight ConnectX-7 adapters, one per GPU, at 90 % of
# the line rate. NCCL's collectives between two nodes take about 20 us even for small messages.
INFINIBAND_400G = Network(name="one 400 Gb/s adapter a GPU, stated", bytes_per_us=45e3, latency_us=20.0, message_us=0.5)

# Effective figures, with which the scale model predicts the time of two nodes of one H200 each over NVLink with NCCL's
# P2P at 512 samples a GPU (results/40, 0.563 ms): NCCL's kernels, not the links, take the time.
P2P = Network(name="NCCL's P2P between H200 of one machine, by record 40", bytes_per_us=200e3, latency_us=25.0)

NETWORKS = {"infiniband-400g": INFINIBAND_400G, "p2p": P2P}


GPUS_PER_NODE = 8
"""GPUs of a DGX."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """The nodes of a run; ranks count GPU by GPU through one node after another."""

    nodes: int
    gpus_per_node: int
    network: Network = INFINIBAND_400G

    @property
    def world_size(self) -> int:
        """Number of GPUs of all nodes together."""
        return self.nodes * self.gpus_per_node

    @staticmethod
    def one_node(gpus: int) -> "Topology":
        """Returns the topology of one node."""
        return Topology(nodes=1, gpus_per_node=gpus)

    @staticmethod
    def of(world_size: int, gpus_per_node: int, network: Network = INFINIBAND_400G) -> "Topology":
        """Returns the topology of full nodes; ValueError if a node would have fewer GPUs than others."""
        if world_size <= gpus_per_node:
            return Topology(nodes=1, gpus_per_node=world_size, network=network)
        if world_size % gpus_per_node:
            raise ValueError(
                f"{world_size} ranks do not fill nodes of {gpus_per_node} GPUs: use a multiple of {gpus_per_node}"
            )
        return Topology(nodes=world_size // gpus_per_node, gpus_per_node=gpus_per_node, network=network)

    def between_nodes_us(self, bytes_to_each: float) -> float:
        """Returns the microseconds that a GPU takes to send `bytes_to_each` bytes to each GPU of all other nodes; 0 on
        one node."""
        if self.nodes == 1:
            return 0.0
        away = self.nodes - 1
        travel = bytes_to_each * away * self.gpus_per_node / self.network.bytes_per_us
        return self.network.latency_us + (away - 1) * self.network.message_us + travel
