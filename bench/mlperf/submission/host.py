"""Facts about a node for a system description that no record of a run has: processors, storage, network cards, OS."""

import json
import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dlrm_bench.bench.machine.description import readable


def describe_host() -> dict[str, str]:
    """Returns the fields of MLPerf's system description that are known on this node."""
    fields: dict[str, str | None] = {
        **_processors(readable(lambda: _json_of("lscpu", "--json")) or {}),
        **_storage(readable(lambda: _json_of("lsblk", "--json", "--nodeps", "--bytes", "--output", _COLUMNS)) or {}),
        "host_networking": readable(_network_cards),
        "operating_system": readable(lambda: platform.freedesktop_os_release()["PRETTY_NAME"]),
    }
    return {field: value for field, value in fields.items() if value}


_COLUMNS = "NAME,SIZE,ROTA,TYPE,TRAN"


def _json_of(*command: str) -> Any:
    """Returns the JSON output of a command, in the C locale."""
    env = os.environ | {"LC_ALL": "C"}
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, env=env).stdout
    return json.loads(output)


def _processors(lscpu: Mapping[str, Any]) -> dict[str, str | None]:
    facts = {str(row["field"]).rstrip(":"): str(row["data"]) for row in _rows(lscpu.get("lscpu", []))}
    caches = [f"{name.removesuffix(' cache')}: {facts[name]}" for name in facts if name.endswith(" cache")]
    fastest = facts.get("CPU max MHz")
    return {
        "host_processors_per_node": facts.get("Socket(s)"),
        "host_processor_core_count": facts.get("Core(s) per socket"),
        "host_processor_vcpu_count": facts.get("CPU(s)"),
        "host_processor_frequency": f"{float(fastest):.0f} MHz" if fastest else None,
        "host_processor_caches": ", ".join(caches),
    }


def _rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns all rows of lscpu, which newer versions nest."""
    return [row for outer in rows for row in (outer, *_rows(outer.get("children", [])))]


def _storage(lsblk: Mapping[str, Any]) -> dict[str, str | None]:
    disks = [disk for disk in lsblk.get("blockdevices", []) if disk["type"] == "disk" and int(disk["size"] or 0)]
    kinds = ["NVMe SSD" if disk["tran"] == "nvme" else "HDD" if disk["rota"] else "SSD" for disk in disks]
    sizes = [f"{int(disk['size']) / 1e12:.2f} TB" for disk in disks]
    counted = {size: sizes.count(size) for size in sizes}
    return {
        "host_storage_type": " + ".join(dict.fromkeys(kinds)),
        "host_storage_capacity": " + ".join(f"{count}x {size}" for size, count in counted.items()),
    }


def _network_cards() -> str:
    """Returns InfiniBand devices with their rates, and hardware Ethernet cards with their speeds."""
    rates = [rate.read_text().strip() for rate in sorted(Path("/sys/class/infiniband").glob("*/ports/1/rate"))]
    for card in sorted(Path("/sys/class/net").iterdir()):
        megabits = readable(lambda card=card: int((card / "speed").read_text()))  # type: ignore[misc]
        if (card / "device").exists() and not (card / "device" / "infiniband").exists() and (megabits or 0) > 0:
            rates.append(f"{(megabits or 0) / 1000:g} Gb/s Ethernet")
    return ", ".join(f"{rates.count(rate)}x {rate}" for rate in dict.fromkeys(rates))
