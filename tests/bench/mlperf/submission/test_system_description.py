"""System descriptions: facts of a record and a node, missing fields, and edited descriptions that are kept."""

import json
from pathlib import Path

import pytest

from dlrm_bench.bench.machine.description import describe_machine
from dlrm_bench.bench.mlperf.submission.system_description import (
    FIELDS,
    describe_system,
    malformed_fields,
    missing_fields,
    read_description,
    system_id,
    write_description,
)
from dlrm_bench.bench.records.schema import Machine
from tests.bench.mlperf.submission.made_packages import description

H200 = Machine(
    nodes=2, hosts=["a", "b"], gpus=16, gpu="NVIDIA H200", gpu_memory_gb=150.1, cpu="Xeon", cores=192, memory_gb=2164.2,
    driver="580.1", cuda="13.0", nccl="2.28.9", python="3.12.3", torch="2.11.0", torchrec="1.6.1", fbgemm_gpu="1.6.0",
    power_limit_w=700.0, sm_clock_mhz=1980, sm_clock_max_mhz=1980, topology="nvlink: 18 links a GPU, to NVSwitch",
)  # fmt: skip
NAMES = {"org": "Example", "division": "closed", "availability": "onprem", "system_name": "2 x 8 x NVIDIA H200"}


def test_there_are_33_fields() -> None:
    assert len(FIELDS) == len(set(FIELDS)) == 33


def test_a_record_and_its_node_tell_most() -> None:
    host = {"host_processors_per_node": "2", "operating_system": "Ubuntu"}
    made = describe_system(H200, host, **NAMES, commit="abc")
    assert tuple(made) == FIELDS
    assert made["status"] == "Available on-premise"
    assert (made["number_of_nodes"], made["accelerators_per_node"]) == ("2", "8")
    assert made["accelerator_interconnect"] == "nvlink: 18 links a GPU, to NVSwitch"
    assert made["framework"] == "PyTorch 2.11.0, TorchRec 1.6.1, FBGEMM 1.6.0"
    assert made["other_software_stack"]["dlrm_bench_commit"] == "abc"
    assert missing_fields(made) == [
        "host_processor_core_count", "host_storage_type", "host_storage_capacity", "host_networking",
        "host_networking_topology", "host_memory_configuration", "accelerator_host_interconnect",
        "accelerator_memory_configuration", "cooling",
    ]  # fmt: skip
    assert [*malformed_fields(Path("s.json"), made)] == []


def test_a_node_without_gpus_has_nothing_to_say_of_them() -> None:
    made = describe_system(describe_machine(), {}, **NAMES, commit=None)
    if made["accelerators_per_node"] == "0":
        assert not [field for field in missing_fields(made) if field.startswith("accelerator")]


def test_without_a_record_only_the_logs_speak() -> None:
    made = describe_system(None, {}, **NAMES, commit=None)
    assert {field: value for field, value in made.items() if value} == {
        "submitter": "Example",
        "division": "closed",
        "status": "Available on-premise",
        "system_name": "2 x 8 x NVIDIA H200",
    }


def test_virtual_cpus_stand_for_cores() -> None:
    assert missing_fields(description(host_processor_core_count="")) == []
    both = description(host_processor_core_count="", host_processor_vcpu_count="")
    assert missing_fields(both) == ["host_processor_core_count"]


def test_an_edited_description_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "systems" / "x.json"
    assert write_description(path, description())
    path.write_text(json.dumps({"cooling": "air"}))
    assert not write_description(path, description())
    assert read_description(path) == {"cooling": "air"}
    assert len([*malformed_fields(path, read_description(path))]) == 32


def test_what_checkers_crash_on_is_named() -> None:
    bad = description(number_of_nodes="two", host_processor_core_count=56, sw_notes=None)
    assert [*malformed_fields(Path("s.json"), bad)] == [
        's.json: number_of_nodes is "two", which is no whole number: write one, such as "1"',
        's.json: host_processor_core_count is 56, which is no text: write "56"',
        's.json: sw_notes is null, which is no text: write ""',
    ]


@pytest.mark.parametrize("text", ["[]", "{", '"x"'])
def test_what_is_no_description(tmp_path: Path, text: str) -> None:
    (tmp_path / "s.json").write_text(text)
    with pytest.raises(ValueError, match=r"s\.json is (not a system description|corrupt)"):
        read_description(tmp_path / "s.json")


def test_ids_are_folder_names() -> None:
    assert system_id("8 x NVIDIA H200/SXM") == "8_x_NVIDIA_H200_SXM"
    assert system_id("..") == "unnamed"
