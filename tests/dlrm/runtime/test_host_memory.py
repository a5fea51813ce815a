"""Memory that is left, on a node and in a container."""

from pathlib import Path

import pytest

from dlrm_bench.dlrm.runtime.host_memory import free_memory_bytes, node_memory_bytes

MEMINFO = "MemTotal:       9000 kB\nMemFree:         100 kB\nMemAvailable:   8192 kB\nHugePages_Total:       0\n"
KB = 1024


def node(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": MEMINFO, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "total", "free"),
    [
        ({}, 9000 * KB, 8192 * KB),
        (
            {
                "sys/fs/cgroup/memory.max": "max\n",
                "sys/fs/cgroup/memory.current": "5\n",
                "sys/fs/cgroup/memory.stat": "inactive_file 0\n",
            },
            9000 * KB,
            8192 * KB,
        ),
        (
            {
                "sys/fs/cgroup/memory.max": "4000\n",
                "sys/fs/cgroup/memory.current": "3000\n",
                "sys/fs/cgroup/memory.stat": "anon 2100\ninactive_file 900\n",
            },
            4000,
            1900,
        ),
        (
            {
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "4000\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "4100\n",
                "sys/fs/cgroup/memory/memory.stat": "inactive_file 1\ntotal_inactive_file 0\n",
            },
            4000,
            0,
        ),
    ],
    ids=["node", "version 2 without a limit", "version 2", "version 1, over its limit"],
)
def test_the_containers_limit_counts(tmp_path, files, total, free):
    root = node(tmp_path, files)
    assert (node_memory_bytes(root), free_memory_bytes(root)) == (total, free)


def test_this_node_has_memory():
    assert 0 < free_memory_bytes() <= node_memory_bytes()
