"""The description of a node, on this node and from the output of other nodes."""

from dlrm_bench.bench.mlperf.submission import host
from dlrm_bench.bench.mlperf.submission.host import describe_host
from dlrm_bench.bench.mlperf.submission.system_description import FIELDS


def test_this_node() -> None:
    found = describe_host()
    assert set(found) <= set(FIELDS)
    assert all(found.values())
    assert found["operating_system"]


def test_processors_of_a_node_with_two() -> None:
    rows = [
        {"field": "CPU(s):", "data": "224"},
        {"field": "Vendor ID:", "data": "x", "children": [
            {"field": "Model name:", "data": "Xeon", "children": [
                {"field": "Core(s) per socket:", "data": "56"}, {"field": "Socket(s):", "data": "2"},
                {"field": "CPU max MHz:", "data": "3800.0000"}]}]},
        {"field": "L2 cache:", "data": "224 MiB (112 instances)"},
        {"field": "L3 cache:", "data": "210 MiB (2 instances)"},
    ]  # fmt: skip
    assert host._processors({"lscpu": rows}) == {
        "host_processors_per_node": "2",
        "host_processor_core_count": "56",
        "host_processor_vcpu_count": "224",
        "host_processor_frequency": "3800 MHz",
        "host_processor_caches": "L2: 224 MiB (112 instances), L3: 210 MiB (2 instances)",
    }


def test_storage() -> None:
    disks = [
        {"name": name, "size": size, "rota": rota, "type": kind, "tran": tran}
        for name, size, rota, kind, tran in [
            ("nvme0n1", 1_920_000_000_000, False, "disk", "nvme"),
            ("nvme1n1", "1920000000000", False, "disk", "nvme"),
            ("sda", 480_000_000_000, False, "disk", "sata"),
            ("loop0", 5, True, "loop", None),
            ("zram0", 0, False, "disk", None),
        ]
    ]
    assert host._storage({"blockdevices": disks}) == {
        "host_storage_type": "NVMe SSD + SSD",
        "host_storage_capacity": "2x 1.92 TB + 1x 0.48 TB",
    }
