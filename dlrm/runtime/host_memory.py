"""Memory of this node: the total, and the amount available to a run."""

from pathlib import Path

_LIMITS = (
    ("sys/fs/cgroup", "memory.max", "memory.current"),
    ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
)
"""Folder of control groups, and the files with a container's limit and usage, in control group versions 2 and 1."""


def node_memory_bytes(root: Path = Path("/")) -> int:
    """Returns the memory of this node, or the container's limit if that is smaller."""
    return min([_meminfo(root)["MemTotal"], *(limit for limit, _ in _containers(root))])


def free_memory_bytes(root: Path = Path("/")) -> int:
    """Returns the memory available to a run, in bytes: free memory and page cache, within the container's limit."""
    return min([_meminfo(root)["MemAvailable"], *(max(0, limit - used) for limit, used in _containers(root))])


def _meminfo(root: Path) -> dict[str, int]:
    """Returns the fields of proc_meminfo(5), in bytes."""
    lines = (line.split() for line in (root / "proc/meminfo").read_text().splitlines())
    return {name.rstrip(":"): 1024 * int(value) for name, value, *_ in lines}


def _containers(root: Path) -> list[tuple[int, int]]:
    """Returns limit and usage of the control group, in bytes; usage excludes the page cache that the kernel frees
    first."""
    found = []
    for folder, limit, usage in _LIMITS:
        group = root / folder
        try:
            fields = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            cache = int(fields.get("total_inactive_file", fields.get("inactive_file", 0)))
            # Version 2 writes `max` if there is no limit.
            found.append((int((group / limit).read_text()), int((group / usage).read_text()) - cache))
        except (OSError, ValueError):
            continue
    return found
