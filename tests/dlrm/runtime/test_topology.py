"""Topologies: full nodes, and what leaves them."""

import pytest

from dlrm_bench.dlrm.runtime.topology import Network, Topology


def test_nodes_are_full():
    assert Topology.of(4, 8) == Topology.one_node(4)
    assert Topology.of(32, 8).nodes == 4
    assert Topology.of(32, 8).world_size == 32
    with pytest.raises(ValueError, match="12 ranks do not fill nodes of 8 GPUs"):
        Topology.of(12, 8)


def test_bytes_for_other_nodes_share_the_adapter():
    network = Network(name="test", bytes_per_us=100.0, latency_us=10.0, message_us=2.0)
    assert Topology.one_node(8).between_nodes_us(1e6) == 0
    # Two other nodes of four GPUs: 8 x 50 bytes, and one message more than to one node.
    assert Topology.of(12, 4, network).between_nodes_us(50) == pytest.approx(10 + 2 + 8 * 50 / 100)
