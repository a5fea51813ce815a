"""The system description of a submission, systems/SYSTEM.json: its 33 fields, made once and then edited by its
submitter.

The fields are those of mlperf_logging.system_desc_checker 4.1.68, all text except the software stack; MLCommons'
submission rules name those that need a meaningful answer (submission_rules.adoc, "system_desc_id metadata").
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dlrm_bench.bench.records.json_file import read_json
from dlrm_bench.bench.records.schema import Machine

OPTIONAL = (
    "host_processor_vcpu_count",
    "host_processor_frequency",
    "host_processor_caches",
    "host_processor_interconnect",
    "accelerator_frequency",
    "accelerator_on-chip_memories",
    "accelerator_interconnect_topology",
    "hw_notes",
    "sw_notes",
)
"""Fields that may stay empty."""

COUNTS = ("number_of_nodes", "host_processors_per_node", "accelerators_per_node")
"""Fields that mlperf_logging.result_summarizer multiplies; it crashes unless they are whole numbers."""

FIELDS = (
    "submitter",
    "division",
    "status",
    "system_name",
    "number_of_nodes",
    "host_processors_per_node",
    "host_processor_model_name",
    "host_processor_core_count",
    "host_processor_vcpu_count",
    "host_processor_frequency",
    "host_processor_caches",
    "host_processor_interconnect",
    "host_memory_capacity",
    "host_storage_type",
    "host_storage_capacity",
    "host_networking",
    "host_networking_topology",
    "host_memory_configuration",
    "accelerators_per_node",
    "accelerator_model_name",
    "accelerator_host_interconnect",
    "accelerator_frequency",
    "accelerator_on-chip_memories",
    "accelerator_memory_configuration",
    "accelerator_memory_capacity",
    "accelerator_interconnect",
    "accelerator_interconnect_topology",
    "cooling",
    "hw_notes",
    "framework",
    "other_software_stack",
    "operating_system",
    "sw_notes",
)

AVAILABILITY = {
    "onprem": "Available on-premise",
    "cloud": "Available cloud",
    "research": "Research, Development, or Internal (RDI)",
    "preview": "Preview",
}
"""Names from round 4.0 on for the log's submission_status."""


def describe_system(
    machine: Machine | None,
    host: Mapping[str, str],
    *,
    org: str,
    division: str,
    availability: str,
    system_name: str,
    commit: str | None,
) -> dict[str, Any]:
    """Returns a system description; '' for a field that neither the record's machine nor the host has.

    machine: that of the runs' records, if they have any. host: fields that describe_host() found on one of its nodes.
    """
    known: dict[str, Any] = {
        "submitter": org,
        "division": division,
        "status": AVAILABILITY.get(availability, availability),
        "system_name": system_name,
        **host,
        **(_of_machine(machine, commit) if machine else {}),
    }
    return {field: known.get(field) or "" for field in FIELDS}


def _of_machine(machine: Machine, commit: str | None) -> dict[str, Any]:
    nodes, memory, clock = machine["nodes"], machine["gpu_memory_gb"], machine["sm_clock_max_mhz"]
    framework = {"PyTorch": machine["torch"], "TorchRec": machine["torchrec"], "FBGEMM": machine["fbgemm_gpu"]}
    topology = machine["topology"] or ""
    stack = {
        "python": machine["python"],
        "cuda_version": machine["cuda"],
        "cuda_driver_version": machine["driver"],
        "nccl_version": machine["nccl"],
        "dlrm_bench_commit": commit,
    }
    known = {
        "number_of_nodes": str(nodes),
        "host_processor_model_name": machine["cpu"],
        "host_memory_capacity": f"{machine['memory_gb']} GB" if machine["memory_gb"] else None,
        "accelerators_per_node": str(machine["gpus"] // nodes),
        "accelerator_model_name": machine["gpu"] or "none",
        "accelerator_memory_capacity": f"{memory} GB" if memory else None,
        "accelerator_frequency": f"{clock} MHz" if clock else None,
        "accelerator_interconnect": topology if topology.startswith("nvlink") else None,
        "accelerator_host_interconnect": topology if topology.startswith("pcie") else None,
        "framework": ", ".join(f"{name} {version}" for name, version in framework.items() if version),
        "other_software_stack": {name: version for name, version in stack.items() if version},
    }
    if not machine["gpus"]:
        # There are no accelerators to describe further.
        known |= {field: "none" for field in FIELDS if field.startswith("accelerator_") and field not in OPTIONAL}
    return {field: value for field, value in known.items() if value}


def write_description(path: Path, description: Mapping[str, Any]) -> bool:
    """Writes a description unless the file exists: it may have been edited. Returns whether it was written."""
    if path.exists():
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(description, indent=4, ensure_ascii=False) + "\n", encoding="utf-8")
    partial.replace(path)
    return True


def read_description(path: Path) -> dict[str, Any]:
    """Returns the description in a file; ValueError, naming the file, if it holds none."""
    try:
        description = read_json(path)
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}): build the package, or write the file") from error
    if not isinstance(description, dict):
        raise ValueError(f"{path} is not a system description: it holds {type(description).__name__}, not an object")
    return description


def missing_fields(description: Mapping[str, Any]) -> list[str]:
    """Returns the fields that the rules require and the description leaves empty; cores or virtual CPUs are enough."""
    empty = [field for field in FIELDS if field not in OPTIONAL and not description.get(field)]
    if description.get("host_processor_vcpu_count") and "host_processor_core_count" in empty:
        empty.remove("host_processor_core_count")
    return empty


def malformed_fields(path: Path, description: Mapping[str, Any]) -> Iterator[str]:
    """Yields a line for each field that is absent or of another type, which makes MLPerf's checkers fail or crash."""
    for field in FIELDS:
        if field not in description:
            yield f"{path}: the field {field} is missing: add it"
        elif not isinstance(description[field], str) and field != "other_software_stack":
            value = description[field]
            text = "" if value is None else str(value)
            yield f"{path}: {field} is {json.dumps(value)}, which is no text: write {json.dumps(text)}"
        elif field in COUNTS and description[field] and not description[field].isdigit():
            yield f'{path}: {field} is "{description[field]}", which is no whole number: write one, such as "1"'


def system_id(name: str) -> str:
    """Returns a valid folder name for a system or an organisation: without spaces, not beginning with a dot."""
    return re.sub(r"[^\w.+-]+", "_", name).lstrip(".") or "unnamed"
