from pathlib import Path

import pytest

from dlrm_bench.bench.machine import cpu


def test_ranges() -> None:
    assert [cpu.ranges(numbers) for numbers in ([], [3], [0, 1, 2, 5, 7, 8])] == ["", "3", "0-2,5,7-8"]


def test_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in {
        "cpu/cpu0/cpufreq/scaling_governor": "performance\n",
        "cpu/cpu1/cpufreq/scaling_governor": "powersave\n",
        "cpu/cpu0/cpufreq/cpuinfo_max_freq": "3800000\n",
        "node/node0/cpulist": "0-31,64-95\n",
        "node/node10/cpulist": "96\n",
        "node/node2/cpulist": "32-63\n",
        "pci/0000:1b:00.0/numa_node": "1\n",
        "pci/0000:1c:00.0/numa_node": "-1\n",
        "cpuinfo": "model name\t: A CPU\ncpu MHz\t\t: 1000.04\nmodel name\t: A CPU\ncpu MHz\t\t: 3000.0\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for name, path in {"_CPUS": "cpu", "_NODES": "node", "_PCI": "pci", "_INFO": "cpuinfo"}.items():
        monkeypatch.setattr(cpu, name, tmp_path / path)
    assert (cpu.name(), cpu.governor()) == ("A CPU", "performance + powersave")
    assert (cpu.clocks_mhz(), cpu.largest_clock_mhz()) == ([1000.0, 2000.0, 3000.0], 3800.0)
    assert cpu.numa_nodes() == ["0-31,64-95", "32-63", "96"]
    assert [cpu.numa_node_of_pci(f"00000000:{bus}:00.0") for bus in ("1b", "1c", "1d")] == [1, None, None]


def test_what_linux_does_not_say_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_CPUS", "_NODES", "_PCI", "_INFO", "_BOOT"):
        monkeypatch.setattr(cpu, name, tmp_path / "none")
    assert (cpu.name(), cpu.governor(), cpu.clocks_mhz(), cpu.largest_clock_mhz(), cpu.boot_id()) == (None,) * 5
    assert (cpu.numa_nodes(), cpu.numa_node_of_pci("00000000:1b:00.0"), cpu.numa_node_of_pci(None)) == ([], None, None)
