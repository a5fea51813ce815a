"""Facts about a node's processors from Linux; None for a fact that Linux does not give."""

import contextlib
import os
from pathlib import Path
from statistics import median

_CPUS = Path("/sys/devices/system/cpu")
_NODES = Path("/sys/devices/system/node")
_INFO = Path("/proc/cpuinfo")
_PCI = Path("/sys/bus/pci/devices")
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def name() -> str | None:
    """Returns the model; ARM processors give no name."""
    names = _of_cpuinfo("model name")
    return names[0] if names else None


def clocks_mhz() -> list[float] | None:
    """Returns [min, median, max] of the cores' current clocks; virtual machines often see a constant."""
    clocks = [float(value) for value in _of_cpuinfo("cpu MHz")]
    return [round(value, 1) for value in (min(clocks), median(clocks), max(clocks))] if clocks else None


def largest_clock_mhz() -> float | None:
    """Returns the largest clock of CPU 0."""
    text = _text(_CPUS / "cpu0/cpufreq/cpuinfo_max_freq")
    return int(text) / 1000 if text else None


def governor() -> str | None:
    """Returns the scaling governors of all CPUs, one name if they agree."""
    found = sorted({text for path in _CPUS.glob("cpu[0-9]*/cpufreq/scaling_governor") if (text := _text(path))})
    return " + ".join(found) or None


def numa_nodes() -> list[str]:
    """Returns the CPUs of each NUMA node, as ranges."""
    nodes = sorted(_NODES.glob("node[0-9]*"), key=lambda node: int(node.name.removeprefix("node")))
    return [_text(node / "cpulist") or "" for node in nodes]


def numa_node_of_pci(bus_id: str | None) -> int | None:
    """Returns the NUMA node of a PCI device such as '00000000:1b:00.0'; None if Linux does not know it."""
    text = _text(_PCI / bus_id.lower().removeprefix("0000") / "numa_node") if bus_id else None
    return int(text) if text and int(text) >= 0 else None


def allowed_cpus() -> str | None:
    """Returns the CPUs on which this process may run, as ranges."""
    try:
        return ranges(sorted(os.sched_getaffinity(0)))
    except (AttributeError, OSError):  # not on Linux
        return None


def boot_id() -> str | None:
    """Returns the random id that Linux makes at each boot."""
    return _text(_BOOT)


def ranges(numbers: list[int]) -> str:
    """Returns ranges of increasing numbers, as Linux writes them: '0-3,8'."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def _of_cpuinfo(key: str) -> list[str]:
    lines = (line.partition(":") for line in (_text(_INFO) or "").splitlines())
    return [value.strip() for name, _, value in lines if name.strip() == key]


def _text(path: Path) -> str | None:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return path.read_text(encoding="utf-8").strip()
    return None
